#pragma once

// The c10d backend "neuron". Checks the arguments of each call, as ProcessGroupNCCL does, and hands the memory of the
// tensors to a Communicator. Serves neuron tensors in place, CPU tensors by one copy in and one out.

#include "c10d/GroupStreams.h"
#include "c10d/WorkNeuron.h"
#include "fabric/Communicator.h"

#include <ATen/record_function.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trn {

class ProcessGroupNeuron final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("neuron", timeout) {}
  };

  // Collective over the group. `global_ranks` is empty for a job's default group, whose creation makes the fabric.
  static c10::intrusive_ptr<ProcessGroupNeuron> create(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      std::chrono::milliseconds timeout,
      const std::string& group_name,
      const std::vector<int64_t>& global_ranks);

  ProcessGroupNeuron(
      c10::intrusive_ptr<c10d::Store> store,
      std::shared_ptr<Fabric> fabric,
      std::shared_ptr<Communicator> communicator,
      std::vector<int> fabric_ranks,
      bool owns_fabric,
      std::chrono::milliseconds timeout);
  ~ProcessGroupNeuron() override;

  const std::string getBackendName() const override {
    return "neuron";
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  bool supportsCoalescing() const override {
    return true;
  }
  bool supportsSplitting() const override {
    return true;
  }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;

  bool supportsShrinking() const override {
    return true;
  }
  // The group without `ranks_to_exclude`. With c10d's SHRINK_ABORT what is in flight is aborted first.
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude,
      int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  // Collectives called so far.
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  const std::shared_ptr<Fabric>& fabric() const {
    return fabric_;
  }
  void shutdown() override;

  const std::shared_ptr<Communicator>& communicator() const {
    return communicator_;
  }
  // As accounts and traces of virtual time show the group.
  GroupName group_name();

  using Work = c10d::Work;
  template <typename T>
  using Ref = c10::intrusive_ptr<T>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  Ref<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts = c10d::BroadcastOptions()) override;
  Ref<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts = c10d::AllreduceOptions()) override;
  Ref<Work> allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& opts = c10d::AllreduceCoalescedOptions()) override;
  Ref<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts = c10d::ReduceOptions()) override;
  Ref<Work> allgather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  Ref<Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  Ref<Work> allgather_coalesced(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  Ref<Work> allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts = c10d::AllgatherOptions()) override;
  Ref<Work> gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts = c10d::GatherOptions())
      override;
  Ref<Work> scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts = c10d::ScatterOptions())
      override;
  Ref<Work> reduce_scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  Ref<Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  Ref<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& opts = c10d::ReduceScatterOptions()) override;
  Ref<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts = c10d::AllToAllOptions()) override;
  Ref<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts = c10d::AllToAllOptions())
      override;
  Ref<Work> send(Tensors& tensors, int to, int tag) override;
  Ref<Work> recv(Tensors& tensors, int from, int tag) override;
  Ref<Work> recvAnysource(Tensors& tensors, int tag) override;
  // Names every rank that did not come; then the group has failed, as after any timeout.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  Ref<Work> barrier(const c10d::BarrierOptions& opts = c10d::BarrierOptions()) override;

 private:
  // Posts the call and wraps it. `outputs` are the Work's result. A call that is not `async` is carried out, and has none.
  Ref<Work>
  launch(CollectiveCall&& call, c10d::OpType type, Tensors outputs, std::chrono::milliseconds timeout, bool async);
  // Launches a call in virtual time, on the current stream of the tensors' device; a barrier's and CPU tensors' is for the
  // host.
  Enqueued enqueue(const Tensors& tensors);
  // Runs `post`, which is the call itself, with what the profiler is to know of it.
  std::shared_ptr<Operation> recorded(
      c10d::OpType type,
      const Tensors& inputs,
      const Tensors& outputs,
      bool async,
      c10::function_ref<std::shared_ptr<Operation>()> post);
  // A send or receive of tensors[0], which `post` hands to the fabric.
  Ref<Work> start_message(
      c10d::OpType type,
      Tensors& tensors,
      c10::function_ref<std::shared_ptr<Operation>(Region, Enqueued&&)> post);
  // `uses`: what the operation reads and writes.
  Ref<Work> wrap(
      std::shared_ptr<Operation> operation,
      c10d::OpType type,
      Tensors outputs,
      bool async,
      MemoryUses uses,
      std::unique_ptr<at::RecordFunction> event);
  // Shows an operation that is about to be posted to the stream sanitizer.
  void sanitize(Enqueued& enqueued, const char* name, const MemoryUses& uses, const Tensors& tensors);
  Ref<Work> receive(Tensors& tensors, int from, int tag, c10d::OpType type);
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds timeout) const;
  void check_root(int64_t root, int64_t root_tensor, const char* name) const;

  // Where the ranks of this group that form a new one meet.
  c10::intrusive_ptr<c10d::Store> store_for(const char* purpose, const std::vector<int>& ranks);

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Fabric> fabric_;
  std::shared_ptr<Communicator> communicator_;
  std::vector<int> fabric_ranks_;
  int first_rank_; // the lowest of them
  bool owns_fabric_;
  std::atomic<int64_t> timeout_ms_;
  std::mutex taken_mutex_;
  std::map<std::string, int> taken_; // see store_for
  GroupStreams streams_;
};

} // namespace trn
