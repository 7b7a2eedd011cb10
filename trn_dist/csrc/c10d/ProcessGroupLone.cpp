#include "c10d/ProcessGroupLone.h"

#include "c10d/Arguments.h"
#include "c10d/WorkNeuron.h"
#include "device/Device.h"
#include "device/Stream.h"
#include "device/TimingOnly.h"
#include "fabric/Exchange.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <numeric>
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

const at::Tensor* neuron_tensor(const Tensors& inputs, const Tensors& outputs) {
  const at::Tensor* found = nullptr;
  for (const Tensors* tensors : {&inputs, &outputs}) {
    for (const at::Tensor& tensor : *tensors) {
      found = tensor.is_privateuseone() ? &tensor : found;
    }
  }
  return found;
}

// Of the processes of the job, from the creation of the default group on. Never destroyed, as in ProcessGroupNeuron.
std::shared_ptr<Fabric>& world_fabric() {
  static auto* fabric = new std::shared_ptr<Fabric>();
  return *fabric;
}

} // namespace

c10::intrusive_ptr<ProcessGroupLone> ProcessGroupLone::create(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& name,
    const std::vector<int64_t>& global_ranks,
    const std::vector<int>& live) {
  std::vector<int> ranks(global_ranks.begin(), global_ranks.end());
  const bool is_default = ranks.empty();
  if (is_default) {
    ranks.resize(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  std::vector<int> places; // in the fabric
  std::vector<int> members; // of the group
  int own = -1; // among them
  for (size_t place = 0; place < live.size(); ++place) {
    const auto at = std::find(ranks.begin(), ranks.end(), live[place]);
    if (at != ranks.end()) {
      own = at - ranks.begin() == rank ? static_cast<int>(places.size()) : own;
      places.push_back(static_cast<int>(place));
      members.push_back(static_cast<int>(at - ranks.begin()));
    }
  }
  std::shared_ptr<Communicator> meeting;
  if (places.size() > 1) {
    TORCH_CHECK_VALUE(own >= 0, "neuron: rank ", rank, " of group ", name, " is not one that has a process");
    if (is_default) {
      world_fabric() = Fabric::rendezvous(store, own, static_cast<int>(live.size()), timeout);
      world_fabric()->name_ranks(live);
    }
    meeting = Communicator::create(world_fabric(), places, own, name, store, timeout, nullptr, {ranks, members});
  }
  return c10::make_intrusive<ProcessGroupLone>(
      rank, name, std::move(ranks), std::move(meeting), std::move(members), timeout);
}

ProcessGroupLone::ProcessGroupLone(
    int rank,
    std::string name,
    std::vector<int> ranks,
    std::shared_ptr<Communicator> meeting,
    std::vector<int> live,
    std::chrono::milliseconds timeout)
    : Backend(rank, static_cast<int>(ranks.size())),
      name_(std::move(name)),
      ranks_(std::move(ranks)),
      meeting_(std::move(meeting)),
      live_(std::move(live)),
      timeout_(timeout) {
  init();
}

ProcessGroupLone::~ProcessGroupLone() {
  shutdown();
}

void ProcessGroupLone::shutdown() {
  if (meeting_ != nullptr) {
    meeting_->depart();
  }
}

void ProcessGroupLone::abort() {
  if (meeting_ != nullptr) {
    meeting_->fail(c10::str("neuron: group ", name_, " was aborted by ", meeting_->rank_label(meeting_->rank())));
  }
  shutdown();
}

GroupName ProcessGroupLone::group_name() const {
  return group_name_of(*this, name_, *std::min_element(ranks_.begin(), ranks_.end()));
}

void ProcessGroupLone::hand_over(const at::Tensor& to, const at::Tensor& from) const {
  if (meeting_ != nullptr || !has_numbers(from)) {
    if (to.is_privateuseone()) {
      set_known(to, false);
    }
    return;
  }
  const UntimedScope untimed;
  at::Tensor target = to;
  target.copy_(from.reshape(to.sizes()));
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::launch(Collective collective, OpType type, const Tensors& inputs, Tensors outputs, int root) {
  if (meeting_ != nullptr) {
    return meet(collective, type, inputs, std::move(outputs), root);
  }
  const char* operation = collective_name(collective);
  LoneWork::Call call;
  const at::Tensor* of_device = neuron_tensor(inputs, outputs);
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
  call.group = group_name();
  if (of_device != nullptr) {
    call.stream = streams_[device].collectives;
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
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
    transfer.description = name_of(call.group.name);
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

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::meet(Collective operation, OpType type, const Tensors& inputs, Tensors outputs, int root) {
  CollectiveCall call;
  call.operation = operation;
  call.timeout = timeout_.load();
  const Tensors& described = inputs.empty() ? outputs : inputs;
  if (!described.empty()) {
    describe_by(call, described[0]);
  }
  const int64_t bytes = std::max(bytes_of(inputs), bytes_of(outputs));
  const at::Tensor* of_device = neuron_tensor(inputs, outputs);
  const auto root_place = std::find(live_.begin(), live_.end(), root);
  // By what all members see alike, and not by whether this one knows the numbers.
  const bool may_be_known = of_device == nullptr || bytes <= static_cast<int64_t>(kKnownBytes);
  if (root_place != live_.end() && may_be_known) {
    call.root = static_cast<int>(root_place - live_.begin());
    call.has_numbers = has_numbers(outputs.at(0));
    (root == getRank() ? call.inputs : call.outputs).push_back(logical_region(outputs[0]));
    keep(call, outputs[0]);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(
        of_device != nullptr || outputs.empty(),
        "neuron: timing mode (TRN_TIMING_ONLY) has a process for each pipeline stage, and what ",
        collective_name(operation),
        " of CPU tensors in group ",
        name_,
        " gives depends on ranks that have none; broadcast alone is possible there, from the first rank of a stage");
    for (const at::Tensor& output : outputs) {
      set_known(output, false);
    }
    call.virtual_nbytes = static_cast<uint64_t>(bytes);
  }
  meeting_->prepare_costs(operation);
  call.enqueued = enqueue_call(streams_, group_name(), of_device);
  return wrap(meeting_->post(std::move(call)), type, std::move(outputs));
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::wrap(std::shared_ptr<Operation> operation, OpType type, Tensors outputs) {
  const std::optional<c10::Stream> future_stream = streams_.hold(operation, outputs);
  auto work = c10::make_intrusive<WorkNeuron>(
      getRank(),
      type,
      std::vector<std::shared_ptr<Operation>>{std::move(operation)},
      std::move(outputs),
      future_stream);
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::start_message(OpType type, Tensors& tensors, int peer, int tag) {
  const bool sends = type == OpType::SEND;
  const char* name = sends ? "send" : "recv";
  check_one(tensors, name);
  check_tensor(tensors[0], name);
  const auto place = std::find(live_.begin(), live_.end(), peer);
  TORCH_CHECK_NOT_IMPLEMENTED(
      meeting_ != nullptr && place != live_.end(),
      "neuron: timing mode (TRN_TIMING_ONLY): ",
      name,
      " of rank ",
      getRank(),
      " of group ",
      name_,
      peer < 0 ? std::string(" from any rank") : c10::str(sends ? " to" : " from", " rank ", peer),
      ": messages are between the first ranks of pipeline stages, which have a process each and stand for the others. "
      "Pipeline parallelism is timed by trn train --timing-only");
  meeting_->prepare_message_costs();
  const at::Tensor& tensor = tensors[0];
  Region region = logical_region(tensor);
  if (sends && !has_numbers(tensor)) {
    region = {nullptr, region.nbytes, nullptr};
  }
  Enqueued enqueued = enqueue_call(streams_, group_name(), &tensor);
  const auto other = static_cast<int>(place - live_.begin());
  auto operation = sends
      ? meeting_->send(tensor, std::move(region), other, tag, timeout_.load(), std::move(enqueued))
      : meeting_->receive(tensor, std::move(region), other, tag, timeout_.load(), std::move(enqueued));
  return wrap(std::move(operation), type, tensors);
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

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return launch(Collective::Broadcast, OpType::BROADCAST, tensors, tensors, static_cast<int>(opts.rootRank));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto work = launch(Collective::AllReduce, OpType::ALLREDUCE, tensors, tensors);
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
  auto work = launch(Collective::Reduce, OpType::REDUCE, tensors, tensors);
  if (getRank() == opts.rootRank) {
    for (const at::Tensor& tensor : tensors) {
      reduce_equal(tensor, tensor, opts.reduceOp);
    }
  }
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  auto work = launch(Collective::AllGather, OpType::ALLGATHER, inputs, outputs.at(0));
  for (const at::Tensor& output : outputs[0]) {
    hand_over(output, inputs.at(0));
  }
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  auto work = launch(Collective::AllGather, OpType::_ALLGATHER_BASE, {input}, {output});
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
  auto work = launch(Collective::Gather, OpType::GATHER, inputs, flat);
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
  auto work = launch(Collective::Scatter, OpType::SCATTER, inputs.at(0), outputs);
  hand_over(outputs.at(0), inputs[0].at(static_cast<size_t>(getRank())));
  return work;
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  auto work = launch(Collective::ReduceScatter, OpType::REDUCE_SCATTER, inputs.at(0), outputs);
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
  auto work = launch(Collective::ReduceScatter, type, inputs, outputs);
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
  return launch(Collective::AllToAll, OpType::ALLTOALL_BASE, {input}, {output});
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupLone::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(output.is_privateuseone(), "neuron: timing mode has no all_to_all of CPU tensors");
    set_known(output, false);
  }
  return launch(Collective::AllToAll, OpType::ALLTOALL, inputs, outputs);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::barrier(const c10d::BarrierOptions&) {
  return launch(Collective::Barrier, OpType::BARRIER, {}, {});
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::send(Tensors& tensors, int to, int tag) {
  return start_message(OpType::SEND, tensors, to, tag);
}
c10::intrusive_ptr<c10d::Work> ProcessGroupLone::recv(Tensors& tensors, int from, int tag) {
  return start_message(OpType::RECV, tensors, from, tag);
}
c10::intrusive_ptr<c10d::Work> ProcessGroupLone::recvAnysource(Tensors& tensors, int tag) {
  return start_message(OpType::RECVANYSOURCE, tensors, -1, tag);
}

void ProcessGroupLone::startCoalescing() {
  coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupLone::endCoalescing() {
  coalescing_ = false;
  return c10::make_intrusive<JoinedWork>(getRank(), std::exchange(coalesced_, {}));
}

} // namespace trn
