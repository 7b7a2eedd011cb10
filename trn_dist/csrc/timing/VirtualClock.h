#pragma once

// Virtual time: when the modelled host and chip would do what this process does. Nothing here ever reads the host's real
// clock, so the same program has the same times on any machine.
//
// [Note: Clocks]
// A rank has a host clock; each of its devices has a tail for each stream (when what was enqueued last is done) and, for
// each engine, the stretches in which it is taken. Launching an operator moves the host clock by the launch overhead; the
// operator starts when the host has launched it, the stream's tail is reached and its engine is free for as long as it
// needs, and becomes the tail. Engines are not queues: an operator that waits on a side stream for a collective does not
// keep its engine from operators of other streams meanwhile.
//
// [Note: Whose clock]
// The main thread and autograd's threads, which work while it waits, share one set of clocks. Any other thread gets a copy
// of them at its first operator, and only events carry its times back; since the moment of that copy depends on the host's
// scheduling, the run is marked as not reproducible.
//
// Called by the operator fallback, the native operators, the guard (streams, events) and the process group.

#include "timing/Journal.h"
#include "timing/OperatorWork.h"
#include "timing/Program.h"

#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <utility>

namespace trn {

// Launches an operator on the current stream of `device`; returns when it is done.
Picoseconds launch(c10::DeviceIndex device, uint32_t name, const OperatorCost& cost);

// While one of these lives, operators of the calling thread take no virtual time: what they stand for is launched apart.
class UntimedScope {
 public:
  UntimedScope() {
    ++depth_;
  }
  ~UntimedScope() {
    --depth_;
  }
  UntimedScope(const UntimedScope&) = delete;
  UntimedScope& operator=(const UntimedScope&) = delete;
  static bool active() {
    return depth_ > 0;
  }

 private:
  static thread_local int depth_;
};

// The end of what the calling thread launched last, for a wait that follows at once.
Origin last_launch();

// When something that is enqueued on the stream now can start.
Picoseconds stream_time(c10::Stream stream);
// The same, as an event records it.
struct Moment {
  Picoseconds time = 0;
  Origin origin;
};
Moment record_moment(c10::Stream stream);
// The moment comes after a transfer, too, that is not done yet.
void moment_after(const Origin& moment, const Origin& transfer);
// Nothing that the stream is given from now on starts before `time`, which comes from `origin`.
void stream_wait(c10::Stream stream, Picoseconds time, Origin origin);
// Nor before what the other stream holds is done.
void stream_wait_stream(c10::Stream stream, c10::Stream other);
// The host waits until `time`, which comes from `origin`.
void host_wait(Picoseconds time, Origin origin);
// The host waits for what the stream, or every stream of the device, holds.
void host_wait_stream(c10::Stream stream);
void host_wait_device(c10::DeviceIndex device);
// Whether `time` has come for the host; an answer of no costs it the time of a poll.
bool host_poll(Picoseconds time);
Picoseconds host_time();

// [Note: Profiles]
// A profile draws a record beside the host's side: what launched it, and when on the host's real clock. That clock is read
// for a profile alone, and no virtual time depends on it.
struct LaunchSite {
  int64_t host_ns = 0; // since the epoch
  int32_t correlation = 0; // Kineto's id of the operator of the program; 0: none
  int32_t thread = 0; // as the operating system numbers it
};
// The calling thread's, now; all zero unless a profile is being taken.
LaunchSite launch_site();

// Enters a collective or message that this rank was part of: ready, then [start, end).
struct Transfer {
  Picoseconds ready;
  Picoseconds start;
  Picoseconds end;
};
struct GroupName {
  uint32_t name; // see name_id; groups along one dimension of a mesh share it
  int32_t first_rank; // in the job
};
void record_collective(
    c10::Stream stream,
    uint32_t name,
    GroupName group,
    uint64_t sequence,
    int64_t bytes,
    Transfer times,
    const LaunchSite& site,
    int64_t transfer = -1);
// The host launches something other than an operator on the stream; returns when that can start.
struct EnqueuedTransfer {
  Picoseconds ready = 0;
  int64_t transfer = -1; // its number in the recorded program; -1: nobody records
};
EnqueuedTransfer enqueue(c10::Stream stream);

// The times depend on the host's scheduling from now on, because of `reason`.
void mark_irreproducible(const std::string& reason);
// The first such reason; empty while the times are reproducible.
std::string irreproducible_reason();

// Ends the step that began at the previous mark (or at time 0): the step ends when the host and the current stream of the
// calling thread's device are both done.
StepTimes mark_step();

// How this rank has spent its time from 0 to where its host stands now. For onlookers: any thread may ask, and no time
// depends on it.
StepTimes times_so_far();

// [Note: Profiles]
struct ProfiledRecord {
  Record record;
  LaunchSite site;
};
// Returns the host's virtual time.
Picoseconds start_profile();
std::vector<ProfiledRecord> stop_profile();
// The operator of the program that the calling thread is in, from one to the next inner one.
void push_correlation(int32_t id);
void pop_correlation();

// Keeps the records of all steps for take_trace().
void set_tracing(bool on);
// The records since the last call, in program order.
std::vector<Record> take_trace();

} // namespace trn
