#pragma once

// One process group on the fabric: posts collectives and messages, finishes them by work stealing, and turns whatever goes
// wrong into an error on every rank. ProcessGroupNeuron (c10d/) translates c10d's calls into it.
//
// [Note: Progress]
// There are no progress threads. Whoever waits for an operation carries out what is left of it, also the share of a rank
// that is busy elsewhere, and looks after this process's other communicators while it sleeps. A rank that has posted is
// therefore never needed again for that collective.
//
// [Note: Locks]
// A communicator's mutex is held while its shared state is read or work is carried out, never while sleeping, never while
// Python may run, and never while a tensor may be freed (which can call into Python): tensors go to `retired_tensors_` and
// are dropped later, outside.

#include "device/Arena.h"
#include "device/Stream.h"
#include "fabric/ControlBlock.h"
#include "fabric/Exchange.h"
#include "fabric/Fabric.h"
#include "timing/VirtualClock.h"
#include "fabric/Region.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
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

class Communicator;
class PointToPoint;

// Where and when a call was enqueued in virtual time.
struct Enqueued {
  std::optional<c10::Stream> stream; // that shows it; none: it works for the host
  GroupName group{};
  Picoseconds ready_ps = 0;
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
  c10::SmallVector<int64_t, 6> shape; // of the first tensor, for messages
  std::vector<at::Tensor> tensors; // kept alive until the collective is done
  Enqueued enqueued;
  std::chrono::milliseconds timeout{0};
};

// A collective, send or receive in flight.
class Operation : public PendingWork, public std::enable_shared_from_this<Operation> {
 public:
  explicit Operation(Communicator& communicator);

  bool poll() final;
  void finish() final;
  // Waits at most `timeout` (zero: the operation's own), without failing the group when that is over.
  void finish(std::chrono::milliseconds timeout);
  bool done() const {
    return done_.load(std::memory_order_acquire);
  }
  // Set once done, when it failed.
  std::exception_ptr error() const;
  uint64_t sequence() const {
    return sequence_;
  }
  // The rank a message came from; -1 for anything else.
  int source() const {
    return source_.load(std::memory_order_acquire);
  }
  virtual std::string describe() const = 0;
  // Once done: when, in virtual time.
  Picoseconds end_ps() const final {
    return times_.end;
  }
  // Once finished: what the current stream of its device, or else the host, does from now on comes after it in virtual time.
  void join() const;
  // Whether this rank has waited for it.
  bool finished() const {
    return recorded_.load(std::memory_order_relaxed);
  }
  // Fails the group of this operation, on every rank.
  void fail_group(const std::string& reason);

 protected:
  friend class Communicator;
  friend class PointToPoint;

  struct Wait {
    const std::atomic<uint32_t>* word = nullptr; // changes when there may be progress
    uint32_t seen = 0;
    std::atomic<uint32_t>* sleepers = nullptr;
    std::chrono::microseconds patience{50000}; // after which another look is worth while without a change
  };
  // Called with the communicator's mutex held. Does all it can and reports whether the operation is complete; if not, what
  // to wait for. `thorough`: also takes work that a rank now waiting would rather do itself.
  virtual bool advance(Wait& wait, bool thorough) = 0;
  // Group ranks that have not yet done their part.
  virtual std::vector<int> missing() const = 0;
  // Tells the peers that this rank now waits for the operation, or no longer does.
  virtual void attend(bool waiting) = 0;
  // Before it is done: where it was enqueued, what it is called, what it moves and, if known already, when.
  void enqueue(Enqueued enqueued, const char* name, uint64_t nbytes, Transfer times) {
    enqueued_ = enqueued;
    name_ = name;
    message_nbytes_ = nbytes;
    times_ = times;
  }
  // With the mutex held.
  void complete(std::exception_ptr error = nullptr);
  // Enters it into the account of virtual time, once, at the point of the program that waits for it.
  void record();

  std::shared_ptr<Communicator> communicator_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  uint64_t sequence_ = 0;
  std::atomic<int> source_{-1};
  std::vector<at::Tensor> tensors_;
  std::chrono::milliseconds timeout_{0};
  std::chrono::steady_clock::time_point started_;
  Enqueued enqueued_;
  Transfer times_{}; // set before done
  const char* name_ = ""; // of what is transferred, in accounts and traces
  uint64_t message_nbytes_ = 0;
  uint64_t trace_sequence_ = 0; // the same for all members
  std::atomic<bool> recorded_{false};
  std::atomic<int64_t> next_check_ms_{0}; // since started_: when poll() looks after the peers' health next
};

