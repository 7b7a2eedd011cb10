// What PyTorch asks of a backend beside its guard: generators, pinned host memory, and resizing of storages.

#include "device/Allocator.h"
#include "device/Arena.h"
#include "device/Device.h"
#include "device/Generator.h"
#include "device/Ledger.h"
#include "device/TimingOnly.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <map>
#include <mutex>

namespace trn {

namespace {

// Host memory is all alike here; what makes a buffer "pinned" is that it stands in this table.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = c10::alloc_cpu(nbytes);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(mutex_);
      sizes_[data] = nbytes;
    }
    return {data, data, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &PinnedAllocator::release;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool owns(const void* data) const {
    std::lock_guard<std::mutex> guard(mutex_);
    auto it = sizes_.upper_bound(data);
    if (it == sizes_.begin()) {
      return false;
    }
    --it;
    return static_cast<const char*>(data) < static_cast<const char*>(it->first) + it->second;
  }
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
  }

 private:
  static void release(void* data) {
    if (data == nullptr) {
      return;
    }
    auto& allocator = get();
    {
      std::lock_guard<std::mutex> guard(allocator.mutex_);
      allocator.sizes_.erase(data);
    }
    c10::free_cpu(data);
  }
  mutable std::mutex mutex_;
  std::map<const void*, size_t> sizes_;
};

struct NeuronHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return Ledger::exists(device);
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? static_cast<c10::DeviceIndex>(-1) : exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(Arena::owns(data), "neuron: the pointer does not lie in this process's HBM arena");
    return at::Device(kNeuron, current_device());
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::get().owns(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::get();
  }
  // Called for UntypedStorage.resize_; FSDP frees and revives its all-gathered parameters with it.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t new_nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    const c10::DeviceGuard guard(impl->device());
    c10::DataPtr fresh = device_allocator()->allocate(new_nbytes);
    const size_t kept = std::min(new_nbytes, impl->nbytes());
    if (kept > 0 && impl->data() != nullptr && !timing_only()) {
      std::memcpy(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(new_nbytes);
  }
};

} // namespace

void register_hooks() {
  static auto* hooks = new NeuronHooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

} // namespace trn
