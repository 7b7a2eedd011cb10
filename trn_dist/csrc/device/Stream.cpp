#include "device/Stream.h"

#include "device/Arena.h"
#include "device/Device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

namespace trn {

namespace {

struct StreamTable {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::vector<std::shared_ptr<PendingWork>>> pending;
  c10::StreamId next_id = 1;
};

StreamTable& table() {
  static auto* streams = new StreamTable(); // never destroyed: threads may outlive static destructors
  return *streams;
}

// How many streams have pending work, so that the common case of none costs one load.
std::atomic<int> busy_streams{0};

thread_local std::vector<c10::StreamId> tls_current; // by device; 0 where a thread set none

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, device), id);
}

// Takes what is pending on the streams that `belongs` picks out of the table.
template <typename Predicate>
std::vector<std::shared_ptr<PendingWork>> pending_of(Predicate belongs) {
  std::vector<std::shared_ptr<PendingWork>> works;
  if (busy_streams.load(std::memory_order_acquire) == 0) {
    return works;
  }
  std::lock_guard<std::mutex> guard(table().mutex);
  for (const auto& [key, pending] : table().pending) {
    if (belongs(key)) {
      works.insert(works.end(), pending.begin(), pending.end());
    }
  }
  return works;
}

void drop_done(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> guard(table().mutex);
  auto it = table().pending.find({device, id});
  if (it == table().pending.end()) {
    return;
  }
  std::erase_if(it->second, [&](const auto& work) {
    if (!work->poll()) {
      return false;
    }
    stream_wait(make_stream(device, id), work->end_ps(), work->origin());
    return true;
  });
  if (it->second.empty()) {
    table().pending.erase(it);
    busy_streams.fetch_sub(1, std::memory_order_release);
  }
}

} // namespace

c10::Stream default_stream(c10::DeviceIndex device) {
  return make_stream(device, 0);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = static_cast<size_t>(device);
  return make_stream(device, index < tls_current.size() ? tls_current[index] : 0);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto former = current_stream(stream.device_index());
  const auto index = static_cast<size_t>(stream.device_index());
  if (index >= tls_current.size()) {
    tls_current.resize(index + 1, 0);
  }
  tls_current[index] = stream.id();
  return former;
}

c10::Stream new_stream(c10::DeviceIndex device, int priority) {
  check_device(device);
  (void)priority; // an order of preference between streams, which operators carried out at once do not need
  std::lock_guard<std::mutex> guard(table().mutex);
  return make_stream(device, table().next_id++);
}

void add_pending(c10::Stream stream, std::shared_ptr<PendingWork> work) {
  drop_done(stream.device_index(), stream.id());
  std::lock_guard<std::mutex> guard(table().mutex);
  auto& pending = table().pending[{stream.device_index(), stream.id()}];
  if (pending.empty()) {
    busy_streams.fetch_add(1, std::memory_order_release);
  }
  pending.push_back(std::move(work));
}

void add_pending_or_join(c10::Stream stream, std::shared_ptr<PendingWork> work, bool done) {
  stream_learns(stream, work->clock());
  if (done) {
    stream_wait(stream, work->end_ps(), work->origin());
  } else {
    add_pending(stream, std::move(work));
  }
}

std::vector<std::shared_ptr<PendingWork>> pending_on(c10::Stream stream) {
  return pending_of([&](const auto& key) { return key.first == stream.device_index() && key.second == stream.id(); });
}

void synchronize_stream(c10::Stream stream) {
  for (const auto& work : pending_on(stream)) {
    work->finish();
  }
  drop_done(stream.device_index(), stream.id());
  host_wait_stream(stream);
  host_learns(clock_of(stream));
}

void synchronize_device(c10::DeviceIndex device) {
  Arena::refuse_bad_fork();
  for (const auto& work : pending_of([&](const auto& key) { return key.first == device; })) {
    work->finish();
    host_wait(work->end_ps(), work->origin());
  }
  host_wait_device(device);
  host_learns_of_device(device);
}

bool query_stream(c10::Stream stream) {
  Picoseconds time_ps = stream_time(stream);
  const auto works = pending_on(stream);
  const bool done = poll_all(works, time_ps);
  if (!host_poll(done ? time_ps : INT64_MAX)) {
    return false;
  }
  acknowledge_all(works);
  host_learns(clock_of(stream));
  return true;
}

void record_event(EventState& event, c10::Stream stream) {
  event.device = stream.device_index();
  event.pending = pending_on(stream);
  const Moment moment = record_moment(stream);
  event.time_ps = moment.time;
  event.origin = moment.origin;
  for (const auto& work : event.pending) {
    moment_after(moment.origin, work->origin());
  }
  event.clock = clock_of(stream);
}

Picoseconds finish_event(EventState& event) {
  for (const auto& work : event.pending) {
    work->finish();
    event.time_ps = std::max(event.time_ps, work->end_ps());
  }
  event.pending.clear();
  return event.time_ps;
}

void acknowledge_all(const std::vector<std::shared_ptr<PendingWork>>& works) {
  for (const auto& work : works) {
    work->acknowledge();
  }
}

double elapsed_ms(EventState& from, EventState& to) {
  return static_cast<double>(finish_event(to) - finish_event(from)) / 1e9;
}

bool poll_all(const std::vector<std::shared_ptr<PendingWork>>& works, Picoseconds& time_ps) {
  if (works.empty()) {
    return true;
  }
  mark_irreproducible("the program polled a collective (query, is_completed) instead of waiting for it");
  bool done = true;
  for (const auto& work : works) {
    if (!work->poll()) {
      done = false;
      break;
    }
    time_ps = std::max(time_ps, work->end_ps());
  }
  return done;
}

} // namespace trn
