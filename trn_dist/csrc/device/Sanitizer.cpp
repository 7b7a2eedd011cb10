#include "device/Sanitizer.h"

#include "timing/Journal.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace trn {

std::atomic<Sanitize> sanitize_mode{Sanitize::Off};

namespace {

struct Use {
  MemoryUse span;
  size_t stream = 0; // index
  uint64_t time = 0; // on that stream's count
  uint32_t name = 0;
  uint32_t line = 0;
  bool collective = false;
};

// Of the uses of one storage those that a later one may clash with are kept; beyond this many, those that the host knows to
// be over are dropped.
constexpr size_t kUsesKept = 64;

struct State {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, size_t> indices;
  std::vector<c10::Stream> streams; // by index
  std::vector<StreamClock> clocks; // by index
  StreamClock host;
  ska::flat_hash_map<const void*, std::vector<Use>> uses; // by where the storage begins
  std::set<std::pair<uint32_t, uint32_t>> reported; // pairs of lines
};

State& state() {
  static auto* instance = new State();
  return *instance;
}

void learn(StreamClock& clock, const StreamClock& other) {
  if (clock.size() < other.size()) {
    clock.resize(other.size(), 0);
  }
  for (size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

bool knows(const StreamClock& clock, const Use& use) {
  return use.stream < clock.size() && clock[use.stream] >= use.time;
}

size_t index_of(c10::Stream stream) {
  State& all = state();
  const auto [it, fresh] = all.indices.emplace(std::make_pair(stream.device_index(), stream.id()), all.streams.size());
  if (fresh) {
    all.streams.push_back(stream);
    all.clocks.emplace_back();
  }
  return it->second;
}

// Something is issued on the stream: it comes after what the host has waited for.
uint64_t tick(size_t stream) {
  StreamClock& clock = state().clocks[stream];
  learn(clock, state().host);
  if (clock.size() <= stream) {
    clock.resize(stream + 1, 0);
  }
  return ++clock[stream];
}

std::string describe(const Use& use) {
  const c10::Stream stream = state().streams[use.stream];
  const std::string line = name_of(use.line);
  return c10::str(
      name_of(use.name),
      use.span.written ? " writes it" : " reads it",
      " on stream ",
      stream.id(),
      " of neuron:",
      static_cast<int>(stream.device_index()),
      line.empty() ? "" : ", at ",
      line);
}

// Enters a use; what it says against an earlier one that nothing orders before it.
std::optional<std::string> enter(const void* storage, const Use& use) {
  State& all = state();
  std::vector<Use>& uses = all.uses[storage];
  const StreamClock& clock = all.clocks[use.stream];
  std::optional<std::string> report;
  for (const Use& earlier : uses) {
    if (!earlier.span.overlaps(use.span) || !(earlier.span.written || use.span.written) || knows(clock, earlier)) {
      continue;
    }
    if (!report.has_value() && all.reported.insert({earlier.line, use.line}).second) {
      report = c10::str(
          "neuron: two uses of the same memory that nothing orders; on a chip they may run at the same time\n  first: ",
          describe(earlier),
          "\n  then:  ",
          describe(use),
          "\n  ",
          earlier.collective
              ? c10::str("call wait() on the Work that ", name_of(earlier.name), " returned before the second")
              : c10::str(
                    "let stream ",
                    all.streams[use.stream].id(),
                    " wait for stream ",
                    all.streams[earlier.stream].id(),
                    " between them (wait_stream or wait_event)"));
    }
  }
  // What this use covers need not be looked at again: whoever comes after it comes after those.
  std::erase_if(uses, [&](const Use& earlier) {
    const bool covered = use.span.begin <= earlier.span.begin && earlier.span.end <= use.span.end;
    return covered && (use.span.written || (!earlier.span.written && earlier.stream == use.stream));
  });
  if (uses.size() >= kUsesKept) {
    std::erase_if(uses, [&](const Use& earlier) { return knows(all.host, earlier); });
  }
  uses.push_back(use);
  return report;
}

void tell(const std::vector<std::string>& reports) {
  for (const std::string& report : reports) {
    TORCH_CHECK(sanitize_mode.load() != Sanitize::Raise, report);
    TORCH_WARN(report);
  }
}

} // namespace

void set_sanitizer(Sanitize mode) {
  const Sanitize former = sanitize_mode.exchange(mode);
  if ((former == Sanitize::Off) != (mode == Sanitize::Off)) {
    inspections.fetch_add(mode == Sanitize::Off ? -1 : 1, std::memory_order_relaxed);
    State& all = state();
    std::lock_guard<std::mutex> guard(all.mutex);
    all.uses.clear();
    all.reported.clear();
  }
}

void sanitize(c10::Stream stream, uint32_t name, c10::ArrayRef<Touched> touched) {
  const uint32_t line = user_line();
  std::vector<std::string> reports;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    const size_t index = index_of(stream);
    const uint64_t time = tick(index);
    for (const Touched& one : touched) {
      const MemoryUse span = use_of(one.tensor, one.written);
      if (span.begin == span.end || !one.tensor.is_privateuseone()) {
        continue;
      }
      if (auto report = enter(one.tensor.storage().data(), {span, index, time, name, line, /*collective=*/false})) {
        reports.push_back(std::move(*report));
      }
    }
  }
  tell(reports);
}

StreamClock sanitize_collective(
    c10::Stream stream,
    c10::Stream current,
    uint32_t name,
    c10::ArrayRef<MemoryUse> uses,
    c10::ArrayRef<at::Tensor> tensors) {
  const uint32_t line = user_line();
  std::vector<std::string> reports;
  StreamClock clock;
  {
    std::lock_guard<std::mutex> guard(state().mutex);
    const size_t from = index_of(current);
    const size_t index = index_of(stream);
    tick(from);
    learn(state().clocks[index], state().clocks[from]);
    const uint64_t time = tick(index);
    for (const MemoryUse& use : uses) {
      for (const at::Tensor& tensor : tensors) {
        const auto* storage = static_cast<const std::byte*>(tensor.storage().data());
        if (storage <= use.begin && use.begin < storage + tensor.storage().nbytes()) {
          if (auto report = enter(storage, {use, index, time, name, line, /*collective=*/true})) {
            reports.push_back(std::move(*report));
          }
          break;
        }
      }
    }
    clock = state().clocks[index];
  }
  tell(reports);
  return clock;
}

StreamClock clock_of(c10::Stream stream) {
  if (!sanitizing()) {
    return {};
  }
  std::lock_guard<std::mutex> guard(state().mutex);
  const size_t index = index_of(stream);
  learn(state().clocks[index], state().host);
  return state().clocks[index];
}

void stream_learns(c10::Stream stream, const StreamClock& clock) {
  if (sanitizing()) {
    std::lock_guard<std::mutex> guard(state().mutex);
    learn(state().clocks[index_of(stream)], clock);
  }
}

void host_learns(const StreamClock& clock) {
  if (sanitizing()) {
    std::lock_guard<std::mutex> guard(state().mutex);
    learn(state().host, clock);
  }
}

void host_learns_of_device(c10::DeviceIndex device) {
  if (sanitizing()) {
    State& all = state();
    std::lock_guard<std::mutex> guard(all.mutex);
    for (size_t i = 0; i < all.streams.size(); ++i) {
      if (all.streams[i].device_index() == device) {
        learn(all.host, all.clocks[i]);
      }
    }
  }
}

void forget_memory(const void* address) noexcept {
  if (sanitizing()) {
    std::lock_guard<std::mutex> guard(state().mutex);
    state().uses.erase(address);
  }
}

} // namespace trn
