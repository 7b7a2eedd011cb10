#include "device/Device.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace trn {

namespace {

DeviceConfig& mutable_config() {
  static auto* config = new DeviceConfig();
  return *config;
}

std::atomic<bool> config_frozen{false};
thread_local c10::DeviceIndex tls_device = 0;

} // namespace

const DeviceConfig& device_config() {
  return mutable_config();
}

void set_device_config(DeviceConfig config) {
  TORCH_CHECK(!config_frozen, "neuron: the device configuration cannot change once a device has been used");
  TORCH_CHECK_VALUE(
      config.device_count >= 1 && config.device_count <= 128,
      "neuron: a node has 1 to 128 logical cores (PyTorch's device index is 8 bits wide), not ",
      config.device_count);
  mutable_config() = std::move(config);
}

void freeze_device_config() {
  config_frozen.store(true, std::memory_order_relaxed);
}

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(device_config().device_count);
}

c10::DeviceIndex current_device() noexcept {
  return tls_device;
}

void check_device(c10::DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "neuron: invalid device ordinal ",
      static_cast<int>(device),
      ": this node has ",
      static_cast<int>(device_count()),
      " logical NeuronCores, neuron:0 to neuron:",
      static_cast<int>(device_count()) - 1);
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  check_device(device);
  const auto former = tls_device;
  tls_device = device;
  return former;
}

} // namespace trn
