#pragma once

// Large reductions of a group whose hosts hold equal, aligned blocks of 2^k consecutive ranks: each host sums its block in
// shared memory, and only these partial sums travel, each rank's share over its own connection. By [Note: The tree] the
// result has the bits of the flat sum; partial sums of low precision travel in float32 and are rounded once, at the end.
//
// The call itself is posted in the group's slot like any other, without data: there it is compared and gets its virtual
// time. Then the steps below are carried out, in the order of the calls, by a thread of each rank, since unlike other
// collectives they need every rank more than once:
//   1. reduce_scatter within the host, of partial sums;
//   2. reduce_scatter among the ranks of the same place on each host;
//   3. for an all_reduce, all_gather of the rounded shares over the whole group.

#include "fabric/Communicator.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace trn {

class BlockReduction {
 public:
  // nullptr where the group does not have that shape. Collective over the group.
  static std::unique_ptr<BlockReduction> create(
      Communicator& group,
      const std::shared_ptr<Fabric>& fabric,
      const std::vector<int>& fabric_ranks,
      const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);
  ~BlockReduction();

  // Whether a call is carried out like this; the same on all ranks whose calls agree.
  static bool takes(const CollectiveCall& call);
  void enqueue(std::shared_ptr<CollectiveOperation> operation);
  void fail(const std::string& reason);
  // Ends after what was enqueued is done, at the latest after `patience`.
  void close(std::chrono::milliseconds patience);

 private:
  BlockReduction() = default;
  void work();
  void reduce_blocks(const CollectiveCall& call);
  void run(Communicator& communicator, CollectiveCall&& call, std::chrono::milliseconds timeout);

  int block_ = 0; // ranks of a host
  int hosts_ = 0;
  int host_ = 0;
  int place_ = 0; // of this rank in its block
  std::shared_ptr<Communicator> local_; // this host's block
  std::shared_ptr<Communicator> peers_; // the ranks of the same place, by host
  std::shared_ptr<Communicator> whole_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<CollectiveOperation>> queue_;
  bool closing_ = false;
  std::thread thread_;
};

} // namespace trn
