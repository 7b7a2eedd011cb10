#include "device/Allocator.h"

#include "device/Device.h"
#include "device/Inspection.h"
#include "device/Ledger.h"
#include "device/Sanitizer.h"
#include "device/Stream.h"
#include "device/TimingOnly.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>

namespace trn {

thread_local int ArenaScope::depth_ = 0;

namespace {

// torch.profiler with profile_memory=True.
void report_to_profiler(void* address, int64_t nbytes, const Ledger& ledger, c10::DeviceIndex device) {
  if (C10_UNLIKELY(c10::memoryProfilingEnabled())) {
    c10::reportMemoryUsageToProfiler(
        address, nbytes, ledger.allocated_bytes(), ledger.reserved_bytes(), c10::Device(kNeuron, device));
  }
}

// The context of a DataPtr is its address, as Allocator::raw_allocate demands; the arena knows the block.
void delete_block(void* address) {
  // A forked child shares its parent's pages and has a copy of its books: it may drop tensors and change neither.
  if (C10_UNLIKELY(Arena::in_bad_fork())) {
    return;
  }
  forget_memory(address);
  if (C10_UNLIKELY(timing_only())) {
    forget_known(address);
  }
  Arena& arena = Arena::get();
  Arena::Block* block = arena.block_at(address);
  if (inspecting()) {
    forget_flights(address, block->size);
  }
  if (block->ledger_entry != nullptr) {
    Ledger& ledger = Ledger::of(block->device);
    auto* entry = static_cast<Ledger::Block*>(block->ledger_entry);
    const auto freed = static_cast<int64_t>(entry->requested);
    ledger.release(entry);
    report_to_profiler(address, -freed, ledger, block->device);
  }
  arena.free(block);
}

c10::DataPtr data_of(const Arena& arena, const Arena::Block* block, c10::Device device) {
  void* address = arena.address(block);
  return {address, address, &delete_block, device};
}

void charge(Arena::Block* block, size_t nbytes, c10::DeviceIndex device) {
  Ledger& ledger = Ledger::of(device);
  block->ledger_entry = ledger.allocate(nbytes, current_stream(device).id());
  block->device = device;
  report_to_profiler(Arena::get().address(block), static_cast<int64_t>(nbytes), ledger, device);
}

class NeuronAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const auto index = current_device();
    const c10::Device device(kNeuron, index);
    if (nbytes == 0) {
      return {nullptr, device};
    }
    Arena& arena = Arena::get();
    Arena::Block* block = arena.allocate(nbytes);
    c10::DataPtr data = data_of(arena, block, device);
    charge(block, nbytes, index);
    return data;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    empty_cache();
  }
  // Operators are carried out as they are issued, so no stream can still be using memory that is being freed.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return Ledger::of(device).stats();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Ledger::of(device).reset_accumulated_stats();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Ledger::of(device).reset_peak_stats();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Ledger& ledger = Ledger::of(device);
    return {ledger.total_bytes() - ledger.reserved_bytes(), ledger.total_bytes()};
  }
};

class ScopedCpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (C10_LIKELY(!ArenaScope::active()) || nbytes == 0) {
      return next_->allocate(nbytes);
    }
    Arena& arena = Arena::get();
    return data_of(arena, arena.allocate(nbytes), c10::Device(c10::DeviceType::CPU));
  }
  // oneDNN keeps what raw_allocate gave it beyond the operator, so the deleter goes by where the address lies.
  c10::DeleterFnPtr raw_deleter() const override {
    return &ScopedCpuAllocator::raw_delete;
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return next_->is_simple_data_ptr(data);
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

  static ScopedCpuAllocator& get() {
    static auto* allocator = new ScopedCpuAllocator();
    return *allocator;
  }

 private:
  ScopedCpuAllocator() : next_(c10::GetCPUAllocator()) {}
  static void raw_delete(void* address) {
    if (Arena::owns(address)) {
      delete_block(address);
    } else {
      get().next_->raw_deleter()(address);
    }
  }

  c10::Allocator* const next_; // PyTorch's own
};

NeuronAllocator neuron_allocator;

} // namespace

c10::Allocator* device_allocator() {
  return &neuron_allocator;
}

c10::DataPtr adopt(c10::DataPtr cpu_data, size_t nbytes, c10::DeviceIndex index) {
  const c10::Device device(kNeuron, index);
  if (nbytes == 0 || cpu_data.get() == nullptr) {
    return {nullptr, device};
  }
  if (C10_LIKELY(cpu_data.get_deleter() == &delete_block)) {
    charge(Arena::get().block_at(cpu_data.get_context()), nbytes, index);
    cpu_data.unsafe_set_device(device);
    return cpu_data;
  }
  Arena& arena = Arena::get();
  Arena::Block* block = arena.allocate(nbytes);
  c10::DataPtr data = data_of(arena, block, device);
  charge(block, nbytes, index);
  std::memcpy(data.get(), cpu_data.get(), nbytes);
  return data;
}

void install_cpu_allocator() {
  c10::SetCPUAllocator(&ScopedCpuAllocator::get(), /*priority=*/255);
  c10::SetAllocator(kNeuron, &neuron_allocator);
}

void empty_cache() {
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    if (Ledger::exists(device)) {
      Ledger::of(device).empty_cache();
    }
  }
  if (Arena::exists()) {
    Arena::get().trim();
  }
}

} // namespace trn
