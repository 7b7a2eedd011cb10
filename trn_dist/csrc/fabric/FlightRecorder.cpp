#include "fabric/FlightRecorder.h"

#include "fabric/RankStatus.h"
#include "fabric/StagedBlock.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

namespace trn {

namespace {

constexpr size_t kWords = sizeof(FlightRecord) / 8;
static_assert(sizeof(FlightRecord) == 8 * kWords && std::is_trivially_copyable_v<FlightRecord>);
constexpr uint64_t kMostRecords = 1 << 20;

// A record whose words are written one by one: a reader that comes in between sees the id of neither the old nor the new.
struct SharedRecord {
  std::array<std::atomic<uint64_t>, kWords> words;
};
constexpr size_t kIdWord = offsetof(FlightRecord, id) / 8;
constexpr size_t kCompletedWord = offsetof(FlightRecord, completed_ns) / 8;
constexpr size_t kFailedWord = offsetof(FlightRecord, failed) / 8;

int64_t clock_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

struct Ring {
  uint64_t capacity = 0;
  uint64_t offset = 0;
  SharedRecord* records = nullptr;
  std::atomic<uint64_t> next{1};
  int64_t since_1970_ns = 0; // of the steady clock's zero
};

uint64_t configured_capacity() {
  for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    if (const char* value = std::getenv(name)) {
      char* end = nullptr;
      errno = 0;
      const long long number = std::strtoll(value, &end, 10);
      TORCH_CHECK_VALUE(
          end != value && *end == 0 && errno == 0 && number >= 0 && static_cast<uint64_t>(number) <= kMostRecords,
          name,
          "='",
          value,
          "': must be a number of calls, 0 to ",
          kMostRecords);
      return static_cast<uint64_t>(number);
    }
  }
  return 2000;
}

Ring& ring() {
  // Never destroyed: peers may look until the process ends.
  static auto* instance = [] {
    auto* made = new Ring();
    const uint64_t capacity = configured_capacity();
    made->since_1970_ns = clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC);
    if (capacity > 0) {
      auto* block = new StagedBlock(capacity * sizeof(SharedRecord));
      made->offset = block->offset();
      made->records = reinterpret_cast<SharedRecord*>(block->data());
      for (uint64_t i = 0; i < capacity; ++i) {
        new (made->records + i) SharedRecord{};
      }
    }
    made->capacity = capacity;
    return made;
  }();
  return *instance;
}

} // namespace

uint64_t flight_capacity() {
  return ring().capacity;
}

uint64_t flight_offset() {
  return ring().offset;
}

uint64_t record_call(FlightRecord record, int64_t created_steady_ns) {
  Ring& own = ring();
  if (own.capacity == 0) {
    return 0;
  }
  record.id = own.next.fetch_add(1, std::memory_order_relaxed);
  record.created_ns = own.since_1970_ns + created_steady_ns;
  SharedRecord& shared = own.records[record.id % own.capacity];
  std::array<uint64_t, kWords> words;
  std::memcpy(words.data(), &record, sizeof(record));
  shared.words[kIdWord].store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kWords; ++i) {
    if (i != kIdWord) {
      shared.words[i].store(words[i], std::memory_order_relaxed);
    }
  }
  shared.words[kIdWord].store(record.id, std::memory_order_release);
  return record.id;
}

void record_end(uint64_t id, bool failed) {
  if (id == 0) {
    return;
  }
  Ring& own = ring();
  SharedRecord& shared = own.records[id % own.capacity];
  if (shared.words[kIdWord].load(std::memory_order_relaxed) != id) {
    return; // too long ago
  }
  if (failed) {
    shared.words[kFailedWord].store(1, std::memory_order_relaxed);
    return;
  }
  // Four milliseconds are near enough, and a tenth of the price.
  const int64_t now = own.since_1970_ns + clock_ns(CLOCK_MONOTONIC_COARSE);
  const auto created =
      static_cast<int64_t>(shared.words[offsetof(FlightRecord, created_ns) / 8].load(std::memory_order_relaxed));
  shared.words[kCompletedWord].store(std::max(now, created), std::memory_order_release);
}

std::vector<FlightRecord> flight_records(const Fabric::Peer& peer) {
  std::vector<FlightRecord> result;
  if (peer.status == nullptr) {
    return result;
  }
  const uint64_t capacity = peer.status->flight_capacity.load(std::memory_order_acquire);
  const uint64_t offset = peer.status->flight_offset.load(std::memory_order_acquire);
  if (capacity == 0 || capacity > kMostRecords || offset % alignof(SharedRecord) != 0 || offset > peer.size ||
      capacity * sizeof(SharedRecord) > peer.size - offset) {
    return result;
  }
  const auto* records = reinterpret_cast<const SharedRecord*>(peer.base + offset);
  for (uint64_t i = 0; i < capacity; ++i) {
    const uint64_t id = records[i].words[kIdWord].load(std::memory_order_acquire);
    std::array<uint64_t, kWords> words;
    for (size_t j = 0; j < kWords; ++j) {
      words[j] = records[i].words[j].load(std::memory_order_relaxed);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (id == 0 || records[i].words[kIdWord].load(std::memory_order_relaxed) != id) {
      continue;
    }
    FlightRecord record;
    std::memcpy(static_cast<void*>(&record), words.data(), sizeof(record));
    result.push_back(record);
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return result;
}

} // namespace trn
