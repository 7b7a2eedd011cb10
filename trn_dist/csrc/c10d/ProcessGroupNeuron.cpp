#include "c10d/ProcessGroupNeuron.h"

#include "c10d/Arguments.h"
#include "c10d/Profile.h"
#include "device/Device.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <map>
#include <numeric>

namespace trn {

namespace {

using c10d::OpType;
using std::chrono::milliseconds;

// The fabric of the job, from the creation of the default group to its destruction. Subgroups live on it.
struct World {
  std::mutex mutex;
  std::shared_ptr<Fabric> fabric;
};

World& world() {
  static auto* instance = new World();
  return *instance;
}

constexpr milliseconds kFlush{5000};

// Calls between startCoalescing and endCoalescing of this thread.
struct Coalescing {
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<at::Tensor> outputs;
};
// By the group's communicator, which keeps its address from serving another group.
thread_local std::map<std::shared_ptr<Communicator>, Coalescing> coalescing;

Coalescing* open_coalescing(const std::shared_ptr<Communicator>& communicator) {
  const auto found = coalescing.find(communicator);
  return found != coalescing.end() ? &found->second : nullptr;
}

// How profiles name a call: the event until its Work is done, and the collective in "record_param_comms".
struct CallNames {
  const char* event;
  const char* collective;
};

CallNames names_of(OpType type) {
  switch (type) {
    case OpType::BROADCAST:
      return {"neuron:broadcast", "broadcast"};
    case OpType::ALLREDUCE:
      return {"neuron:all_reduce", "allreduce"};
    case OpType::ALLREDUCE_COALESCED:
      return {"neuron:all_reduce_coalesced", "allreduce_coalesced"};
    case OpType::REDUCE:
      return {"neuron:reduce", "reduce"};
    case OpType::ALLGATHER:
      return {"neuron:all_gather", "all_gather"};
    case OpType::_ALLGATHER_BASE:
      return {"neuron:_all_gather_base", "_allgather_base"};
    case OpType::ALLGATHER_COALESCED:
      return {"neuron:all_gather_coalesced", "allgather_coalesced"};
    case OpType::GATHER:
      return {"neuron:gather", "gather"};
    case OpType::SCATTER:
      return {"neuron:scatter", "scatter"};
    case OpType::REDUCE_SCATTER:
      return {"neuron:reduce_scatter", "reduce_scatter"};
    case OpType::_REDUCE_SCATTER_BASE:
      return {"neuron:_reduce_scatter_base", "_reduce_scatter_base"};
    case OpType::REDUCE_SCATTER_TENSOR_COALESCED:
      return {"neuron:reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced"};
    case OpType::ALLTOALL_BASE:
      return {"neuron:all_to_all", "all_to_allv"};
    case OpType::ALLTOALL:
      return {"neuron:all_to_all", "all_to_all"};
    case OpType::COALESCED:
      return {"neuron:all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced"};
    case OpType::SEND:
      return {"neuron:send", "send"};
    case OpType::RECV:
      return {"neuron:recv", "recv"};
    case OpType::RECVANYSOURCE:
      return {"neuron:recvAnySource", "recv"};
    case OpType::BARRIER:
      return {"neuron:barrier", "barrier"};
    default:
      return {"neuron:unknown", "unknown"};
  }
}

} // namespace

// ---- Life -----------------------------------------------------------------------------------------------------------

c10::intrusive_ptr<ProcessGroupNeuron> ProcessGroupNeuron::create(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    milliseconds timeout,
    const std::string& group_name,
    const std::vector<int64_t>& global_ranks) {
  TORCH_CHECK_VALUE(
      timeout.count() > 0, "neuron: a process group needs a timeout above zero, got ", timeout.count(), " ms");
  std::shared_ptr<Fabric> fabric;
  std::vector<int> fabric_ranks(size);
  bool owns_fabric = false;
  {
    std::lock_guard<std::mutex> guard(world().mutex);
    fabric = world().fabric;
  }
  if (global_ranks.empty() || fabric == nullptr) {
    // The default group, or a group of a job whose default group has another backend: a fabric of its own.
    fabric = Fabric::rendezvous(store, rank, size, timeout);
    std::iota(fabric_ranks.begin(), fabric_ranks.end(), 0);
    owns_fabric = true;
    if (global_ranks.empty()) {
      std::lock_guard<std::mutex> guard(world().mutex);
      world().fabric = fabric;
    }
  } else {
    TORCH_CHECK_VALUE(
        global_ranks.size() == static_cast<size_t>(size),
        "neuron: group ",
        group_name,
        " has ",
        size,
        " ranks, but names ",
        global_ranks.size());
    for (int r = 0; r < size; ++r) {
      TORCH_CHECK_VALUE(
          global_ranks[r] >= 0 && global_ranks[r] < fabric->size(),
          "neuron: group ",
          group_name,
          " names rank ",
          global_ranks[r],
          ", and the job has ",
          fabric->size());
      fabric_ranks[r] = static_cast<int>(global_ranks[r]);
    }
  }
  auto communicator = Communicator::create(fabric, fabric_ranks, rank, group_name, store, timeout);
  return c10::make_intrusive<ProcessGroupNeuron>(
      store, std::move(fabric), std::move(communicator), std::move(fabric_ranks), owns_fabric, timeout);
}

ProcessGroupNeuron::ProcessGroupNeuron(
    c10::intrusive_ptr<c10d::Store> store,
    std::shared_ptr<Fabric> fabric,
    std::shared_ptr<Communicator> communicator,
    std::vector<int> fabric_ranks,
    bool owns_fabric,
    milliseconds timeout)
    : Backend(communicator->rank(), communicator->size()),
      store_(std::move(store)),
      fabric_(std::move(fabric)),
      communicator_(std::move(communicator)),
      fabric_ranks_(std::move(fabric_ranks)),
      first_rank_(*std::min_element(fabric_ranks_.begin(), fabric_ranks_.end())),
      owns_fabric_(owns_fabric),
      timeout_ms_(timeout.count()) {
  init();
}

ProcessGroupNeuron::~ProcessGroupNeuron() {
  shutdown();
}

void ProcessGroupNeuron::shutdown() {
  coalescing.erase(communicator_); // left open by an exception
  communicator_->depart();
  if (owns_fabric_) {
    std::lock_guard<std::mutex> guard(world().mutex);
    if (world().fabric == fabric_) {
      world().fabric = nullptr;
    }
    if (fabric_->network() != nullptr) {
      // What the other hosts wait for is on its way; a host that does not take it is given up.
      fabric_->network()->close(kFlush);
    }
  }
}

void ProcessGroupNeuron::abort() {
  communicator_->fail(
      c10::str(
          "neuron: group ",
          communicator_->name(),
          " was aborted by ",
          communicator_->rank_label(communicator_->rank())));
  shutdown();
}

// c10d's name for a new group, and with it the store that it gives, can differ from rank to rank: it counts the groups that a
// rank is in. What the members agree on is their ranks in this group, and how often these have been taken: c10d splits once for
// each device type, and the program may do so again.
c10::intrusive_ptr<c10d::Store> ProcessGroupNeuron::store_for(const char* purpose, const std::vector<int>& ranks) {
  const std::string key = c10::str(purpose, "/", c10::Join(",", ranks));
  std::lock_guard<std::mutex> guard(taken_mutex_);
  return c10::make_intrusive<c10d::PrefixStore>(c10::str(key, "/", taken_[key]++), store_);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNeuron::split(
    const c10::intrusive_ptr<c10d::Store>& /*store*/,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto self = std::find(ranks.begin(), ranks.end(), getRank());
  if (self == ranks.end()) {
    return nullptr;
  }
  std::vector<int> fabric_ranks;
  for (const int r : ranks) {
    TORCH_CHECK_VALUE(r >= 0 && r < getSize(), "neuron: split names rank ", r, " of a group of ", getSize());
    fabric_ranks.push_back(fabric_ranks_[r]);
  }
  auto prefixed = store_for("split", ranks);
  const int rank = static_cast<int>(self - ranks.begin());
  const milliseconds timeout = opts != nullptr ? opts->timeout : milliseconds(timeout_ms_.load());
  const std::string name = opts != nullptr && !opts->group_name.empty()
      ? opts->group_name
      : c10::str(communicator_->name(), ":split:", c10::Join(",", ranks));
  auto communicator = Communicator::create(fabric_, fabric_ranks, rank, name, prefixed, timeout);
  return c10::make_intrusive<ProcessGroupNeuron>(
      std::move(prefixed), fabric_, std::move(communicator), std::move(fabric_ranks), false, timeout);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNeuron::shrink(
    const std::vector<int64_t>& ranks_to_exclude,
    int shrink_flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) {
  std::vector<int> ranks;
  std::vector<int> fabric_ranks;
  for (int r = 0; r < getSize(); ++r) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), r) == ranks_to_exclude.end()) {
      ranks.push_back(r);
      fabric_ranks.push_back(fabric_ranks_[r]);
    }
  }
  if (shrink_flags != 0) {
    communicator_->fail(
        c10::str(
            "neuron: group ",
            communicator_->name(),
            " was aborted by ",
            communicator_->rank_label(communicator_->rank()),
            " to shrink it"));
  }
  const milliseconds timeout = opts_override != nullptr ? opts_override->timeout : milliseconds(timeout_ms_.load());
  auto communicator = communicator_->shrink(ranks, communicator_->name() + ":shrunk", timeout);
  return c10::make_intrusive<ProcessGroupNeuron>(
      store_for("shrunk", ranks), fabric_, std::move(communicator), std::move(fabric_ranks), false, timeout);
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupNeuron::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(milliseconds(timeout_ms_.load()));
  options->group_name = communicator_->name();
  options->global_ranks_in_group.assign(fabric_ranks_.begin(), fabric_ranks_.end());
  return options;
}

