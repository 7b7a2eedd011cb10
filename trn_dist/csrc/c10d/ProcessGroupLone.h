#pragma once

// The c10d backend "neuron" in timing mode, where one process stands for many ranks: its peers are taken to do what it does
// at the same time. A collective is priced on the modelled cluster like any other and moves no bytes; what it leaves in a
// small tensor whose numbers are known follows from the peers having the same.
//
// The stages of a pipeline do different things, so there is a process for each. A group in which several ranks have one
// meets through a Communicator of these, see [Note: Live ranks]: what is known there comes from the root of a broadcast or
// the sender of a message, and nothing else is.

#include "c10d/GroupStreams.h"
#include "fabric/Communicator.h"
#include "timing/CollectiveCost.h"
#include "timing/VirtualClock.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trn {

class ProcessGroupLone final : public c10d::Backend {
 public:
  // Collective over the ranks of the group that have a process: those of `live`, which names ranks of the job and is empty
  // where this process stands for all. `global_ranks` is empty for the job's default group.
  static c10::intrusive_ptr<ProcessGroupLone> create(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      std::chrono::milliseconds timeout,
      const std::string& name,
      const std::vector<int64_t>& global_ranks,
      const std::vector<int>& live);

  // `ranks`: of the group, in the job. `meeting`: of those that have a process, or nullptr.
  ProcessGroupLone(
      int rank,
      std::string name,
      std::vector<int> ranks,
      std::shared_ptr<Communicator> meeting,
      std::vector<int> live,
      std::chrono::milliseconds timeout);
  ~ProcessGroupLone() override;

  const std::string getBackendName() const override {
    return "neuron";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
  }
  void abort() override;
  void shutdown() override;
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return meeting_ != nullptr ? meeting_->next_sequence() : sequence_;
  }

  using Work = c10d::Work;
  template <typename T>
  using Ref = c10::intrusive_ptr<T>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  Ref<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  Ref<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  Ref<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  Ref<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  Ref<Work> allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  Ref<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  Ref<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts)
      override;
  Ref<Work> gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  Ref<Work> scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  Ref<Work> reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  Ref<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts)
      override;
  Ref<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts)
      override;
  Ref<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  Ref<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  Ref<Work> send(Tensors& tensors, int to, int tag) override;
  Ref<Work> recv(Tensors& tensors, int from, int tag) override;
  Ref<Work> recvAnysource(Tensors& tensors, int tag) override;
  Ref<Work> barrier(const c10d::BarrierOptions& opts) override;

 private:
  // `root`: of a broadcast, in the group.
  Ref<Work> launch(Collective operation, c10d::OpType type, const Tensors& inputs, Tensors outputs, int root = -1);
  // The same, together with the other processes.
  Ref<Work> meet(Collective operation, c10d::OpType type, const Tensors& inputs, Tensors outputs, int root);
  Ref<Work> start_message(c10d::OpType type, Tensors& tensors, int peer, int tag);
  Ref<Work> wrap(std::shared_ptr<Operation> operation, c10d::OpType type, Tensors outputs);
  GroupName group_name() const;
  // `to` gets what `from` has on all members, without a time of its own. Members that have a process may differ.
  void hand_over(const at::Tensor& to, const at::Tensor& from) const;
  // What a reduction over equal peers leaves.
  void reduce_equal(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& reduction) const;

  const std::string name_;
  const std::vector<int> ranks_;
  const std::shared_ptr<Communicator> meeting_; // nullptr: no other rank of the group has a process
  const std::vector<int> live_; // ranks of the group that do
  std::atomic<std::chrono::milliseconds> timeout_;
  GroupStreams streams_;
  std::mutex mutex_; // of what follows
  std::map<std::string, std::unique_ptr<SharedCostTable>> costs_;
  Picoseconds busy_until_ = 0;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
};

} // namespace trn
