#pragma once

// What a rank tells the other ranks of the machine about itself: whether a debugger holds it, and what its threads are
// blocked in. It lies in the rank's arena, one for the process; Fabric passes its place on. Written only by waits that have
// lasted for a while, never on the way of a collective that goes through.

#include "fabric/SharedText.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace trn {

enum class WaitKind : uint32_t {
  None,
  Collective, // for the ranks that have not posted `sequence`
  Slot, // for the ranks that have not retired `sequence` - kSlots
  Receive, // for a message with `tag` from rank `from`, or from any
  Other, // for what cannot be judged from outside
};

// A wait in the words of the rank that waits. Ranks are those of the group.
struct WaitRecord {
  WaitKind kind = WaitKind::Other;
  int rank = 0;
  int from = -1;
  int tag = 0;
  uint64_t sequence = 0;
  uint64_t fabric = 0; // which numbering of ranks `leader` is of
  int leader = 0; // place in the fabric of the group's rank 0, whose arena holds the control block
  int size = 0;
  uint64_t control_offset = 0;
  uint64_t nonce = 0; // of the control block
  std::string text; // "recv from rank 1 (tag 0, 40 bytes) of group 0 at train.py:12"
};

class SharedWait {
 public:
  void store(const WaitRecord& record);
  WaitRecord load() const;
  bool active() const {
    return kind_.load(std::memory_order_relaxed) != static_cast<uint32_t>(WaitKind::None);
  }
  void clear() {
    kind_.store(static_cast<uint32_t>(WaitKind::None), std::memory_order_relaxed);
  }

 private:
  std::atomic<uint32_t> kind_{0};
  std::atomic<int32_t> rank_{0};
  std::atomic<int32_t> from_{0};
  std::atomic<int32_t> tag_{0};
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> fabric_{0};
  std::atomic<int32_t> leader_{0};
  std::atomic<int32_t> size_{0};
  std::atomic<uint64_t> control_offset_{0};
  std::atomic<uint64_t> nonce_{0};
  SharedText<512> text_;
};

constexpr int kMaxWaits = 4; // threads of one rank that wait at the same time; more are not judged

struct alignas(64) RankStatus {
  uint64_t magic;
  std::atomic<uint32_t> paused; // threads at the prompt of a debugger
  std::atomic<uint64_t> flight_offset; // of its flight recorder's ring
  std::atomic<uint64_t> flight_capacity;
  std::atomic<uint64_t> version; // odd while `waits` changes; the same twice: nothing has changed between
  std::atomic<uint32_t> waiting; // threads that are blocked, whether or not they have a place in `waits`
  std::atomic<uint32_t> threads; // of the program, that could still call something or are among the blocked
  std::array<SharedWait, kMaxWaits> waits;
};

constexpr uint64_t kStatusMagic = 0x74726e2d73746131;

// This process's own, made at the first call.
RankStatus& own_status();
uint64_t own_status_offset();

// Keeps a thread's wait in the own status from enter() on, until the object is destroyed.
class BlockedScope {
 public:
  BlockedScope() = default;
  ~BlockedScope();
  BlockedScope(const BlockedScope&) = delete;
  BlockedScope& operator=(const BlockedScope&) = delete;
  bool entered() const {
    return entered_;
  }
  void enter(const WaitRecord& record);

 private:
  bool entered_ = false;
  int place_ = -1;
};

// Tells the others how many threads of the program there are, if that has changed.
void publish_threads(uint32_t threads);

// Between these a debugger has the program: the deadlines of the ranks of this machine stand still.
void begin_pause();
void end_pause();

} // namespace trn
