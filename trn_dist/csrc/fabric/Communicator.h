#pragma once

// One process group on the fabric: posts collectives and messages, finishes them by work stealing, and turns whatever goes
// wrong into an error on every rank. ProcessGroupNeuron (c10d/) translates c10d's calls into it.
//
// [Note: Progress]
// There are no progress threads. Whoever waits for an operation carries out what is left of it, also the share of a rank
// that is busy elsewhere, and looks after this process's other communicators while it sleeps. A rank that has posted is
// therefore never needed again for that collective.
//
// [Note: Giving way]
// With more ranks than processors, a rank that waits first yields its processor a few times. If the others only have to
// make the same call, all have made it after one round, and none pays for a sleep and a wake-up, which take three times as
// long as a switch. A yield also lets run what is no rank on its way to the call, for as long as the scheduler gives it,
// and then to sleep is better: whoever is woken comes before those that compute. So yields that took long are not tried
// again for a while.
//
// [Note: Locks]
// A communicator's mutex is held while its shared state is read or work is carried out, never while sleeping, never while
// Python may run, and never while a tensor may be freed (which can call into Python): tensors go to `retired_tensors_` and
// are dropped later, outside.

#include "fabric/ControlBlock.h"
#include "fabric/Exchange.h"
#include "fabric/Fabric.h"
#include "fabric/Host.h"
#include "fabric/Network.h"
#include "fabric/Operation.h"
#include "fabric/Region.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace trn {

class BlockReduction;
class CollectiveOperation;
class PointToPoint;

// [Note: Live ranks]
// In timing mode one process stands for many ranks. Where several processes do, one a pipeline stage, the members of a
// communicator are those ranks of a group that have a process. They meet in virtual time, and what the group costs is the
// whole group's. Nothing is moved but small tensors whose numbers are known, see [Note: Known numbers].
struct VirtualGroup {
  std::vector<int> ranks; // of the whole group, in the job; empty outside of timing mode
  std::vector<int> live; // the members' ranks in the group
};

struct CollectiveCall {
  Collective operation = Collective::Barrier;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  Reduction reduction = Reduction::Sum;
  double factor = 1; // of this rank, for PremulSum
  int root = 0;
  // A list, or with chunked_* one region a tensor that is cut in equal parts, one a rank. In place where they coincide.
  c10::SmallVector<Region, 4> inputs;
  c10::SmallVector<Region, 4> outputs;
  bool chunked_inputs = false;
  bool chunked_outputs = false;
  bool monitored = false; // a barrier that the program calls monitored_barrier
  uint64_t virtual_nbytes = 0; // without regions: what it would move. [Note: Live ranks]
  bool has_numbers = true; // what the root of a broadcast gives; in timing mode it may not
  c10::SmallVector<int64_t, 6> shape; // of the first tensor, for messages
  std::vector<at::Tensor> tensors; // kept alive until the collective is done
  Enqueued enqueued;
  std::chrono::milliseconds timeout{0};
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Collective over the group. fabric_ranks[r] is the place in the fabric of group rank r. `for_group_of`: a communicator
  // that does part of the work of that group, which accounts for the virtual time.
  static std::shared_ptr<Communicator> create(
      std::shared_ptr<Fabric> fabric,
      std::vector<int> fabric_ranks,
      int rank,
      std::string name,
      const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout,
      const Communicator* for_group_of = nullptr,
      VirtualGroup virtual_group = {});
  ~Communicator();

  // The group of `ranks` of this one, all of which must call it, without the others, which may be dead. Needs no store: that
  // may be gone with them. Throws when a rank it needs is not there within `timeout`.
  std::shared_ptr<Communicator>
  shrink(const std::vector<int>& ranks, std::string name, std::chrono::milliseconds timeout);

  // Has the costs of an operation worked out. Without any lock held.
  void prepare_costs(Collective operation);
  void prepare_message_costs();

  std::shared_ptr<Operation> post(CollectiveCall&& call);
  std::shared_ptr<Operation>
  send(const at::Tensor& tensor, Region region, int to, int tag, std::chrono::milliseconds timeout, Enqueued enqueued);
  // from < 0: any source
  std::shared_ptr<Operation> receive(
      const at::Tensor& tensor,
      Region region,
      int from,
      int tag,
      std::chrono::milliseconds timeout,
      Enqueued enqueued);

  // Fails the group on every rank: all operations, present and later, raise `reason`.
  void fail(const std::string& reason);
  // Where a call is about to raise: lets the host, and the other hosts, know if it is for a failed group. Without any lock
  // held.
  void report_failure();
  // The error that failed the group, or an empty string.
  std::string failure() const;
  // Leaves the group without waiting for anybody. Others may still complete what was posted. May be called again.
  void depart();

