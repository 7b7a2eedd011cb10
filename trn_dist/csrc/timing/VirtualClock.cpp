#include "timing/VirtualClock.h"

#include "device/Device.h"
#include "device/Ledger.h"
#include "device/Stream.h"
#include "timing/Clocks.h"
#include "timing/CompiledRegion.h"
#include "timing/Trace.h"

#include <c10/util/ApproximateClock.h>

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

thread_local int UntimedScope::depth_ = 0;

namespace {

thread_local int compiled_depth = 0;
thread_local bool compiled_launched = false; // the outermost region has launched its program

// Records of a step that are kept; then they are summed up as far as nothing can come before.
constexpr size_t kRecordsKept = 1 << 17;

// Records of a trace that are kept before they are written out.
constexpr size_t kTraceKept = 1 << 16;
std::atomic<bool> trace_full{false};

std::atomic<bool> profiling{false};
thread_local std::vector<int32_t> tls_correlations;

struct VirtualTime {
  std::mutex mutex; // of everything below, and of all clocks
  Clocks main;
  StepAccount account; // of the step that goes on
  std::vector<Record> trace;
  bool tracing = false;
  std::vector<ProfiledRecord> profile;
  size_t sum_up_at = kRecordsKept;
  std::unique_ptr<Program> program; // being recorded, or none
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

// The program that is being recorded, if the calling thread's clocks are its. With the lock held.
Program* program_of(const Clocks& mine) {
  return C10_UNLIKELY(virtual_time().program != nullptr) && mine.shared ? virtual_time().program.get() : nullptr;
}

// `site`: of a collective, which is entered long after its launch; an operator's is here and now.
void add_record(Record&& record, const LaunchSite* site = nullptr) {
  VirtualTime& time = virtual_time();
  if (C10_UNLIKELY(profiling.load(std::memory_order_relaxed))) {
    time.profile.push_back({record, site != nullptr ? *site : launch_site()});
  }
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
  time.account.add(std::move(record));
  if (C10_UNLIKELY(time.account.size() >= time.sum_up_at)) {
    time.account.sum_up(time.main.host, /*host_at_end=*/false);
    time.sum_up_at = std::max(kRecordsKept, 2 * time.account.size());
  }
}

void host_wait_locked(Clocks& mine, Picoseconds until) {
  std::optional<Record> record = mine.host_wait(until);
  if (record.has_value() && mine.shared) {
    add_record(std::move(*record));
  }
}

} // namespace

CompiledRegion::CompiledRegion() {
  ++compiled_depth;
}

CompiledRegion::~CompiledRegion() {
  if (--compiled_depth == 0) {
    compiled_launched = false;
  }
}

bool CompiledRegion::continues() {
  return compiled_depth > 0 && std::exchange(compiled_launched, true);
}

Picoseconds launch(c10::DeviceIndex device, uint32_t name, const OperatorCost& cost) {
  const ChipRates& rates = chip_rates();
  const c10::StreamId stream = current_stream(device).id();
  if (C10_UNLIKELY(UntimedScope::active())) {
    return stream_time(current_stream(device));
  }
  if (C10_UNLIKELY(trace_full.load(std::memory_order_relaxed))) {
    flush_trace();
  }
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  const bool launched = CompiledRegion::continues();
  Record record = mine.launch(device, stream, name, cost, launched, rates);
  const Picoseconds end = record.end;
  if (C10_UNLIKELY(!mine.shared)) {
    mark_irreproducible_locked("an operator was launched by a thread that is neither the main thread nor autograd's");
    return end;
  }
  if (Program* program = program_of(mine)) {
    program->launch(device, stream, name, cost.work, launched);
  }
  add_record(std::move(record));
  return end;
}

Origin last_launch() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  const Program* program = program_of(clocks());
  return program == nullptr ? Origin{} : Origin{Origin::Launch, program->launches() - 1};
}

Picoseconds stream_time(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  return clocks().stream_time(stream.device_index(), stream.id());
}

Moment record_moment(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  Moment moment;
  moment.time = mine.stream_time(stream.device_index(), stream.id());
  if (Program* program = program_of(mine)) {
    moment.origin = {Origin::Moment, program->moment(stream.device_index(), stream.id())};
  }
  return moment;
}

void moment_after(const Origin& moment, const Origin& transfer) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  if (Program* program = program_of(clocks()); program != nullptr && moment.kind == Origin::Moment) {
    if (transfer.index < 0) {
      program->cannot_replay("an event comes after a collective that another thread began");
      return;
    }
    program->act(Action::RecordAfter, 0, static_cast<c10::StreamId>(moment.index), transfer.index);
  }
}

