#include "timing/VirtualClock.h"

#include "device/Device.h"
#include "device/Ledger.h"
#include "device/Stream.h"
#include "timing/Trace.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

namespace trn {

namespace {

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

// [Note: Whose clock]
struct Clocks {
  Picoseconds host = 0;
  std::vector<DeviceClocks> devices;
  bool shared = true; // by the main thread and autograd's

  DeviceClocks& device(c10::DeviceIndex index) {
    if (C10_UNLIKELY(static_cast<size_t>(index) >= devices.size())) {
      devices.resize(static_cast<size_t>(index) + 1);
    }
    return devices[static_cast<size_t>(index)];
  }
};

// Records of a step that are kept; then they are summed up as far as nothing can come before.
constexpr size_t kRecordsKept = 1 << 17;

// Records of a trace that are kept before they are written out.
constexpr size_t kTraceKept = 1 << 16;
std::atomic<bool> trace_full{false};

struct VirtualTime {
  std::mutex mutex; // of everything below, and of all clocks
  Clocks main;
  std::vector<Record> records; // of the step that goes on, and what reaches into it
  std::vector<Record> trace;
  bool tracing = false;
  StepTimes step; // of the part of the present step that is summed up already
  size_t sum_up_at = kRecordsKept;
  std::string irreproducible;
};

VirtualTime& virtual_time() {
  static auto* instance = new VirtualTime(); // never destroyed: threads may outlive static destructors
  return *instance;
}

bool works_for_main_thread() {
  if (syscall(SYS_gettid) == getpid()) {
    return true;
  }
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  constexpr const char* kAutograd = "pt_autograd_";
  return std::strncmp(name.data(), kAutograd, std::strlen(kAutograd)) == 0;
}

// The calling thread's clocks. With the lock held.
Clocks& clocks() {
  thread_local Clocks* mine = nullptr;
  thread_local std::unique_ptr<Clocks> own;
  if (C10_UNLIKELY(mine == nullptr)) {
    VirtualTime& time = virtual_time();
    if (works_for_main_thread()) {
      mine = &time.main;
    } else {
      own = std::make_unique<Clocks>(time.main);
      own->shared = false;
      mine = own.get();
    }
  }
  return *mine;
}

void mark_irreproducible_locked(const std::string& reason) {
  VirtualTime& time = virtual_time();
  if (time.irreproducible.empty()) {
    time.irreproducible = reason;
  }
}

// Adds what lies before `end` to the present step and drops its records.
void sum_up(Picoseconds end, bool host_at_end) {
  VirtualTime& time = virtual_time();
  if (end <= time.step.end) {
    return;
  }
  append(time.step, account(time.records, time.step.end, end, host_at_end));
  std::erase_if(time.records, [&](const Record& record) { return record.end <= end; });
}

void add_record(Record&& record) {
  VirtualTime& time = virtual_time();
  if (C10_UNLIKELY(time.tracing)) {
    if (record.activity == Activity::Operator) {
      record.memory_bytes =
          static_cast<int64_t>(Ledger::of(static_cast<c10::DeviceIndex>(record.device)).allocated_bytes());
    }
    time.trace.push_back(record);
    if (time.trace.size() >= kTraceKept) {
      trace_full.store(true, std::memory_order_relaxed);
    }
  }
  time.records.push_back(std::move(record));
  if (C10_UNLIKELY(time.records.size() >= time.sum_up_at)) {
    sum_up(time.main.host, /*host_at_end=*/false);
    time.sum_up_at = std::max(kRecordsKept, 2 * time.records.size());
  }
}

void host_wait_locked(Clocks& mine, Picoseconds until) {
  if (until <= mine.host) {
    return;
  }
  if (mine.shared) {
    Record record;
    record.activity = Activity::HostWait;
    record.start = record.ready = mine.host;
    record.end = until;
    add_record(std::move(record));
  }
  mine.host = until;
}

} // namespace

Picoseconds launch(c10::DeviceIndex device, uint32_t name, const OperatorCost& cost) {
  const ChipRates& rates = chip_rates();
  const c10::StreamId stream = current_stream(device).id();
  if (C10_UNLIKELY(trace_full.load(std::memory_order_relaxed))) {
    flush_trace();
  }
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  DeviceClocks& on_device = mine.device(device);
  mine.host += rates.host_operator_ps;
  Picoseconds& tail = on_device.tail(stream);
  const Picoseconds enqueued = std::max(mine.host, tail);
  // The engine is taken from its start on, not during the launch.
  const Picoseconds begin = on_device.engines[static_cast<size_t>(cost.engine)].take(
      enqueued + rates.device_operator_ps, cost.time, mine.host);
  const Picoseconds start = begin - rates.device_operator_ps;
  tail = begin + cost.time;
  if (C10_UNLIKELY(!mine.shared)) {
    mark_irreproducible_locked("an operator was launched by a thread that is neither the main thread nor autograd's");
    return tail;
  }
  Record record;
  record.start = start;
  record.ready = begin;
  record.end = tail;
  record.bytes = cost.bytes;
  record.flops = cost.flops;
  record.name = name;
  record.stream = static_cast<int32_t>(stream);
  record.device = device;
  record.engine = cost.engine;
  record.host_bound = start == mine.host;
  record.hbm_bound = cost.hbm_bound;
  add_record(std::move(record));
  return tail;
}

Picoseconds stream_time(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  return std::max(mine.host, mine.device(stream.device_index()).tail(stream.id()));
}

void stream_wait(c10::Stream stream, Picoseconds time) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Picoseconds& tail = clocks().device(stream.device_index()).tail(stream.id());
  tail = std::max(tail, time);
}

