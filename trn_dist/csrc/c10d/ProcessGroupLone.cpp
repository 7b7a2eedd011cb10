#include "c10d/ProcessGroupLone.h"

#include "device/Device.h"
#include "device/Stream.h"
#include "device/TimingOnly.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

namespace trn {

namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;

// A collective of a lone rank: it is known at once when it ends.
class LoneWork final : public c10d::Work {
 public:
  struct Call {
    std::optional<c10::Stream> stream; // that shows it; none: the host waits for it
    uint32_t name = 0;
    GroupName group{};
    uint64_t sequence = 0;
    int64_t bytes = 0;
    Transfer times{};
    int64_t transfer = -1;
    LaunchSite site{};
  };

  LoneWork(int rank, OpType type, Call call, Tensors outputs)
      : Work(rank, type), call_(std::move(call)), outputs_(std::move(outputs)) {}

  bool isCompleted() override {
    return host_poll(call_.times.end);
  }
  bool isSuccess() const override {
    return true;
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    enter();
    const Origin origin{Origin::Transfer, call_.transfer};
    if (call_.stream.has_value()) {
      stream_wait(current_stream(call_.stream->device_index()), call_.times.end, origin);
    } else {
      host_wait(call_.times.end, origin);
    }
    return true;
  }
  uint64_t getSequencenumber() const override {
    return call_.sequence;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_ == nullptr) {
      std::vector<c10::Device> devices;
      if (call_.stream.has_value()) {
        devices.push_back(call_.stream->device());
      }
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
      if (call_.stream.has_value()) {
        enter();
        const c10::Stream stream = new_stream(call_.stream->device_index());
        stream_wait(stream, call_.times.end, Origin{Origin::Transfer, call_.transfer});
        c10::StreamGuard guard(stream);
        future_->markCompleted(c10::IValue(outputs_));
      } else {
        wait();
        future_->markCompleted(c10::IValue(outputs_));
      }
    }
    return future_;
  }

 private:
  // Into the account of virtual time, once, where the program waits for it.
  void enter() {
    if (!entered_ && call_.stream.has_value()) {
      record_collective(
          *call_.stream, call_.name, call_.group, call_.sequence, call_.bytes, call_.times, call_.site, call_.transfer);
    }
    entered_ = true;
  }

  const Call call_;
  Tensors outputs_;
  bool entered_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several at once.
class JoinedWork final : public c10d::Work {
 public:
  JoinedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return true;
  }
  Tensors result() override {
    Tensors all;
    for (const auto& work : works_) {
      const Tensors part = work->result();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    for (const auto& work : works_) {
      work->wait();
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    wait();
    future->markCompleted(c10::IValue(result()));
    return future;
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Whether the numbers of a tensor are at hand: on the host they are.
bool has_numbers(const at::Tensor& tensor) {
  return !tensor.is_privateuseone() || known(tensor);
}

// `to` gets what `from` has, without a time of its own.
void hand_over(const at::Tensor& to, const at::Tensor& from) {
  if (!has_numbers(from)) {
    if (to.is_privateuseone()) {
      set_known(to, false);
    }
    return;
  }
  const UntimedScope untimed;
  at::Tensor target = to;
  target.copy_(from.reshape(to.sizes()));
}

} // namespace

ProcessGroupLone::ProcessGroupLone(int rank, int size, std::string name, std::vector<int> ranks)
    : Backend(rank, size), name_(std::move(name)), ranks_(std::move(ranks)) {
  init();
}

c10::Stream ProcessGroupLone::stream_of(c10::DeviceIndex device) {
  auto it = streams_.find(device);
  if (it == streams_.end()) {
    it = streams_.emplace(device, new_stream(device)).first;
  }
  return it->second;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::launch(const char* operation, OpType type, const Tensors& inputs, Tensors outputs) {
  LoneWork::Call call;
  const at::Tensor* of_device = nullptr;
  for (const Tensors* tensors : {&inputs, const_cast<const Tensors*>(&outputs)}) {
    for (const at::Tensor& tensor : *tensors) {
      of_device = tensor.is_privateuseone() ? &tensor : of_device;
    }
  }
  SharedCostTable* costs = nullptr;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& made = costs_[operation];
    if (made == nullptr) {
      made = std::make_unique<SharedCostTable>();
    }
    costs = made.get();
  }
  costs->prepare(ranks_, operation);
  call.bytes = std::max(bytes_of(inputs), bytes_of(outputs));
  call.name = name_id(operation);
  call.site = launch_site();
  const c10::DeviceIndex device = of_device != nullptr ? of_device->device().index() : current_device();
  const EnqueuedTransfer enqueued = trn::enqueue(current_stream(device));
  call.transfer = enqueued.transfer;
  const std::string& description = getGroupDesc();
  const std::string shown = description.empty() || description == "undefined" ? name_ : description;
  call.group = {name_id(shown), *std::min_element(ranks_.begin(), ranks_.end())};
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (of_device != nullptr) {
      call.stream = stream_of(device);
    }
    call.sequence = sequence_++;
    const Picoseconds start = std::max(enqueued.ready, busy_until_);
    busy_until_ = start + costs->time_ps(call.bytes);
    call.times = {enqueued.ready, start, busy_until_};
  }
  if (call.transfer >= 0) {
    RecordedTransfer transfer;
    transfer.role = RecordedTransfer::Collective;
    transfer.for_host = !call.stream.has_value();
    transfer.operation = operation;
    transfer.group = name_;
    transfer.description = shown;
    transfer.ranks = ranks_;
    transfer.sequence = call.sequence;
    transfer.bytes = call.bytes;
    if (call.stream.has_value()) {
      transfer.stream = static_cast<int32_t>(call.stream->id());
      transfer.device = device;
    }
    describe_transfer(call.transfer, std::move(transfer));
  }
  auto work = c10::make_intrusive<LoneWork>(getRank(), type, std::move(call), std::move(outputs));
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

void ProcessGroupLone::refuse(const char* operation) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "neuron: timing mode (TRN_TIMING_ONLY) has one process that stands for all ranks of group ",
      name_,
      " and takes them to do the same; ",
      operation,
      " is between ranks that do not. Pipeline parallelism needs a run with all its ranks.");
}

void ProcessGroupLone::reduce_equal(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& reduction)
    const {
  hand_over(output, input);
  if (!has_numbers(output)) {
    return;
  }
  const UntimedScope untimed;
  at::Tensor result = output;
  switch (reduction.op_) {
    case c10d::ReduceOp::SUM:
      result.mul_(getSize());
      break;
    case c10d::ReduceOp::PRODUCT:
      result.copy_(result.pow(getSize()));
      break;
    case c10d::ReduceOp::BXOR:
      if (getSize() % 2 == 0) {
        result.zero_();
      }
      break;
    case c10d::ReduceOp::PREMUL_SUM:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "neuron: timing mode has no PREMUL_SUM of known numbers");
    default: // of equal ones: average, minimum, maximum, and, or
      break;
  }
}