void ProcessGroupNeuron::setTimeout(milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "neuron: a timeout must be above zero, got ", timeout.count(), " ms");
  timeout_ms_ = timeout.count();
}

uint64_t ProcessGroupNeuron::getSequenceNumberForGroup() {
  return communicator_->next_sequence();
}

c10d::ErrorType ProcessGroupNeuron::getError() {
  return communicator_->failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

// ---- Launching ------------------------------------------------------------------------------------------------------

milliseconds ProcessGroupNeuron::timeout_or(milliseconds timeout) const {
  return timeout.count() > 0 ? timeout : milliseconds(timeout_ms_.load(std::memory_order_relaxed));
}

GroupName ProcessGroupNeuron::group_name() {
  return group_name_of(*this, communicator_->name(), first_rank_);
}

Enqueued ProcessGroupNeuron::enqueue(const Tensors& tensors) {
  return enqueue_call(streams_, group_name(), tensors.empty() ? nullptr : &tensors[0]);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::launch(CollectiveCall&& call, OpType type, Tensors outputs, milliseconds timeout, bool async) {
  call.timeout = timeout_or(timeout);
  communicator_->prepare_costs(call.operation);
  call.enqueued = enqueue(call.tensors);
  // The tensors are the inputs, then the outputs; or the same ones are both.
  const size_t count =
      call.tensors.size() > outputs.size() ? call.tensors.size() - outputs.size() : call.tensors.size();
  const Tensors inputs = comms_are_recorded() ? Tensors(call.tensors.begin(), call.tensors.begin() + count) : Tensors();
  auto event = begin_event(names_of(type).event, at::ArrayRef<at::Tensor>(call.tensors.data(), count));
  MemoryUses uses;
  for (const Region& region : call.inputs) {
    uses.push_back(use_of(region, /*written=*/false));
  }
  for (const Region& region : call.outputs) {
    uses.push_back(use_of(region, /*written=*/true));
  }
  sanitize(call.enqueued, collective_name(call.operation), uses, call.tensors);
  try {
    auto operation = recorded(type, inputs, outputs, async, [&] { return communicator_->post(std::move(call)); });
    return wrap(std::move(operation), type, std::move(outputs), async, std::move(uses), std::move(event));
  } catch (const c10::Error&) {
    communicator_->report_failure();
    throw;
  }
}

void ProcessGroupNeuron::sanitize(
    Enqueued& enqueued,
    const char* name,
    const MemoryUses& uses,
    const Tensors& tensors) {
  if (sanitizing() && enqueued.stream.has_value()) {
    const c10::Stream current = current_stream(enqueued.stream->device_index());
    enqueued.clock = sanitize_collective(*enqueued.stream, current, name_id(name), uses, tensors);
  }
}

std::shared_ptr<Operation> ProcessGroupNeuron::recorded(
    OpType type,
    const Tensors& inputs,
    const Tensors& outputs,
    bool async,
    c10::function_ref<std::shared_ptr<Operation>()> post) {
  if (!comms_are_recorded()) {
    return post();
  }
  std::shared_ptr<Operation> operation;
  record_comms(
      {names_of(type).collective,
       static_cast<int64_t>(communicator_->next_sequence()),
       c10d::isP2POp(type),
       communicator_->name(),
       getGroupDesc(),
       getRank(),
       fabric_ranks_,
       inputs,
       outputs,
       async},
      [&] { operation = post(); });
  return operation;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::wrap(
    std::shared_ptr<Operation> operation,
    OpType type,
    Tensors outputs,
    bool async,
    MemoryUses uses,
    std::unique_ptr<at::RecordFunction> event) {
  Coalescing* calls = open_coalescing(communicator_);
  const bool now = !async && calls == nullptr;
  if (now) {
    operation->finish();
    operation->join();
  } else if (calls != nullptr) {
    calls->operations.push_back(operation);
    calls->outputs.insert(calls->outputs.end(), outputs.begin(), outputs.end());
  }
  if (!operation->finished()) {
    operation->claim(std::move(uses));
  }
  const std::optional<c10::Stream> future_stream = streams_.hold(operation, outputs);
  if (now) {
    return nullptr; // as ProcessGroupNCCL's: there is nothing left to wait for
  }
  return c10::make_intrusive<WorkNeuron>(
      getRank(),
      type,
      std::vector<std::shared_ptr<Operation>>{std::move(operation)},
      std::move(outputs),
      future_stream,
      std::move(event));
}

void ProcessGroupNeuron::startCoalescing() {
  // One that is open already was left by an exception: what it has posted goes on, and nobody waits for it.
  coalescing[communicator_] = Coalescing();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::endCoalescing() {
  Coalescing* open = open_coalescing(communicator_);
  TORCH_CHECK(open != nullptr, "neuron: endCoalescing without startCoalescing of the same group");
  Coalescing calls = std::move(*open);
  coalescing.erase(communicator_);
  std::optional<c10::Stream> future_stream;
  if (!calls.outputs.empty() && is_neuron(calls.outputs[0])) {
    future_stream = streams_[calls.outputs[0].device().index()].futures;
  }
  return c10::make_intrusive<WorkNeuron>(
      getRank(), OpType::COALESCED, std::move(calls.operations), std::move(calls.outputs), future_stream);
}

void ProcessGroupNeuron::check_root(int64_t root, int64_t root_tensor, const char* name) const {
  TORCH_CHECK_VALUE(
      root >= 0 && root < getSize(), "neuron: ", name, ": root ", root, " is not a rank of a group of ", getSize());
  TORCH_CHECK_VALUE(root_tensor == 0, "neuron: ", name, " takes one tensor a rank, so rootTensor must be 0");
}

// ---- Collectives ----------------------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  check_one(tensors, "all_reduce");
  c10d::AllreduceCoalescedOptions coalesced;
  static_cast<c10d::AllreduceOptions&>(coalesced) = opts;
  return allreduce_coalesced(tensors, coalesced);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::allreduce_coalesced(
    Tensors& tensors,
    const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "neuron: all_reduce_coalesced needs at least one tensor");
  CollectiveCall call;
  call.operation = Collective::AllReduce;
  describe_by(call, tensors[0]);
  for (const auto& tensor : tensors) {
    check_contiguous(tensor, "all_reduce");
    check_same_dtype(tensor, tensors[0], "all_reduce");
    call.inputs.push_back(dense_region(tensor));
    call.outputs.push_back(dense_region(tensor));
    keep(call, tensor);
  }
  set_reduction(call, opts.reduceOp, "all_reduce");
  return launch(
      std::move(call),
      tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED,
      tensors,
      opts.timeout,
      opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_one(tensors, "broadcast");
  check_contiguous(tensors[0], "broadcast");
  check_root(opts.rootRank, opts.rootTensor, "broadcast");
  CollectiveCall call;
  call.operation = Collective::Broadcast;
  call.root = static_cast<int>(opts.rootRank);
  describe_by(call, tensors[0]);
  (call.root == getRank() ? call.inputs : call.outputs).push_back(dense_region(tensors[0]));
  keep(call, tensors[0]);
  return launch(std::move(call), OpType::BROADCAST, tensors, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  check_one(tensors, "reduce");
  check_contiguous(tensors[0], "reduce");
  check_root(opts.rootRank, opts.rootTensor, "reduce");
  CollectiveCall call;
  call.operation = Collective::Reduce;
  call.root = static_cast<int>(opts.rootRank);
  describe_by(call, tensors[0]);
  call.inputs.push_back(dense_region(tensors[0]));
  if (call.root == getRank()) {
    call.outputs.push_back(dense_region(tensors[0]));
  }
  keep(call, tensors[0]);
  set_reduction(call, opts.reduceOp, "reduce");
  return launch(std::move(call), OpType::REDUCE, tensors, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  check_one(inputs, "all_gather");
  TORCH_CHECK_VALUE(
      outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()),
      "neuron: all_gather needs a list of ",
      getSize(),
      " output tensors, got ",
      outputs.empty() ? 0 : outputs[0].size());
  const at::Tensor& input = inputs[0];
  check_tensor(input, "all_gather");
  CollectiveCall call;
  call.operation = Collective::AllGather;
  describe_by(call, input);
  call.inputs.push_back(logical_region(input));
  keep(call, input);
  for (const auto& output : outputs[0]) {
    check_tensor(output, "all_gather");
    check_same_dtype(output, input, "all_gather");
    call.outputs.push_back(logical_region(output));
    keep(call, output);
  }
  TORCH_CHECK_VALUE(
      outputs[0][getRank()].numel() == input.numel(),
      "neuron: all_gather: the input has ",
      input.numel(),
      " elements, and output ",
      getRank(),
      ", which is to receive it, has ",
      outputs[0][getRank()].numel());
  return launch(std::move(call), OpType::ALLGATHER, outputs[0], opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::allgather_into_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size() && !inputs.empty(),
      "neuron: all_gather_into_tensor needs as many outputs as inputs, got ",
      outputs.size(),
      " and ",
      inputs.size());
  CollectiveCall call;
  call.operation = Collective::AllGather;
  call.chunked_outputs = true;
  describe_by(call, inputs[0]);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_contiguous(inputs[i], "all_gather_into_tensor");
    check_contiguous(outputs[i], "all_gather_into_tensor");
    check_same_dtype(outputs[i], inputs[i], "all_gather_into_tensor");
    TORCH_CHECK_VALUE(
        outputs[i].numel() == inputs[i].numel() * getSize(),
        "neuron: all_gather_into_tensor: output tensor size must be equal to world_size times input tensor size, got ",
        outputs[i].numel(),
        " elements for ",
        getSize(),
        " times ",
        inputs[i].numel());
    call.inputs.push_back(dense_region(inputs[i]));
    keep(call, inputs[i]);
  }
  for (const auto& output : outputs) {
    call.outputs.push_back(dense_region(output));
    keep(call, output);
  }
  return launch(
      std::move(call),
      inputs.size() == 1 ? OpType::_ALLGATHER_BASE : OpType::COALESCED,
      outputs,
      opts.timeout,
      opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(
      outputs.size() == static_cast<size_t>(getSize()) && !inputs.empty(),
      "neuron: all_gather_coalesced needs ",
      getSize(),
      " lists of outputs, got ",
      outputs.size());
  CollectiveCall call;
  call.operation = Collective::AllGather;
  describe_by(call, inputs[0]);
  Tensors flat;
  for (size_t t = 0; t < inputs.size(); ++t) {
    check_tensor(inputs[t], "all_gather_coalesced");
    check_same_dtype(inputs[t], inputs[0], "all_gather_coalesced");
    call.inputs.push_back(logical_region(inputs[t]));
    keep(call, inputs[t]);
  }
  for (size_t t = 0; t < inputs.size(); ++t) {
    for (int r = 0; r < getSize(); ++r) {
      TORCH_CHECK_VALUE(
          outputs[r].size() == inputs.size() && outputs[r][t].numel() == inputs[t].numel(),
          "neuron: all_gather_coalesced: each list of outputs must have the sizes of the inputs");
      check_tensor(outputs[r][t], "all_gather_coalesced");
      check_same_dtype(outputs[r][t], inputs[0], "all_gather_coalesced");
      call.outputs.push_back(logical_region(outputs[r][t]));
      keep(call, outputs[r][t]);
      flat.push_back(outputs[r][t]);
    }
  }
  return launch(std::move(call), OpType::ALLGATHER_COALESCED, std::move(flat), opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  check_one(inputs, "gather");
  check_root(opts.rootRank, 0, "gather");
  const at::Tensor& input = inputs[0];
  check_tensor(input, "gather");
  CollectiveCall call;
  call.operation = Collective::Gather;
  call.root = static_cast<int>(opts.rootRank);
  describe_by(call, input);
  call.inputs.push_back(logical_region(input));
  keep(call, input);
  Tensors results;
  if (call.root == getRank()) {
    TORCH_CHECK_VALUE(
        outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()),
        "neuron: gather needs a list of ",
        getSize(),
        " output tensors on the root, got ",
        outputs.empty() ? 0 : outputs[0].size());
    for (const auto& output : outputs[0]) {
      check_tensor(output, "gather");
      check_same_dtype(output, input, "gather");
      TORCH_CHECK_VALUE(
          output.numel() == input.numel(),
          "neuron: gather needs outputs of the size of the input, got ",
          output.numel(),
          " elements for ",
          input.numel());
      call.outputs.push_back(logical_region(output));
      keep(call, output);
    }
    results = outputs[0];
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), "neuron: gather takes no outputs on a rank that is not the root");
    results = {input};
  }
  return launch(std::move(call), OpType::GATHER, std::move(results), opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  check_one(outputs, "scatter");
  check_root(opts.rootRank, 0, "scatter");
  const at::Tensor& output = outputs[0];
  check_tensor(output, "scatter");
  CollectiveCall call;
  call.operation = Collective::Scatter;
  call.root = static_cast<int>(opts.rootRank);
  describe_by(call, output);
  if (call.root == getRank()) {
    TORCH_CHECK_VALUE(
        inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(getSize()),
        "neuron: scatter needs a list of ",
        getSize(),
        " input tensors on the root, got ",
        inputs.empty() ? 0 : inputs[0].size());
    for (const auto& input : inputs[0]) {
      check_tensor(input, "scatter");
      check_same_dtype(input, output, "scatter");
      TORCH_CHECK_VALUE(
          input.numel() == output.numel(),
          "neuron: scatter needs inputs of the size of the output, got ",
          input.numel(),
          " elements for ",
          output.numel());
      call.inputs.push_back(logical_region(input));
      keep(call, input);
    }
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), "neuron: scatter takes no inputs on a rank that is not the root");
  }
  call.outputs.push_back(logical_region(output));
  keep(call, output);
  return launch(std::move(call), OpType::SCATTER, outputs, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  check_one(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(
      inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(getSize()),
      "neuron: reduce_scatter needs a list of ",
      getSize(),
      " input tensors, got ",
      inputs.empty() ? 0 : inputs[0].size());
  const at::Tensor& output = outputs[0];
  check_tensor(output, "reduce_scatter");
  CollectiveCall call;
  call.operation = Collective::ReduceScatter;
  describe_by(call, output);
  for (const auto& input : inputs[0]) {
    check_tensor(input, "reduce_scatter");
    check_same_dtype(input, output, "reduce_scatter");
    call.inputs.push_back(logical_region(input));
    keep(call, input);
  }
  TORCH_CHECK_VALUE(
      inputs[0][getRank()].numel() == output.numel(),
      "neuron: reduce_scatter: the output has ",
      output.numel(),
      " elements, and input ",
      getRank(),
      ", whose sum it is to receive, has ",
      inputs[0][getRank()].numel());
  call.outputs.push_back(logical_region(output));
  keep(call, output);
  set_reduction(call, opts.reduceOp, "reduce_scatter");
  return launch(std::move(call), OpType::REDUCE_SCATTER, outputs, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::_reduce_scatter_base(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::reduce_scatter_tensor_coalesced(
    Tensors& outputs,
    Tensors& inputs,
    const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size() && !inputs.empty(),
      "neuron: reduce_scatter_tensor needs as many outputs as inputs, got ",
      outputs.size(),
      " and ",
      inputs.size());
  CollectiveCall call;
  call.operation = Collective::ReduceScatter;
  call.chunked_inputs = true;
  describe_by(call, inputs[0]);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_contiguous(inputs[i], "reduce_scatter_tensor");
    check_contiguous(outputs[i], "reduce_scatter_tensor");
    check_same_dtype(outputs[i], inputs[i], "reduce_scatter_tensor");
    check_same_dtype(inputs[i], inputs[0], "reduce_scatter_tensor");
    TORCH_CHECK_VALUE(
        inputs[i].numel() == outputs[i].numel() * getSize(),
        "neuron: reduce_scatter_tensor: input tensor must be the same size as output size times world size, got ",
        inputs[i].numel(),
        " elements for ",
        outputs[i].numel(),
        " times ",
        getSize());
    call.inputs.push_back(dense_region(inputs[i]));
    keep(call, inputs[i]);
  }
  for (const auto& output : outputs) {
    call.outputs.push_back(dense_region(output));
    keep(call, output);
  }
  set_reduction(call, opts.reduceOp, "reduce_scatter_tensor");
  return launch(
      std::move(call),
      inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::REDUCE_SCATTER_TENSOR_COALESCED,
      outputs,
      opts.timeout,
      opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& opts) {
  check_contiguous(input, "all_to_all_single");
  check_contiguous(output, "all_to_all_single");
  check_same_dtype(output, input, "all_to_all_single");
  CollectiveCall call;
  call.operation = Collective::AllToAll;
  describe_by(call, input);
  const auto add = [&](c10::SmallVector<Region, 4>& regions,
                       bool& chunked,
                       const at::Tensor& tensor,
                       const std::vector<int64_t>& splits,
                       const char* side) {
    keep(call, tensor);
    if (!splits.empty()) {
      TORCH_CHECK_VALUE(
          splits.size() == static_cast<size_t>(getSize()),
          "neuron: all_to_all_single needs ",
          getSize(),
          " ",
          side,
          " splits, got ",
          splits.size());
      add_splits(regions, tensor, splits, side);
      return;
    }
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    TORCH_CHECK_VALUE(
        rows % getSize() == 0,
        "neuron: all_to_all_single without ",
        side,
        " splits needs a first dimension that ",
        getSize(),
        " divides, got ",
        rows);
    chunked = true;
    regions.push_back(dense_region(tensor));
  };
  add(call.inputs, call.chunked_inputs, input, input_splits, "input");
  add(call.outputs, call.chunked_outputs, output, output_splits, "output");
  return launch(std::move(call), OpType::ALLTOALL_BASE, {output}, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work>
ProcessGroupNeuron::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(
      outputs.size() == static_cast<size_t>(getSize()) && inputs.size() == outputs.size(),
      "neuron: all_to_all needs ",
      getSize(),
      " inputs and outputs, got ",
      inputs.size(),
      " and ",
      outputs.size());
  CollectiveCall call;
  call.operation = Collective::AllToAll;
  describe_by(call, inputs[0]);
  for (const auto* tensors : {&inputs, &outputs}) {
    for (const auto& tensor : *tensors) {
      check_tensor(tensor, "all_to_all");
      check_same_dtype(tensor, inputs[0], "all_to_all");
      (tensors == &inputs ? call.inputs : call.outputs).push_back(logical_region(tensor));
      keep(call, tensor);
    }
  }
  return launch(std::move(call), OpType::ALLTOALL, outputs, opts.timeout, opts.asyncOp);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::barrier(const c10d::BarrierOptions& opts) {
  CollectiveCall call;
  call.operation = Collective::Barrier;
  return launch(std::move(call), OpType::BARRIER, {}, opts.timeout, opts.asyncOp);
}

void ProcessGroupNeuron::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  CollectiveCall call;
  call.operation = Collective::Barrier;
  call.monitored = true;
  launch(std::move(call), OpType::BARRIER, {}, opts.timeout, /*async=*/false);
}

// ---- Messages -------------------------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::start_message(
    OpType type,
    Tensors& tensors,
    c10::function_ref<std::shared_ptr<Operation>(Region, Enqueued&&)> post) {
  const CallNames names = names_of(type);
  auto event = begin_event(names.event, tensors);
  const Region region = logical_region(tensors[0]);
  const MemoryUses uses = {use_of(region, /*written=*/type != OpType::SEND)};
  Enqueued enqueued = enqueue(tensors);
  sanitize(enqueued, names.collective, uses, tensors);
  auto operation = recorded(type, tensors, tensors, /*async=*/true, [&] { return post(region, std::move(enqueued)); });
  return wrap(std::move(operation), type, tensors, /*async=*/true, uses, std::move(event));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::send(Tensors& tensors, int to, int tag) {
  check_one(tensors, "send");
  check_tensor(tensors[0], "send");
  check_root(to, 0, "send");
  communicator_->prepare_message_costs();
  return start_message(OpType::SEND, tensors, [&](Region region, Enqueued&& enqueued) {
    return communicator_->send(tensors[0], region, to, tag, timeout_or(c10d::kUnsetTimeout), std::move(enqueued));
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::receive(Tensors& tensors, int from, int tag, OpType type) {
  check_one(tensors, "recv");
  communicator_->prepare_message_costs();
  check_tensor(tensors[0], "recv");
  return start_message(type, tensors, [&](Region region, Enqueued&& enqueued) {
    return communicator_->receive(tensors[0], region, from, tag, timeout_or(c10d::kUnsetTimeout), std::move(enqueued));
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::recv(Tensors& tensors, int from, int tag) {
  check_root(from, 0, "recv");
  return receive(tensors, from, tag, OpType::RECV);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNeuron::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, -1, tag, OpType::RECVANYSOURCE);
}

} // namespace trn
