#pragma once

// The history of a device's memory: who allocated and freed what, with the lines of the program, as PyTorch's memory
// visualiser reads it. Kept by the Ledger while torch.neuron.memory._record_memory_history is on; costs one load when off.

#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace trn {

using Context = std::shared_ptr<c10::GatheredContext>; // the lines of the program; null when not recorded

enum class MemoryAction {
  kAlloc,
  kFreeRequested,
  kFreeCompleted,
  kSegmentAlloc,
  kSegmentFree,
  kSnapshot,
  kOutOfMemory
};
// As torch.cuda.memory._snapshot names it: "alloc", "free_requested", ...
const char* name_of(MemoryAction action);

struct MemoryEvent {
  MemoryAction action = MemoryAction::kAlloc;
  uint64_t address = 0; // in the modelled address space; for kOutOfMemory the bytes that are free
  uint64_t size = 0; // bytes
  int64_t stream = 0;
  int64_t time_us = 0; // of the host's clock
  Context context;
};

// Which events have their lines recorded; each level includes the ones before.
enum class ContextLevel : int { kNever = 0, kState = 1, kAlloc = 2, kAll = 3 };

struct HistorySettings {
  bool enabled = false;
  bool events = false; // false: only the context of live blocks
  ContextLevel context = ContextLevel::kAll;
  bool cpp_frames = false;
  size_t max_entries = SIZE_MAX;
};

// For all devices. Turning the history off drops what was recorded.
void set_history(const HistorySettings& settings);
const HistorySettings& history_settings();

extern std::atomic<bool> history_enabled;

Context gather_context(ContextLevel level);
// The calling program's lines when contexts of `level` are recorded, else null. Takes the GIL: call it without a lock.
inline Context context_for(ContextLevel level) {
  return C10_LIKELY(!history_enabled.load(std::memory_order_relaxed)) ? nullptr : gather_context(level);
}

// The line of the program behind a context, "train.py:12 in main"; PyTorch's own frames are skipped. Takes the GIL.
std::string line_of(const Context& context);

// The last events of one device. Guarded by its owner's lock.
class History {
 public:
  void record(MemoryAction action, uint64_t address, uint64_t size, int64_t stream, Context context);
  void clear() {
    events_.clear();
  }
  const std::deque<MemoryEvent>& events() const {
    return events_;
  }

 private:
  std::deque<MemoryEvent> events_;
};

} // namespace trn
