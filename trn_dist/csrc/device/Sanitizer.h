#pragma once

// The stream sanitizer (TRN_SANITIZE=1): finds two uses of the same memory that nothing orders. Operators are carried out as
// they are issued, so a missing wait_stream or a collective that nobody waited for gives right numbers here; on a chip the
// two uses may run at the same time.
//
// [Note: Happens before]
// Each stream counts what it is given, and knows for each other stream how far that one is certain to have come: its clock.
// An event carries its stream's clock to the stream that waits for it, a synchronisation carries it to the host, and the
// host's clock goes into whatever is issued next. One use comes before another if the later one's stream knows of it.

#include "device/Inspection.h"

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace trn {

// How far each stream is known to have come, by the order in which the sanitizer met the streams; empty while it is off.
using StreamClock = std::vector<uint64_t>;

enum class Sanitize : int { Off, Warn, Raise };
void set_sanitizer(Sanitize mode);
extern std::atomic<Sanitize> sanitize_mode;
inline bool sanitizing() {
  return C10_UNLIKELY(sanitize_mode.load(std::memory_order_relaxed) != Sanitize::Off);
}

// All of the following do nothing while it is off.

// An operator on `stream` touches these tensors. Reports, by an error or a warning, what is not ordered before it.
void sanitize(c10::Stream stream, uint32_t name, c10::ArrayRef<Touched> touched);
// A collective on its own stream, which begins after what `current` holds. Returns what whoever waits for it learns.
StreamClock sanitize_collective(
    c10::Stream stream,
    c10::Stream current,
    uint32_t name,
    c10::ArrayRef<MemoryUse> uses,
    c10::ArrayRef<at::Tensor> tensors);
StreamClock clock_of(c10::Stream stream);
void stream_learns(c10::Stream stream, const StreamClock& clock);
void host_learns(const StreamClock& clock);
void host_learns_of_device(c10::DeviceIndex device);
// The memory that begins there was freed.
void forget_memory(const void* address) noexcept;

} // namespace trn
