#pragma once

// Goes through recorded programs again, on other hardware: the clocks move as in the live run (Clocks.h), operators are
// priced by the given chip's rates, and collectives and messages take what the caller says. Nothing is computed and no
// tensor exists. Used by trn_dist/timing/replay.py.

#include "timing/Clocks.h"
#include "timing/Program.h"
#include "timing/VirtualClock.h"

#include <map>
#include <tuple>

namespace trn {

// A program as it comes from a file.
struct RankProgram {
  int rank = 0;
  std::vector<Action> actions;
  std::vector<RecordedWork> works; // with names as name_id gives them here
  std::vector<RecordedTransfer> transfers;
};

// A collective, or a message from one rank to another.
struct SharedTransfer {
  std::string operation; // one of trn_dist.collectives.OPERATIONS
  std::string description;
  std::vector<int> ranks; // of the group, in the job
  int source = -1; // of a message, in the job
  int target = -1;
  int64_t bytes = 0; // the largest that a member says
  // Set by run(): from when the last member was ready and the group free.
  Picoseconds start = 0;
  Picoseconds end = 0;
};

class Replay {
 public:
  // `lone`: each program's peers are taken to do what it does at the same time, as in a virtual world.
  Replay(std::vector<RankProgram> programs, bool lone);

  const std::vector<SharedTransfer>& transfers() const {
    return transfers_;
  }
  // The steps of every program, with transfer i taking `durations`[i] from when it starts.
  std::vector<std::vector<StepTimes>> run(const ChipRates& rates, const std::vector<Picoseconds>& durations);

 private:
  struct Member {
    size_t shared; // of transfers_; SIZE_MAX: it never came about
    bool receives = false;
  };
  struct Queue { // transfers that follow each other: a group's collectives, a rank's messages to another
    std::vector<size_t> order; // of transfers_, by sequence
    size_t next = 0; // the first that has not started
    Picoseconds busy_until = 0;
  };
  struct Progress { // of a transfer
    size_t missing = 0; // members that have not enqueued it
    Picoseconds ready = 0; // of those that have
    bool timed = false;
  };
  struct RankState {
    size_t next = 0; // of actions
    Clocks clocks;
    StepAccount account;
    std::vector<Picoseconds> launches; // their ends
    std::vector<Picoseconds> ready; // of transfers enqueued so far
    std::vector<Picoseconds> moments;
    std::vector<std::vector<size_t>> moment_after; // transfers that a moment comes after, too
    std::vector<StepTimes> steps;
  };

  // As far as nothing is missing from others; whether it came any further.
  bool advance(size_t program, const ChipRates& rates, const std::vector<OperatorCost>& costs);
  void enqueued(size_t program, size_t transfer);
  void start_what_can(size_t queue);
  // The time of a transfer as one member sees it, if it is known by now.
  std::optional<Transfer> times_of(size_t program, size_t transfer) const;
  std::optional<Picoseconds> time_of(size_t program, const Action& action) const;
  [[noreturn]] void refuse_stuck() const;

  std::vector<RankProgram> programs_;
  bool lone_;
  std::vector<SharedTransfer> transfers_;
  std::vector<size_t> members_of_; // by transfer: how many programs it has
  std::vector<size_t> queue_of_; // by transfer
  std::vector<std::vector<Member>> members_; // by program and its own numbering
  std::vector<Queue> queues_;

  std::vector<Progress> progress_;
  std::vector<RankState> states_;
  const std::vector<Picoseconds>* durations_ = nullptr;
};

} // namespace trn
