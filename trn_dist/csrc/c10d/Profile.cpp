#include "c10d/Profile.h"

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <numeric>

namespace trn {

namespace {

int64_t numel(at::ArrayRef<at::Tensor> tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const at::Tensor& t) { return sum + t.numel(); });
}

// The distance between neighbours, or -1 where it is not always the same.
int stride_of(const std::vector<int>& ranks) {
  const int stride = ranks.size() > 1 ? ranks[1] - ranks[0] : 1;
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != stride) {
      return -1;
    }
  }
  return stride;
}

} // namespace

std::unique_ptr<at::RecordFunction> begin_event(const char* title, at::ArrayRef<at::Tensor> inputs) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (C10_LIKELY(!callbacks.has_value())) {
    return nullptr;
  }
  auto event = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  event->_setAsync();
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  event->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  return event;
}

bool comms_are_recorded() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

void record_comms(const CommsRecord& record, c10::function_ref<void()> call) {
  const at::ScalarType dtype = !record.inputs.empty() ? record.inputs[0].scalar_type()
      : !record.outputs.empty()                       ? record.outputs[0].scalar_type()
                                                      : at::kByte;
  const std::vector<int64_t> no_splits;
  const std::vector<at::Tensor> inputs = record.inputs.vec();
  const std::vector<at::Tensor> outputs = record.outputs.vec();
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(
      std::make_tuple(record.sequence, record.message),
      std::make_tuple(record.group, record.description),
      inputs,
      outputs,
      record.rank,
      std::string(record.collective),
      numel(record.inputs),
      numel(record.outputs),
      dtype,
      no_splits,
      no_splits,
      record.ranks.empty() ? -1 : record.ranks[0],
      record.ranks.empty() ? -1 : stride_of(record.ranks),
      static_cast<int>(record.ranks.size()),
      record.async);
  call();
}

} // namespace trn