void host_wait(Picoseconds time) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  host_wait_locked(clocks(), time);
}

void host_wait_stream(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  host_wait_locked(mine, mine.device(stream.device_index()).tail(stream.id()));
}

void host_wait_device(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  Picoseconds until = mine.host;
  for (const Picoseconds tail : mine.device(device).tails) {
    until = std::max(until, tail);
  }
  host_wait_locked(mine, until);
}

bool host_poll(Picoseconds time) {
  {
    std::lock_guard<std::mutex> guard(virtual_time().mutex);
    if (clocks().host >= time) {
      return true;
    }
  }
  const Picoseconds poll_ps = chip_rates().host_poll_ps;
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  clocks().host += poll_ps;
  return false;
}

Picoseconds host_time() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  return clocks().host;
}

Picoseconds enqueue(c10::Stream stream) {
  const Picoseconds launch_ps = chip_rates().host_operator_ps;
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  mine.host += launch_ps;
  return std::max(mine.host, mine.device(stream.device_index()).tail(stream.id()));
}

void record_collective(
    c10::Stream stream,
    uint32_t name,
    GroupName group,
    uint64_t sequence,
    int64_t bytes,
    Transfer times) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  if (!clocks().shared) {
    return;
  }
  Record record;
  record.activity = Activity::Collective;
  record.ready = times.ready;
  record.start = times.start;
  record.end = times.end;
  record.bytes = bytes;
  record.sequence = sequence;
  record.name = name;
  record.group = group.name;
  record.first_rank = group.first_rank;
  record.stream = static_cast<int32_t>(stream.id());
  record.device = stream.device_index();
  add_record(std::move(record));
}

void mark_irreproducible(const std::string& reason) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  mark_irreproducible_locked(reason);
}

std::string irreproducible_reason() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  return virtual_time().irreproducible;
}

StepTimes mark_step() {
  const c10::Stream stream = current_stream(current_device());
  VirtualTime& time = virtual_time();
  std::lock_guard<std::mutex> guard(time.mutex);
  Clocks& mine = clocks();
  TORCH_CHECK(mine.shared, "neuron: a step ends on the main thread, not on a thread of its own clock");
  const Picoseconds tail = mine.device(stream.device_index()).tail(stream.id());
  sum_up(std::max(mine.host, tail), /*host_at_end=*/mine.host >= tail);
  StepTimes next;
  next.start = next.end = time.step.end;
  return std::exchange(time.step, std::move(next));
}

void set_tracing(bool on) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  virtual_time().tracing = on;
}

std::vector<Record> take_trace() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  trace_full.store(false, std::memory_order_relaxed);
  return std::exchange(virtual_time().trace, {});
}

} // namespace trn
