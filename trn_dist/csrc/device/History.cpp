#include "device/History.h"

#include "device/Device.h"
#include "device/Ledger.h"

#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <mutex>

namespace trn {

std::atomic<bool> history_enabled{false};

namespace {

HistorySettings& mutable_settings() {
  static auto* settings = new HistorySettings();
  return *settings;
}

} // namespace

const char* name_of(MemoryAction action) {
  switch (action) {
    case MemoryAction::kAlloc:
      return "alloc";
    case MemoryAction::kFreeRequested:
      return "free_requested";
    case MemoryAction::kFreeCompleted:
      return "free_completed";
    case MemoryAction::kSegmentAlloc:
      return "segment_alloc";
    case MemoryAction::kSegmentFree:
      return "segment_free";
    case MemoryAction::kSnapshot:
      return "snapshot";
    case MemoryAction::kOutOfMemory:
      return "oom";
  }
  return "unknown";
}

void set_history(const HistorySettings& settings) {
  // Off while the settings change; events that another thread records meanwhile may be missed.
  history_enabled.store(false);
  mutable_settings() = settings;
  for (c10::DeviceIndex device = 0; !settings.enabled && device < device_count(); ++device) {
    if (Ledger::exists(device)) {
      Ledger::of(device).clear_history();
    }
  }
  history_enabled.store(settings.enabled);
}

const HistorySettings& history_settings() {
  return mutable_settings();
}

Context gather_context(ContextLevel level) {
  if (history_settings().context < level) {
    return nullptr;
  }
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/history_settings().cpp_frames);
}

std::string line_of(const Context& context) {
  auto* traceback = dynamic_cast<torch::CapturedTraceback*>(context.get());
  if (traceback == nullptr) {
    return "";
  }
  const torch::SymbolizedTracebacks symbolized = torch::symbolize({traceback});
  if (symbolized.tracebacks.empty() || symbolized.tracebacks[0].empty()) {
    return "";
  }
  auto text = [](const auto& frame) { return c10::str(frame.filename, ":", frame.lineno, " in ", frame.funcname); };
  for (const uint64_t index : symbolized.tracebacks[0]) {
    const auto& frame = symbolized.all_frames[index];
    if (frame.filename.find("/torch/") == std::string::npos) {
      return text(frame);
    }
  }
  return text(symbolized.all_frames[symbolized.tracebacks[0].front()]);
}

void History::record(MemoryAction action, uint64_t address, uint64_t size, int64_t stream, Context context) {
  const HistorySettings& settings = history_settings();
  if (!settings.events || settings.max_entries == 0) {
    return;
  }
  events_.push_back({action, address, size, stream, c10::getTime() / 1000, std::move(context)});
  while (events_.size() > settings.max_entries) {
    events_.pop_front();
  }
}

} // namespace trn