  int rank() const {
    return rank_;
  }
  int size() const {
    return control_.size();
  }
  uint64_t next_sequence() const {
    return next_sequence_.load(std::memory_order_relaxed);
  }
  const std::string& name() const {
    return name_;
  }
  // "rank 1", with the rank in the job where it is another.
  std::string rank_label(int rank) const;

  // Keeps tensors that a peer may be in the middle of reading or writing until the process ends.
  static void abandon(std::vector<at::Tensor> tensors);
  // For Network. See [Note: Ranks on other hosts].
  // A frame from rank `source` of the job, a member, for which this rank is the proxy.
  void deliver(
      int source,
      const Frame& frame,
      const std::vector<uint64_t>& part_nbytes,
      const Network::ReceivePart& receive);
  // The connection to rank `job_rank` of the job has ended.
  void lose(int job_rank);
  // Enters posts and messages that had to wait for room; true when none are left.
  bool work_off();

  // Moves along what this process has in flight on all communicators but `except`.
  static void progress_all(const Communicator* except);

 private:
  friend class Operation;
  friend class CollectiveOperation;
  friend class PointToPoint;
  friend class SendOperation;
  friend class ReceiveOperation;
  friend class SymmetricMemoryNeuron;

  Communicator(std::shared_ptr<Fabric> fabric, std::vector<int> fabric_ranks, int rank, std::string name);
  // Where rank 0 has put the control block.
  struct Locator {
    uint64_t offset;
    uint64_t nonce;
  };
  void attach(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  // The first rank of the group on this host, whose arena holds the control block here.
  int local_leader() const;
  Locator found_block();
  void join_block(const Locator& locator);
  // Makes it known to this process's other communicators.
  void enlist();
  void offer_private_memory();
  // Where the memory of a rank of the group lies: in its own arena, or its proxy's.
  const Fabric::Peer& peer(int rank) const {
    return fabric_->peer(arena_ranks_[rank]);
  }
  bool is_local(int rank) const {
    return fabric_->is_local(fabric_ranks_[rank]);
  }
  // What this rank sends goes there for each of the other hosts.
  struct RemoteHost {
    std::vector<int> ranks; // of the group
    int proxy; // the one of them that stands in for this rank
  };
  void assign_proxies();
  // Puts this rank's post of a collective on its way to the other hosts.
  void ship(const CollectiveOperation& operation, const Post& post);
  void ship(FrameKind kind, const std::string& text);
  void ship_message(int to, int tag, uint64_t serial, Picoseconds ready_ps, const Region& region);

  // The mutex, and the tensors that may be dropped once it is released. See [Note: Locks].
  class Section {
   public:
    explicit Section(Communicator& communicator) : communicator_(communicator) {
      lock();
    }
    ~Section() {
      if (held_) {
        unlock();
      }
    }
    void lock() {
      if (!communicator_.mutex_.try_lock()) {
        // Whoever holds it never wants the interpreter lock meanwhile, but another thread that waits for it might.
        HostLockRelease released;
        communicator_.mutex_.lock();
      }
      held_ = true;
    }
    void unlock() {
      std::vector<at::Tensor> tensors;
      tensors.swap(communicator_.retired_tensors_);
      communicator_.mutex_.unlock();
      held_ = false;
    }

   private:
    Communicator& communicator_;
    bool held_ = false;
  };

  using Advance = c10::function_ref<bool(Operation::Wait&, bool thorough)>;
  using Missing = c10::function_ref<std::vector<int>()>;
  using What = c10::function_ref<std::string()>;
  using DescribeWait = c10::function_ref<void(WaitRecord&)>;
  // Runs `advance` in the section until it says true, sleeping outside of it in between. Throws when the group fails, on
  // timeout, and when a missing rank has died or left. Ends inside the section, also by an exception.
  void wait_until(
      Section& section,
      Advance advance,
      Missing missing,
      What what,
      DescribeWait describe_wait,
      uint64_t site,
      std::chrono::milliseconds timeout,
      bool fail_on_timeout);
  // Whether another rank was last seen on the processor that this one runs on: spinning would keep it from working.
  bool shares_cpu() const;
  // Lets the other ranks of this processor run; true when that has changed the word. See [Note: Giving way].
  bool give_way(const Operation::Wait& wait);
  // True when nothing changed within the wait's patience.
  bool sleep(const Operation::Wait& wait);
  // Tells the other ranks that, and how, this one is blocked, and looks for a cycle among all that are.
  void check_deadlock(BlockedScope& blocked, What what, DescribeWait describe_wait, uint64_t site);
  // Fails the group if one of the missing ranks can never do its part.
  void check_health(Missing missing, What what);
  // The oldest collective that is not done, if `operation` is a later one; else nullptr.
  const Operation* oldest_before(const Operation& operation) const;
  [[noreturn]] void time_out(Missing missing, What what, std::chrono::milliseconds timeout, bool fail_group);
  void throw_if_failed() const;
  void throw_if_unusable() const;
  // Whether this was the first to fail it.
  static bool fail(const ControlBlock& control, const std::string& reason);
  void tell_other_hosts(const std::string& reason);
  static void wake_everybody(const ControlBlock& control);
  std::string list_ranks(const std::vector<int>& ranks) const;

  // The ranks of the group that it stands for, in the job.
  const std::vector<int>& job_ranks() const {
    return virtual_ranks_.empty() ? fabric_ranks_ : virtual_ranks_;
  }
  // What the group that it stands for calls a rank.
  int group_rank(int rank) const {
    return group_ranks_.empty() ? rank : group_ranks_[rank];
  }

  // All with the mutex held.
  void progress(bool work);
  void retire();
  bool slot_free(uint64_t sequence);
  // Counts a post of this sequence; the last opens the slot.
  void arrive(uint64_t sequence);
  // Enters what came from other hosts, as far as there is room.
  void enter_arrivals();
  Exchange read_posts(uint64_t sequence) const;
  // Whether all ranks may use each other's private memory. False while some have not found out: they do at their first
  // call with a tensor outside the arena.
  bool private_memory_shared();
  // Compares the posts and opens, or at once completes, the collective.
  void open_slot(uint64_t sequence);
  // When it begins and ends in virtual time.
  void time_slot(Slot& slot, const Exchange& exchange);
  void carry_out(const Exchange& exchange, int range, uint64_t begin, uint64_t end);
  void finish_slot(Slot& slot, uint64_t sequence);
  // Takes segments of an open collective; true when it is done.
  bool help(uint64_t sequence, bool thorough);

  std::shared_ptr<Fabric> fabric_;
  std::vector<int> fabric_ranks_;
  int rank_;
  std::string name_;
  ControlBlock control_;
  std::unique_ptr<StagedBlock> own_control_; // of the first rank on a host
  std::vector<PrivateMemory> private_memory_; // by rank; fewer once it is known that some may not be used
  std::unique_ptr<uint64_t> mark_; // of this process
  bool private_memory_tried_ = false;
  std::atomic<bool> private_memory_shared_{false};
  std::atomic<bool> departed_{false};
  std::vector<int> arena_ranks_; // as fabric_ranks_, with the proxy in place of a rank on another host
  std::vector<RemoteHost> remote_hosts_; // empty on one host
  std::atomic<bool> told_other_hosts_{false}; // that the group has failed
  std::unique_ptr<BlockReduction> blocks_; // where the hosts hold equal blocks
  std::vector<int> group_ranks_; // if it does part of the work of another group, or stands for it: its ranks there
  std::vector<int> virtual_ranks_; // [Note: Live ranks]
  uint64_t group_id_ = 0; // the same on all hosts, and no other group's
  std::atomic<uint64_t> shrinks_{0};
  uint64_t name_text_ = kNoOffset; // the name, interned

  mutable std::mutex mutex_;
  std::atomic<uint64_t> next_sequence_{0};
  uint64_t retired_ = 0;
  uint64_t retired_by_all_ = 0; // a lower bound
  std::deque<std::shared_ptr<Operation>> outstanding_; // collectives, by sequence from retired_ on
  std::unique_ptr<PointToPoint> messages_;
  std::vector<at::Tensor> retired_tensors_;
  // A collective's post of a rank that this one is the proxy of.
  struct Arrival {
    int from;
    uint64_t sequence;
    Post post;
    std::vector<Span> spans;
    std::vector<StagedBlock> staged; // the data, and the table of spans
  };
  std::deque<Arrival> arrivals_; // not yet entered
  std::deque<Arrival> entered_; // whose memory is in use until the collective is done
  std::atomic<int> spin_limit_{0}; // in pauses; adapts to whether spinning has paid
  std::atomic<int> yields_to_skip_{0}; // waits that sleep at once
  std::atomic<int> yield_backoff_{0}; // how many, after the next yield that takes long
  std::atomic<size_t> next_suspect_{0};
};

} // namespace trn
