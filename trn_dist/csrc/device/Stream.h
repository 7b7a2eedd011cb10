#pragma once

// Streams and events of the neuron device.
//
// Operators run at once on the host, so a stream holds no queue of them. What it does hold is pending work: collectives
// that were posted and not yet carried out. Whoever orders itself after the stream (an event's block or synchronize, the
// stream's or the device's synchronize) finishes that work first, so the data is there when the next operator reads it.

#include "device/Sanitizer.h"
#include "timing/VirtualClock.h"

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trn {

// Work in flight on a stream. Implemented by the process group.
class PendingWork {
 public:
  virtual ~PendingWork() = default;
  // Makes progress without waiting for anybody; true when the work is done. Never throws.
  virtual bool poll() = 0;
  // Carries the work out, waiting for peers up to the work's deadline. Throws the work's error. May be called again.
  virtual void finish() = 0;
  // Once it is done: when, in virtual time.
  virtual Picoseconds end_ps() const {
    return 0;
  }
  // What that time comes from.
  virtual Origin origin() const {
    return {};
  }
  // The program has seen that it is done, by asking instead of by waiting.
  virtual void acknowledge() {}
  virtual std::string describe() const = 0;
  // What whoever waits for it learns.
  virtual const StreamClock& clock() const {
    static const StreamClock none;
    return none;
  }
};

// The stream that every thread starts with; its id is 0.
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
// Makes `stream` current on its device for the calling thread; the former one is returned.
c10::Stream exchange_stream(c10::Stream stream);
// A fresh stream. `priority` is 0 (normal) or negative (high), as in CUDA.
c10::Stream new_stream(c10::DeviceIndex device, int priority = 0);

// Puts work on a stream, after all that it already holds.
void add_pending(c10::Stream stream, std::shared_ptr<PendingWork> work);
// The same, or if it is done already only its virtual time.
void add_pending_or_join(c10::Stream stream, std::shared_ptr<PendingWork> work, bool done);
// What is pending on a stream, oldest first.
std::vector<std::shared_ptr<PendingWork>> pending_on(c10::Stream stream);
// Finishes all pending work of one stream, or of every stream of a device.
void synchronize_stream(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);
// Polls works until one is not done; raises `time_ps` to when those that are were done.
bool poll_all(const std::vector<std::shared_ptr<PendingWork>>& works, Picoseconds& time_ps);
void acknowledge_all(const std::vector<std::shared_ptr<PendingWork>>& works);
// Whether nothing is pending on the stream, and the host's virtual time has come to its tail; makes progress.
bool query_stream(c10::Stream stream);

// What an event recorded: the work that was pending on its stream at that moment, and when the rest is done in virtual time.
struct EventState {
  c10::DeviceIndex device = -1;
  std::vector<std::shared_ptr<PendingWork>> pending;
  Picoseconds time_ps = 0;
  Origin origin;
  StreamClock clock;
};

void record_event(EventState& event, c10::Stream stream);
// Carries out what the event stands for; returns when that was done in virtual time.
Picoseconds finish_event(EventState& event);
// Milliseconds of virtual time between two events.
double elapsed_ms(EventState& from, EventState& to);

} // namespace trn
