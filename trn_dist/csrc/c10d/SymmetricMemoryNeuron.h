#pragma once

// torch.distributed._symmetric_memory on neuron: buffers that the ranks of a group read and write in each other's HBM, and
// signals between them. Every rank maps its peers' arenas already (fabric/Fabric.h), so a rendezvous only tells where in
// them the buffers lie.
//
// [Note: Signals]
// As on CUDA a signal from rank s on channel c is the word c * size + s of the receiver's pad: 0 -> 1 by the sender, 1 -> 0
// by the receiver, so that programs may use the pad themselves. Operators run at once on the host: a barrier or wait returns
// when the signal is there, and put_signal when the previous one was taken. Beside each word lies when, in virtual time, the
// signal was sent and taken; it travels as a message of the group does (trn_dist/collectives, "send").
//
// [Note: Freed buffers]
// The ledger is credited when a rank frees its buffer. The host's memory under it is used again only once all ranks of every
// rendezvous have freed theirs, so that no peer reads what has become another tensor.

#include "fabric/Communicator.h"

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <memory>
#include <vector>

namespace trn {

class ProcessGroupNeuron;

class SymmetricMemoryNeuron final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  // Collective over the group. `buffer`: `buffer_nbytes` bytes in the arena, behind which `pad_nbytes` of signals lie.
  SymmetricMemoryNeuron(
      ProcessGroupNeuron& group,
      c10::Device device,
      std::byte* buffer,
      uint64_t buffer_nbytes,
      uint64_t pad_nbytes);

  std::vector<void*> get_buffer_ptrs() override {
    return buffers_;
  }
  std::vector<void*> get_signal_pad_ptrs() override {
    return pads_;
  }
  void** get_buffer_ptrs_dev() override {
    return buffers_.data();
  }
  void** get_signal_pad_ptrs_dev() override {
    return pads_.data();
  }
  size_t get_buffer_size() override {
    return buffer_nbytes_;
  }
  size_t get_offset() override {
    return 0;
  }
  bool has_multicast_support() override {
    return false;
  }
  void* get_multicast_ptr() override {
    return nullptr;
  }
  // On the current stream of the device. A timeout of 0 ms is the group's, and then fails the group on every rank.
  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;
  int get_rank() override {
    return communicator_->rank();
  }
  int get_world_size() override {
    return communicator_->size();
  }
  c10::Device get_device() override {
    return device_;
  }
  const std::vector<int>& get_rank_to_global_rank() override {
    return communicator_->fabric_ranks_;
  }
  int* get_rank_to_global_rank_dev() override {
    return communicator_->fabric_ranks_.data();
  }
  bool world_within_direct_access() override {
    return true;
  }

  // For copies: how long bytes take on the link to the rank whose memory lies at an address; 0 where that is unknown.
  static Picoseconds link_time_ps(const void* address, int64_t nbytes);

  // Whether the group still lives on this rank.
  bool usable() const {
    return !communicator_->departed_;
  }
  // This rank has freed its buffer. [Note: Freed buffers]
  void leave();
  // Whether all ranks have, and nobody looks at this rank's part any more. After leave(); once true, not to be asked again.
  bool forsaken();

 private:
  struct Signal {
    std::atomic<uint32_t> sleepers;
    std::atomic<Picoseconds> sent_ps;
    std::atomic<Picoseconds> taken_ps;
  };
  // Before the signals, in the arena of each rank; only rank 0's is used.
  struct alignas(64) Header {
    std::atomic<uint32_t> left; // ranks that have freed their buffer
    std::atomic<uint32_t> noticed; // ranks that know that all have
  };
  size_t slot(int channel, int source, const char* what) const;
  std::atomic<uint32_t>& word(int rank, size_t slot) const {
    return static_cast<std::atomic<uint32_t>*>(pads_[rank])[slot];
  }
  Signal& signal(int rank, size_t slot) const {
    return reinterpret_cast<Signal*>(records_[rank] + sizeof(Header))[slot];
  }
  Header& header(int rank) const {
    return *reinterpret_cast<Header*>(records_[rank]);
  }
  // Waits until the word of `rank`'s pad is `goal`, which `peers` have to bring about.
  void wait_for(
      int rank,
      size_t slot,
      uint32_t goal,
      const std::vector<int>& peers,
      const char* call,
      int channel,
      size_t timeout_ms);
  // Sends at `ready` or, if that is later, when the previous signal was taken; returns when.
  Picoseconds send(int to, int channel, Picoseconds ready, const char* call, size_t timeout_ms);
  // Takes a signal; when it was sent.
  Picoseconds take(int from, int channel, Picoseconds ready, const char* call, size_t timeout_ms);
  Picoseconds flight_ps() const;
  void change(int rank, size_t slot, uint32_t value) const;
  void record(const char* call, uint64_t sequence, Transfer times);

  std::shared_ptr<Communicator> communicator_;
  GroupName name_;
  std::chrono::milliseconds timeout_;
  c10::Device device_;
  uint64_t buffer_nbytes_;
  uint64_t pad_words_;
  StagedBlock own_records_;
  std::vector<void*> buffers_;
  std::vector<void*> pads_;
  std::vector<std::byte*> records_;
  std::vector<uint64_t> barriers_; // by channel, for traces
};

// Makes them the symmetric memory of the device, and prices copies between ranks.
void register_symmetric_memory();

} // namespace trn
