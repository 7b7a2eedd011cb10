#pragma once

// Allocation of device memory: the bytes come from the Arena, the charge goes to the device's Ledger.

#include "device/Arena.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace trn {

// The allocator that PyTorch calls for storages on `neuron`.
c10::Allocator* device_allocator();

// While one of these lives, CPU allocations of the calling thread come from the arena, so that what a CPU kernel returns
// can become a neuron tensor without a copy. Nothing is charged to a ledger: a kernel's scratch is not the chip's.
class ArenaScope {
 public:
  ArenaScope() {
    ++depth_;
  }
  ~ArenaScope() {
    --depth_;
  }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;
  static bool active() {
    return depth_ > 0;
  }

 private:
  static thread_local int depth_;
};

// Turns the bytes that a CPU kernel allocated into device memory, charged to the device's ledger: in place when they lie
// in the arena, else by a copy. Throws c10::OutOfMemoryError when the chip would have had no room.
c10::DataPtr adopt(c10::DataPtr cpu_data, size_t nbytes, c10::DeviceIndex device);

// Puts the allocator that ArenaScope speaks of in front of PyTorch's CPU allocator.
void install_cpu_allocator();

// Gives cached segments of every ledger and free pages of the arena back.
void empty_cache();

} // namespace trn
