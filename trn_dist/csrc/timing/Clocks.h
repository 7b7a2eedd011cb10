#pragma once

// The clocks that [Note: Clocks] in VirtualClock.h tells of, and the rules by which they move. Used by VirtualClock while a
// program runs, and by Replay when a recorded one is gone through again: the same rules, so the same times.

#include "timing/Journal.h"
#include "timing/OperatorWork.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Optional.h>

#include <algorithm>
#include <array>
#include <vector>

namespace trn {

// When one engine is taken: stretches in order of time, the last that ended before the host's time dropped, for whatever
// is launched later starts later.
class Occupancy {
 public:
  // Takes the first free stretch of `length` at or after `earliest`; returns its start. `now`: nothing will be asked for
  // before.
  Picoseconds take(Picoseconds earliest, Picoseconds length, Picoseconds now) {
    if (C10_LIKELY(first_ == taken_.size() || taken_.back().end <= earliest)) {
      append(earliest, length, now);
      return earliest;
    }
    // Backwards to the first stretch that ends after `earliest`, then forwards to a hole that is wide enough.
    size_t i = taken_.size();
    while (i > first_ && taken_[i - 1].end > earliest) {
      --i;
    }
    Picoseconds start = earliest;
    for (; i < taken_.size() && taken_[i].start < start + length; ++i) {
      start = std::max(start, taken_[i].end);
    }
    if (i == taken_.size()) {
      append(start, length, now);
    } else if (length > 0) {
      taken_.insert(taken_.begin() + static_cast<std::ptrdiff_t>(i), {start, start + length});
    }
    return start;
  }

 private:
  struct Stretch {
    Picoseconds start;
    Picoseconds end;
  };

  void append(Picoseconds start, Picoseconds length, Picoseconds now) {
    if (length == 0) {
      return;
    }
    while (first_ < taken_.size() && taken_[first_].end <= now) {
      ++first_;
    }
    if (first_ > 64 && first_ > taken_.size() / 2) {
      taken_.erase(taken_.begin(), taken_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
    if (first_ < taken_.size() && taken_.back().end == start) {
      taken_.back().end += length;
    } else {
      taken_.push_back({start, start + length});
    }
  }

  std::vector<Stretch> taken_;
  size_t first_ = 0; // stretches before it are over
};

struct DeviceClocks {
  std::vector<Picoseconds> tails; // by stream id
  std::array<Occupancy, kEngines> engines;

  Picoseconds& tail(c10::StreamId stream) {
    const auto index = static_cast<size_t>(stream);
    if (C10_UNLIKELY(index >= tails.size())) {
      tails.resize(index + 1, 0);
    }
    return tails[index];
  }
};

struct Clocks {
  Picoseconds host = 0;
  std::vector<DeviceClocks> devices;
  bool shared = true; // by the main thread and autograd's: [Note: Whose clock]

  DeviceClocks& device(c10::DeviceIndex index) {
    if (C10_UNLIKELY(static_cast<size_t>(index) >= devices.size())) {
      devices.resize(static_cast<size_t>(index) + 1);
    }
    return devices[static_cast<size_t>(index)];
  }

  // `launched`: as a part of a program that was launched before, see CompiledRegion.
  Record launch(
      c10::DeviceIndex index,
      c10::StreamId stream,
      uint32_t name,
      const OperatorCost& cost,
      bool launched,
      const ChipRates& rates) {
    DeviceClocks& on_device = device(index);
    const Picoseconds device_operator_ps = launched ? 0 : rates.device_operator_ps;
    host += launched ? 0 : rates.host_operator_ps;
    Picoseconds& tail = on_device.tail(stream);
    const Picoseconds enqueued = std::max(host, tail);
    // The engine is taken from its start on, not during the launch.
    const Picoseconds begin =
        on_device.engines[static_cast<size_t>(cost.engine)].take(enqueued + device_operator_ps, cost.time, host);
    tail = begin + cost.time;
    Record record;
    record.start = begin - device_operator_ps;
    record.ready = begin;
    record.end = tail;
    record.bytes = cost.bytes;
    record.flops = cost.flops;
    record.name = name;
    record.stream = static_cast<int32_t>(stream);
    record.device = index;
    record.engine = cost.engine;
    record.host_bound = record.start == host;
    record.hbm_bound = cost.hbm_bound;
    return record;
  }

  Picoseconds stream_time(c10::DeviceIndex index, c10::StreamId stream) {
    return std::max(host, device(index).tail(stream));
  }

  // Something other than an operator is launched; returns when it can start.
  Picoseconds enqueue(c10::DeviceIndex index, c10::StreamId stream, bool launched, const ChipRates& rates) {
    host += launched ? 0 : rates.host_operator_ps;
    return stream_time(index, stream);
  }

  void stream_wait(c10::DeviceIndex index, c10::StreamId stream, Picoseconds time) {
    Picoseconds& tail = device(index).tail(stream);
    tail = std::max(tail, time);
  }

  // Returns the host's wait, if it has to.
  std::optional<Record> host_wait(Picoseconds until) {
    if (until <= host) {
      return std::nullopt;
    }
    Record record;
    record.activity = Activity::HostWait;
    record.start = record.ready = host;
    record.end = host = until;
    return record;
  }

  Picoseconds device_time(c10::DeviceIndex index) {
    Picoseconds until = host;
    for (const Picoseconds tail : device(index).tails) {
      until = std::max(until, tail);
    }
    return until;
  }
};

} // namespace trn
