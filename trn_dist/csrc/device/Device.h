#pragma once

// The devices of this process: how many logical NeuronCores the simulated node has, what each can hold, and which one is
// current. Set once by Python from the cluster's configuration, before the first tensor.

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>

namespace trn {

inline constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;

// How the chip's runtime hands out HBM. Sizes in bytes.
struct SegmentPolicy {
  bool small_limit_included = false; // whether a request of exactly small_limit does, too
  uint64_t small_limit = 1ULL << 20; // requests below it come from the small pool
  uint64_t small_segment = 2ULL << 20; // size of a segment of the small pool
  uint64_t large_segment = 32ULL << 20; // size of a segment of the large pool that several requests share
  uint64_t unrounded_limit = 16ULL << 20; // requests from here on get a segment of their own size
  uint64_t min_block = 256; // requests are rounded up to size classes, the smallest of which this is; a multiple of 256
  uint64_t classes_per_doubling = 4; // a power of two; 0 rounds to multiples of min_block
  uint64_t segment_granule = 2ULL << 20; // segments of a request of their own are rounded up to multiples of it
};

struct DeviceConfig {
  int device_count = 64; // logical cores of the node
  uint64_t hbm_bytes = 24ULL << 30; // of one logical core
  std::string name = "trn2"; // as torch.neuron.get_device_properties() tells it
  SegmentPolicy policy;
};

// Asks the provider at the first call. When that fails there are no devices, and check_device says why.
const DeviceConfig& device_config();
// Throws when a device was used already.
void set_device_config(DeviceConfig config);
// Who knows the configuration (Python: the cluster's file and the environment). It may take the GIL.
void set_device_config_provider(std::function<DeviceConfig()> provider);
// Called by whatever uses a device's memory, so that a late set_device_config is refused.
void freeze_device_config();

c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_device() noexcept;
// Makes `device` current for the calling thread and returns the former one. Throws for a device the node does not have.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
// Throws unless 0 <= device < device_count().
void check_device(c10::DeviceIndex device);
// The device that `device` means: its own index, or the current device if it has none.
inline c10::DeviceIndex resolve(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

} // namespace trn
