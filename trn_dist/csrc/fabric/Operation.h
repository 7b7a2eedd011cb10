#pragma once

// What a rank has in flight on a communicator, and the arena memory that it borrows for it. The kinds of operation are in
// CollectiveOperation.h and PointToPoint.h.

#include "device/Arena.h"
#include "device/Stream.h"
#include "timing/VirtualClock.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trn {

class Communicator;
class PointToPoint;

// Where and when a call was enqueued in virtual time.
struct Enqueued {
  std::optional<c10::Stream> stream; // that shows it; none: it works for the host
  GroupName group{};
  Picoseconds ready_ps = 0;
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

} // namespace trn