// A block of the arena, freed with the object.
class StagedBlock {
 public:
  explicit StagedBlock(uint64_t nbytes) : block_(Arena::get().allocate(nbytes > 0 ? nbytes : 1)) {}
  ~StagedBlock() {
    if (block_ != nullptr) {
      Arena::get().free(block_);
    }
  }
  StagedBlock(StagedBlock&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  StagedBlock& operator=(StagedBlock&&) = delete;
  std::byte* data() const {
    return static_cast<std::byte*>(Arena::get().address(block_));
  }
  uint64_t offset() const {
    return block_->offset;
  }

 private:
  Arena::Block* block_;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Collective over the group. fabric_ranks[r] is the place in the fabric of group rank r.
  static std::shared_ptr<Communicator> create(
      std::shared_ptr<Fabric> fabric,
      std::vector<int> fabric_ranks,
      int rank,
      std::string name,
      const c10::intrusive_ptr<c10d::Store>& store,
      std::chrono::milliseconds timeout);
  ~Communicator();

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

  // Moves along what this process has in flight on all communicators but `except`.
  static void progress_all(const Communicator* except);

 private:
  friend class Operation;
  friend class CollectiveOperation;
  friend class PointToPoint;
  friend class SendOperation;
  friend class ReceiveOperation;

  Communicator(std::shared_ptr<Fabric> fabric, std::vector<int> fabric_ranks, int rank, std::string name);
  void attach(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  const Fabric::Peer& peer(int rank) const {
    return fabric_->peer(fabric_ranks_[rank]);
  }

  // The mutex, and the tensors that may be dropped once it is released.
  class Section;

  using Advance = c10::function_ref<bool(Operation::Wait&, bool thorough)>;
  using Missing = c10::function_ref<std::vector<int>()>;
  using What = c10::function_ref<std::string()>;
  // Runs `advance` in the section until it says true, sleeping outside of it in between. Throws when the group fails, on
  // timeout, and when a missing rank has died or left. Ends inside the section, also by an exception.
  void wait_until(
      Section& section,
      Advance advance,
      Missing missing,
      What what,
      std::chrono::milliseconds timeout,
      bool fail_on_timeout);
  // True when nothing changed within the wait's patience.
  bool sleep(const Operation::Wait& wait);
  // Fails the group if one of the missing ranks can never do its part.
  void check_health(Missing missing, What what);
  [[noreturn]] void time_out(Missing missing, What what, std::chrono::milliseconds timeout, bool fail_group);
  void throw_if_failed() const;
  void throw_if_unusable() const;
  void wake_everybody();
  std::string list_ranks(const std::vector<int>& ranks) const;

  // All with the mutex held.
  void progress(bool work);
  void retire();
  bool slot_free(uint64_t sequence);
  // Compares the posts and opens, or at once completes, the collective.
  void open_slot(uint64_t sequence);
  // When it begins and ends in virtual time.
  void time_slot(Slot& slot, const Exchange& exchange);
  void finish_slot(Slot& slot, uint64_t sequence);
  // Takes segments of an open collective; true when it is done.
  bool help(uint64_t sequence, bool thorough);

  std::shared_ptr<Fabric> fabric_;
  std::vector<int> fabric_ranks_;
  int rank_;
  std::string name_;
  ControlBlock control_;
  std::unique_ptr<StagedBlock> own_control_; // rank 0's
  std::atomic<bool> departed_{false};

  mutable std::mutex mutex_;
  std::atomic<uint64_t> next_sequence_{0};
  uint64_t retired_ = 0;
  uint64_t retired_by_all_ = 0; // a lower bound
  std::deque<std::shared_ptr<Operation>> outstanding_; // collectives, by sequence from retired_ on
  std::unique_ptr<PointToPoint> messages_;
  std::vector<at::Tensor> retired_tensors_;
  std::atomic<int> spin_limit_{0}; // in pauses; adapts to whether spinning has paid
  std::atomic<size_t> next_suspect_{0};
};

} // namespace trn