// ---- Collectives ----------------------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::broadcast(Tensors& tensors, const c10d::BroadcastOptions&) {
  return launch("broadcast", OpType::BROADCAST, tensors, tensors);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto work = launch("all_reduce", OpType::ALLREDUCE, tensors, tensors);
  for (const at::Tensor& tensor : tensors) {
    reduce_equal(tensor, tensor, opts.reduceOp);
  }
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  return allreduce(tensors, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  auto work = launch("reduce", OpType::REDUCE, tensors, tensors);
  if (getRank() == opts.rootRank) {
    for (const at::Tensor& tensor : tensors) {
      reduce_equal(tensor, tensor, opts.reduceOp);
    }
  }
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  auto work = launch("all_gather", OpType::ALLGATHER, inputs, outputs.at(0));
  for (const at::Tensor& output : outputs[0]) {
    hand_over(output, inputs.at(0));
  }
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  auto work = launch("all_gather", OpType::_ALLGATHER_BASE, {input}, {output});
  if (has_numbers(input) && (!output.is_privateuseone() || may_become_known(output))) {
    const UntimedScope untimed;
    std::vector<int64_t> repeats(1, getSize());
    hand_over(output, input.reshape({-1}).repeat(repeats));
  } else if (output.is_privateuseone()) {
    set_known(output, false);
  }
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  std::vector<Ref<Work>> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_allgather_base(outputs.at(i), inputs[i], opts));
  }
  return c10::make_intrusive<JoinedWork>(getRank(), std::move(works));
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions&) {
  Tensors flat = outputs.empty() ? inputs : outputs[0];
  auto work = launch("gather", OpType::GATHER, inputs, flat);
  for (const at::Tensor& output : outputs.empty() ? Tensors() : outputs[0]) {
    hand_over(output, inputs.at(0));
  }
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      opts.rootRank == getRank(),
      "neuron: timing mode: what a rank gets by scatter is known to the root of group ",
      name_,
      " alone");
  auto work = launch("scatter", OpType::SCATTER, inputs.at(0), outputs);
  hand_over(outputs.at(0), inputs[0].at(static_cast<size_t>(getRank())));
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  auto work = launch("reduce_scatter", OpType::REDUCE_SCATTER, inputs.at(0), outputs);
  reduce_equal(outputs.at(0), inputs[0].at(static_cast<size_t>(getRank())), opts.reduceOp);
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& opts) {
  const auto type = inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  auto work = launch("reduce_scatter", type, inputs, outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& output = outputs.at(i);
    if (has_numbers(inputs[i])) {
      reduce_equal(output, inputs[i].reshape({-1}).chunk(getSize()).at(static_cast<size_t>(getRank())), opts.reduceOp);
    } else if (output.is_privateuseone()) {
      set_known(output, false);
    }
  }
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>&,
    std::vector<int64_t>&,
    const c10d::AllToAllOptions&) {
  TORCH_CHECK_NOT_IMPLEMENTED(output.is_privateuseone(), "neuron: timing mode has no all_to_all of CPU tensors");
  set_known(output, false);
  return launch("all_to_all", OpType::ALLTOALL_BASE, {input}, {output});
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(output.is_privateuseone(), "neuron: timing mode has no all_to_all of CPU tensors");
    set_known(output, false);
  }
  return launch("all_to_all", OpType::ALLTOALL, inputs, outputs);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::barrier(const c10d::BarrierOptions&) {
  return launch("barrier", OpType::BARRIER, {}, {});
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::send(Tensors&, int, int) {
  refuse("a send");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupLone::recv(Tensors&, int, int) {
  refuse("a receive");
}
c10::intrusive_ptr<c10d::Work> ProcessGroupLone::recvAnysource(Tensors&, int) {
  refuse("a receive");
}

void ProcessGroupLone::startCoalescing() {
  coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::endCoalescing() {
  coalescing_ = false;
  return c10::make_intrusive<JoinedWork>(getRank(), std::exchange(coalesced_, {}));
}

} // namespace trn
