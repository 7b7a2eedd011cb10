#include "fabric/RankStatus.h"

#include "fabric/FlightRecorder.h"
#include "fabric/StagedBlock.h"

#include <mutex>
#include <new>

namespace trn {

namespace {

// Of this process: its threads take turns.
std::mutex& writers() {
  static auto* instance = new std::mutex();
  return *instance;
}

StagedBlock& own_block() {
  // Never destroyed: peers may look until the process ends.
  static auto* instance = [] {
    auto* block = new StagedBlock(sizeof(RankStatus));
    new (block->data()) RankStatus{};
    auto* status = reinterpret_cast<RankStatus*>(block->data());
    status->magic = kStatusMagic;
    status->flight_offset.store(flight_offset(), std::memory_order_relaxed);
    status->flight_capacity.store(flight_capacity(), std::memory_order_relaxed);
    return block;
  }();
  return *instance;
}

} // namespace

void SharedWait::store(const WaitRecord& record) {
  constexpr auto relaxed = std::memory_order_relaxed;
  rank_.store(record.rank, relaxed);
  from_.store(record.from, relaxed);
  tag_.store(record.tag, relaxed);
  sequence_.store(record.sequence, relaxed);
  fabric_.store(record.fabric, relaxed);
  leader_.store(record.leader, relaxed);
  size_.store(record.size, relaxed);
  control_offset_.store(record.control_offset, relaxed);
  nonce_.store(record.nonce, relaxed);
  text_.store(record.text);
  kind_.store(static_cast<uint32_t>(record.kind), relaxed);
}

WaitRecord SharedWait::load() const {
  constexpr auto relaxed = std::memory_order_relaxed;
  WaitRecord record;
  record.kind = static_cast<WaitKind>(kind_.load(relaxed));
  record.rank = rank_.load(relaxed);
  record.from = from_.load(relaxed);
  record.tag = tag_.load(relaxed);
  record.sequence = sequence_.load(relaxed);
  record.fabric = fabric_.load(relaxed);
  record.leader = leader_.load(relaxed);
  record.size = size_.load(relaxed);
  record.control_offset = control_offset_.load(relaxed);
  record.nonce = nonce_.load(relaxed);
  record.text = text_.load();
  return record;
}

RankStatus& own_status() {
  return *reinterpret_cast<RankStatus*>(own_block().data());
}

uint64_t own_status_offset() {
  return own_block().offset();
}

void BlockedScope::enter(const WaitRecord& record) {
  std::lock_guard<std::mutex> guard(writers());
  RankStatus& status = own_status();
  status.version.fetch_add(1, std::memory_order_seq_cst);
  for (int i = 0; i < kMaxWaits && place_ < 0; ++i) {
    if (!status.waits[i].active()) {
      status.waits[i].store(record);
      place_ = i;
    }
  }
  status.waiting.fetch_add(1, std::memory_order_relaxed);
  status.version.fetch_add(1, std::memory_order_seq_cst);
  entered_ = true;
}

BlockedScope::~BlockedScope() {
  if (!entered_ || Arena::in_bad_fork()) {
    return;
  }
  std::lock_guard<std::mutex> guard(writers());
  RankStatus& status = own_status();
  status.version.fetch_add(1, std::memory_order_seq_cst);
  if (place_ >= 0) {
    status.waits[place_].clear();
  }
  status.waiting.fetch_sub(1, std::memory_order_relaxed);
  status.version.fetch_add(1, std::memory_order_seq_cst);
}

void publish_threads(uint32_t threads) {
  std::lock_guard<std::mutex> guard(writers());
  RankStatus& status = own_status();
  if (status.threads.load(std::memory_order_relaxed) != threads) {
    status.version.fetch_add(1, std::memory_order_seq_cst);
    status.threads.store(threads, std::memory_order_relaxed);
    status.version.fetch_add(1, std::memory_order_seq_cst);
  }
}

void begin_pause() {
  own_status().paused.fetch_add(1, std::memory_order_release);
}

void end_pause() {
  own_status().paused.fetch_sub(1, std::memory_order_release);
}

} // namespace trn
