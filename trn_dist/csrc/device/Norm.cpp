// Vector norms with sums in float64, on demand.
//
// PyTorch's CPU kernel adds the squares of a float32 tensor in float32, one after the other in each vector lane: for half a
// million elements that is off by 7e-5, and by less for each shard of the same tensor. The global gradient norm of DDP and of
// FSDP2 then differs in the fifth digit although the gradients are equal to the bit. With float64 sums the norm does not
// depend on the sharding beyond its last digit, but it is no longer the bits of device "cpu".

#include "device/Norm.h"

#include "device/Fallback.h"

#include <torch/library.h>

#include <atomic>

namespace trn {

namespace {

std::atomic<bool> enabled{false};

at::Tensor narrow(const at::Tensor& tensor) {
  return tensor.to(at::kFloat);
}

// Whether the first tensor of `input`, a tensor or a list of tensors, is float32.
bool is_float32(const c10::IValue& input) {
  if (input.isTensor()) {
    return input.toTensor().scalar_type() == at::kFloat;
  }
  const auto tensors = input.toListRef();
  return !tensors.empty() && tensors[0].toTensor().scalar_type() == at::kFloat;
}

// Both operators take the dtype of the sum as their last argument and the tensor or tensors as their first.
void norm(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (!float64_norm() || !stack->back().isNone() ||
      !is_float32((*stack)[stack->size() - op.schema().arguments().size()])) {
    fallback(op, keys, stack);
    return;
  }
  stack->back() = at::kDouble;
  fallback(op, keys, stack);
  c10::IValue& result = stack->back();
  if (result.isTensor()) {
    result = narrow(result.toTensor());
    return;
  }
  c10::List<at::Tensor> narrowed;
  for (const at::Tensor& tensor : result.toTensorVector()) {
    narrowed.push_back(narrow(tensor));
  }
  result = std::move(narrowed);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("linalg_vector_norm", torch::CppFunction::makeFromBoxedFunction<&norm>());
  m.impl("_foreach_norm.Scalar", torch::CppFunction::makeFromBoxedFunction<&norm>());
}

} // namespace

void set_float64_norm(bool on) {
  enabled.store(on, std::memory_order_relaxed);
}

bool float64_norm() {
  return enabled.load(std::memory_order_relaxed);
}

} // namespace trn
