#pragma once

// What a rank has in flight on a communicator. The kinds of operation are in CollectiveOperation.h and PointToPoint.h.

#include "device/Arena.h"
#include "device/Stream.h"
#include "fabric/RankStatus.h"
#include "fabric/StagedBlock.h"
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
struct FlightRecord;

// Where and when a call was enqueued in virtual time.
struct Enqueued {
  std::optional<c10::Stream> stream; // that shows it; none: it works for the host
  GroupName group{};
  Picoseconds ready_ps = 0;
  int64_t transfer = -1; // its number in the recorded program; -1: nobody records
  uint64_t call_site = UINT64_MAX; // text of the program's line for other ranks, see CallSite.h
  LaunchSite launch_site{};
  StreamClock clock;
};

// A collective, send or receive in flight.
class Operation : public PendingWork, public std::enable_shared_from_this<Operation> {
 public:
  explicit Operation(Communicator& communicator);
  ~Operation() override;

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
  // Once done: when, in virtual time.
  Picoseconds end_ps() const final {
    return times_.end;
  }
  Origin origin() const final {
    return {Origin::Transfer, enqueued_.transfer};
  }
  Picoseconds start_ps() const {
    return times_.start;
  }
  // Once finished: what the current stream of its device, or else the host, does from now on comes after it in virtual time.
  void join() const;
  // Whether this rank has waited for it.
  bool finished() const {
    return recorded_.load(std::memory_order_relaxed);
  }
  void acknowledge() final {
    record();
  }
  const StreamClock& clock() const final {
    return enqueued_.clock;
  }
  // Until the program has waited for it, it uses these bytes: [Note: Memory in flight]
  void claim(MemoryUses uses);
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
  // For the peers, once a wait has lasted: what would end it.
  virtual void describe_wait(WaitRecord& record) const = 0;
  // This rank now waits for the operation, or no longer does.
  virtual void attend(bool) {}
  // Before it is done: where it was enqueued, what it is called, what it moves and, if known already, when.
  void enqueue(Enqueued enqueued, const char* name, uint64_t nbytes, Transfer times) {
    enqueued_ = std::move(enqueued);
    name_ = name;
    message_nbytes_ = nbytes;
    times_ = times;
  }
  // Tells the recorded program, if there is one, what was enqueued.
  void describe_transfer(RecordedTransfer::Role role) const;
  // Enters the call into the flight recorder.
  void record_in_flight(FlightRecord& record);
  void carry_out(std::chrono::milliseconds timeout);
  // With the mutex held.
  void complete(std::exception_ptr error = nullptr);
  // It no longer uses what it claimed.
  void land() noexcept;
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
  uint64_t flight_id_ = 0; // in the flight recorder
  std::atomic<bool> in_flight_{false};
  std::atomic<int64_t> next_check_ms_{0}; // since started_: when poll() looks after the peers' health next
  int64_t last_look_ms_ = 0; // when it last did
  int64_t paused_ms_ = 0; // how long, by then, a debugger had held a rank
};

} // namespace trn