void stream_wait(c10::Stream stream, Picoseconds time, Origin origin) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  if (Program* program = program_of(mine); program != nullptr && time > 0) {
    program->wait(Action::StreamWait, stream.device_index(), stream.id(), origin);
  }
  mine.stream_wait(stream.device_index(), stream.id(), time);
}

void stream_wait_stream(c10::Stream stream, c10::Stream other) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  if (Program* program = program_of(mine)) {
    const int64_t both = (static_cast<int64_t>(other.device_index()) << 32) | other.id();
    program->act(Action::StreamWaitStream, stream.device_index(), stream.id(), both);
  }
  mine.stream_wait(stream.device_index(), stream.id(), mine.stream_time(other.device_index(), other.id()));
}

void host_wait(Picoseconds time, Origin origin) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  if (Program* program = program_of(mine); program != nullptr && time > 0) {
    program->wait(Action::HostWait, 0, 0, origin);
  }
  host_wait_locked(mine, time);
}

void host_wait_stream(c10::Stream stream) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  if (Program* program = program_of(mine)) {
    program->act(Action::HostWaitStream, stream.device_index(), stream.id(), 0);
  }
  host_wait_locked(mine, mine.device(stream.device_index()).tail(stream.id()));
}

void host_wait_device(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  if (Program* program = program_of(mine)) {
    program->act(Action::HostWaitDevice, device, 0, 0);
  }
  host_wait_locked(mine, mine.device_time(device));
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
  Clocks& mine = clocks();
  if (Program* program = program_of(mine)) {
    program->act(Action::Poll, 0, 0, 0);
  }
  mine.host += poll_ps;
  return false;
}

Picoseconds host_time() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  return clocks().host;
}

EnqueuedTransfer enqueue(c10::Stream stream) {
  const ChipRates& rates = chip_rates();
  const bool launched = CompiledRegion::continues();
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  Clocks& mine = clocks();
  EnqueuedTransfer enqueued;
  enqueued.ready = mine.enqueue(stream.device_index(), stream.id(), launched, rates);
  if (Program* program = program_of(mine)) {
    enqueued.transfer = program->enqueue(stream.device_index(), stream.id(), launched);
  }
  return enqueued;
}

void describe_transfer(int64_t transfer, RecordedTransfer description) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  if (transfer >= 0 && virtual_time().program != nullptr) {
    virtual_time().program->describe(transfer, std::move(description));
  }
}

bool recording_program() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  return virtual_time().program != nullptr;
}

void start_program() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  VirtualTime& time = virtual_time();
  TORCH_CHECK(time.program == nullptr, "neuron: the program is being recorded already");
  TORCH_CHECK(
      time.main.host == 0, "neuron: a program is recorded from its first operator on, and some have been launched");
  time.program = std::make_unique<Program>();
}

Program program_so_far() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  TORCH_CHECK(virtual_time().program != nullptr, "neuron: no program is being recorded");
  return *virtual_time().program;
}

void record_collective(
    c10::Stream stream,
    uint32_t name,
    GroupName group,
    uint64_t sequence,
    int64_t bytes,
    Transfer times,
    const LaunchSite& site,
    int64_t transfer) {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  if (!clocks().shared) {
    return;
  }
  if (Program* program = program_of(clocks()); program != nullptr && transfer >= 0) {
    program->act(Action::Enter, 0, 0, transfer);
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
  add_record(std::move(record), &site);
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
  if (Program* program = program_of(mine)) {
    program->act(Action::MarkStep, stream.device_index(), stream.id(), 0);
  }
  const Picoseconds tail = mine.device(stream.device_index()).tail(stream.id());
  time.account.sum_up(std::max(mine.host, tail), /*host_at_end=*/mine.host >= tail);
  return time.account.next_step();
}

StepTimes times_so_far() {
  VirtualTime& time = virtual_time();
  std::lock_guard<std::mutex> guard(time.mutex);
  return time.account.so_far(time.main.host);
}

LaunchSite launch_site() {
  if (C10_LIKELY(!profiling.load(std::memory_order_relaxed))) {
    return {};
  }
  LaunchSite site;
  site.host_ns = c10::getTime();
  site.correlation = tls_correlations.empty() ? 0 : tls_correlations.back();
  site.thread = static_cast<int32_t>(syscall(SYS_gettid));
  return site;
}

Picoseconds start_profile() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  virtual_time().profile.clear();
  profiling.store(true, std::memory_order_relaxed);
  return clocks().host;
}

std::vector<ProfiledRecord> stop_profile() {
  std::lock_guard<std::mutex> guard(virtual_time().mutex);
  profiling.store(false, std::memory_order_relaxed);
  return std::exchange(virtual_time().profile, {});
}

void push_correlation(int32_t id) {
  tls_correlations.push_back(id);
}

void pop_correlation() {
  if (!tls_correlations.empty()) { // the operator began before the profile
    tls_correlations.pop_back();
  }
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
