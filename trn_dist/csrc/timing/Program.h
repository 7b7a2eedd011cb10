#pragma once

// What a rank's program asked of virtual time, without any time in it: what it launched, what waited for what. From it
// Replay works out the same run's times on other hardware. Written by VirtualClock, under its lock, while a program is
// recorded; trn_dist/timing/program.py keeps it in files.

#include "timing/OperatorWork.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trn {

// What a moment of virtual time comes from: what a wait waits for.
struct Origin {
  enum Kind : uint8_t {
    Unknown, // a program with a wait for it cannot be replayed
    Transfer, // the end of a collective or message, numbered in the order in which the rank enqueued them
    Moment, // what an event recorded, numbered in that order
    Launch, // the end of an operator, numbered in the order of launches
  };
  Kind kind = Unknown;
  int64_t index = -1;
};

struct Action {
  enum Kind : uint8_t {
    Launch, // value: work
    Enqueue, // of a collective or message
    StreamWait, // on flag: kind of origin, value: its index
    HostWait, // the same
    HostWaitStream,
    HostWaitDevice,
    StreamWaitStream, // value: the other's device and stream, in 32 bits each
    Poll, // answered with no
    Record, // of an event: the next moment
    RecordAfter, // stream: a moment, value: a transfer that it comes after
    Enter, // a transfer is entered into the account; value: which
    MarkStep,
  };
  Kind kind = Launch;
  uint8_t flag = 0; // a kind of origin; of Launch and Enqueue: part of a program that was launched before
  int16_t device = 0;
  int32_t stream = 0;
  int64_t value = 0;
};
static_assert(sizeof(Action) == 16);

// A collective or message as one member sees it.
struct RecordedTransfer {
  enum Role : uint8_t { Undescribed, Collective, Send, Receive };
  Role role = Undescribed;
  bool for_host = false; // the host waits for it: it stands in no account
  std::string operation; // as an account names it
  std::string group; // its name, the same for all members
  std::string description; // as an account names the group
  std::vector<int> ranks; // of the group, in the job
  uint64_t sequence = 0; // the same for all members; of a message: sender * size + receiver in its upper half
  int64_t bytes = 0;
  int32_t stream = 0; // that shows it
  int16_t device = 0;
};

struct RecordedWork {
  uint32_t name = 0;
  OperatorWork work;
};

class Program {
 public:
  void launch(c10::DeviceIndex device, c10::StreamId stream, uint32_t name, const OperatorWork& work, bool launched);
  int64_t enqueue(c10::DeviceIndex device, c10::StreamId stream, bool launched);
  void wait(Action::Kind kind, c10::DeviceIndex device, c10::StreamId stream, Origin origin);
  void act(Action::Kind kind, c10::DeviceIndex device, c10::StreamId stream, int64_t value);
  int64_t moment(c10::DeviceIndex device, c10::StreamId stream);
  void describe(int64_t transfer, RecordedTransfer description);
  int64_t launches() const {
    return launches_;
  }
  void cannot_replay(const std::string& reason) {
    if (reason_.empty()) {
      reason_ = reason;
    }
  }

  const std::vector<Action>& actions() const {
    return actions_;
  }
  const std::vector<RecordedWork>& works() const {
    return works_;
  }
  const std::vector<RecordedTransfer>& transfers() const {
    return transfers_;
  }
  // Why it cannot be replayed; empty if it can.
  const std::string& reason() const {
    return reason_;
  }

 private:
  std::vector<Action> actions_;
  std::vector<RecordedWork> works_; // each once
  ska::flat_hash_map<std::string, int64_t> work_ids_; // by its bytes
  std::vector<RecordedTransfer> transfers_;
  int64_t launches_ = 0;
  int64_t moments_ = 0;
  std::string reason_;
};

// Of the transfer that was enqueued as `transfer` (-1: nobody records): what it is.
void describe_transfer(int64_t transfer, RecordedTransfer description);
bool recording_program();
void start_program();
// What was recorded so far.
Program program_so_far();

} // namespace trn
