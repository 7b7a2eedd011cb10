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

#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <utility>

namespace trn {

// What an operator takes, as OperatorCost tells it.
struct OperatorCost {
  Engine engine = Engine::Vector;
  Picoseconds time = 0; // on the device, without the launch
  bool hbm_bound = false;
  int64_t bytes = 0; // of HBM traffic
  double flops = 0; // of the matrix engine
};

// Launches an operator on the current stream of `device`; returns when it is done.
Picoseconds launch(c10::DeviceIndex device, uint32_t name, const OperatorCost& cost);

// When something that is enqueued on the stream now can start: what an event records.
Picoseconds stream_time(c10::Stream stream);
// Nothing that the stream is given from now on starts before `time`.
void stream_wait(c10::Stream stream, Picoseconds time);
// The host waits until `time`.
void host_wait(Picoseconds time);
// The host waits for what the stream, or every stream of the device, holds.
void host_wait_stream(c10::Stream stream);
void host_wait_device(c10::DeviceIndex device);
// Whether `time` has come for the host; an answer of no costs it the time of a poll.
bool host_poll(Picoseconds time);
Picoseconds host_time();

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
    Transfer times);
// The host launches something other than an operator on the stream; returns when that can start.
Picoseconds enqueue(c10::Stream stream);

// The times depend on the host's scheduling from now on, because of `reason`.
void mark_irreproducible(const std::string& reason);
// The first such reason; empty while the times are reproducible.
std::string irreproducible_reason();

// Ends the step that began at the previous mark (or at time 0): the step ends when the host and the current stream of the
// calling thread's device are both done.
StepTimes mark_step();

// Keeps the records of all steps for take_trace().
void set_tracing(bool on);
// The records since the last call, in program order.
std::vector<Record> take_trace();

} // namespace trn
