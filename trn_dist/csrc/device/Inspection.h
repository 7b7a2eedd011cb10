#pragma once

// What looks at the tensors of every operator: none by default, so an operator pays one load for it.
//
// [Note: Memory in flight]
// A collective that was posted and not waited for writes memory at a moment that nobody knows. Until the program has waited
// for it (wait(), an event or stream that stands for it, synchronize()), using what it writes raises. On a chip the same
// program would compute with whatever lies there. What it reads is not looked after: once it has been read, the memory may
// serve another tensor.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace trn {

class PendingWork;

// A tensor of a call, and what the call does with it.
struct Touched {
  at::Tensor tensor;
  bool written = false;
};
using TouchedTensors = c10::SmallVector<Touched, 8>;

// How many want to look: works in flight, the sanitizer, an observer.
extern std::atomic<int> inspections;
inline bool inspecting() {
  return C10_UNLIKELY(inspections.load(std::memory_order_relaxed) != 0);
}
// An operator (or copy) was issued on the current stream of `device`. `name`: see name_id. Call it without a lock.
void inspect(c10::DeviceIndex device, uint32_t name, c10::ArrayRef<Touched> touched);

// Bytes of memory, and whether they are written.
struct MemoryUse {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool written = false;
  bool overlaps(const MemoryUse& other) const {
    return begin < other.end && other.begin < end;
  }
};
using MemoryUses = c10::SmallVector<MemoryUse, 8>;
// The bytes between a tensor's first and last element; empty if it has none.
MemoryUse use_of(const at::Tensor& tensor, bool written);

// From now on until end_flight, those of the bytes that `work` writes are in flight.
void begin_flight(const std::shared_ptr<const PendingWork>& work, MemoryUses uses);
void end_flight(const PendingWork* work) noexcept;
// The memory was freed, so no work writes it any more: what nobody waited for has been done, and held its tensors until then.
void forget_flights(const void* address, size_t nbytes) noexcept;

// Sees every operator: its name and, as CPU tensors over the same bytes, its tensors. nullptr: nobody. It is not called for
// the operators that it runs itself.
using OperatorObserver = std::function<void(const std::string& name, const TouchedTensors& tensors)>;
void set_operator_observer(OperatorObserver observer);

// The line of the program that the calling thread is at, "train.py:12 in main", as a name_id. Takes the GIL.
uint32_t user_line();
void set_user_line_provider(std::function<std::string()> provider);

} // namespace trn
