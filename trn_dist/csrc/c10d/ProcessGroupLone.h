#pragma once

// The c10d backend "neuron" in timing mode, where one process stands for a job of many ranks: its peers are taken to do
// what it does at the same time. A collective is priced on the modelled cluster like any other and moves no bytes; what it
// leaves in a small tensor whose numbers are known follows from the peers having the same. Messages are refused, for a
// pipeline's stages do different things.

#include "timing/CollectiveCost.h"
#include "timing/VirtualClock.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trn {

class ProcessGroupLone final : public c10d::Backend {
 public:
  // `ranks`: of the group, in the job.
  ProcessGroupLone(int rank, int size, std::string name, std::vector<int> ranks);

  const std::string getBackendName() const override {
    return "neuron";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
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
  Ref<Work> launch(const char* operation, c10d::OpType type, const Tensors& inputs, Tensors outputs);
  [[noreturn]] void refuse(const char* operation) const;
  // The stream that shows the collectives of a device.
  c10::Stream stream_of(c10::DeviceIndex device);
  // What a reduction over equal peers leaves.
  void reduce_equal(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& reduction) const;

  const std::string name_;
  const std::vector<int> ranks_;
  std::mutex mutex_; // of what follows
  std::map<std::string, std::unique_ptr<SharedCostTable>> costs_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
  Picoseconds busy_until_ = 0;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
};

} // namespace trn
