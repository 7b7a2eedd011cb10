#include "device/Device.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <bit>
#include <mutex>

namespace trn {

namespace {

struct Configuration {
  std::mutex mutex;
  std::function<DeviceConfig()> provider;
  DeviceConfig config;
  std::string error; // why there is none
};

Configuration& configuration() {
  static auto* instance = new Configuration();
  return *instance;
}

std::atomic<bool> configured{false};
std::atomic<bool> config_frozen{false};
thread_local c10::DeviceIndex tls_device = 0;

} // namespace

namespace {

void check_config(const DeviceConfig& config) {
  TORCH_CHECK_VALUE(
      config.device_count >= 1 && config.device_count <= 127,
      "neuron: a process can have 1 to 127 devices (PyTorch counts them in 8 bits), not ",
      config.device_count,
      "; NEURON_RT_VISIBLE_CORES makes a part of a larger node visible");
  const SegmentPolicy& policy = config.policy;
  TORCH_CHECK_VALUE(
      policy.min_block > 0 && policy.min_block % 256 == 0 && std::popcount(policy.classes_per_doubling) <= 1,
      "neuron: the allocator's min_block_bytes must be a multiple of 256 and its classes_per_doubling a power of two "
      "or 0, not ",
      policy.min_block,
      " and ",
      policy.classes_per_doubling);
}

// Not under the lock: the provider may wait for the GIL, whose holder may wait here. Two threads may both ask; the first
// answer stands.
void configure() noexcept {
  DeviceConfig config;
  std::string error;
  try {
    std::function<DeviceConfig()> provider;
    {
      std::lock_guard<std::mutex> guard(configuration().mutex);
      provider = configuration().provider;
    }
    if (provider) {
      config = provider();
    }
    check_config(config);
  } catch (const c10::Error& exception) {
    error = exception.what_without_backtrace();
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  std::lock_guard<std::mutex> guard(configuration().mutex);
  if (!configured) {
    configuration().config = std::move(config);
    configuration().config.device_count = error.empty() ? configuration().config.device_count : 0;
    configuration().error = std::move(error);
    configured.store(true, std::memory_order_release);
  }
}

} // namespace

const DeviceConfig& device_config() {
  if (C10_UNLIKELY(!configured.load(std::memory_order_acquire))) {
    configure();
  }
  return configuration().config;
}

void set_device_config_provider(std::function<DeviceConfig()> provider) {
  std::lock_guard<std::mutex> guard(configuration().mutex);
  configuration().provider = std::move(provider);
}

void set_device_config(DeviceConfig config) {
  TORCH_CHECK(!config_frozen, "neuron: the device configuration cannot change once a device has been used");
  check_config(config);
  std::lock_guard<std::mutex> guard(configuration().mutex);
  configuration().config = std::move(config);
  configuration().error.clear();
  configured.store(true, std::memory_order_release);
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
  TORCH_CHECK_VALUE(device_config().device_count > 0, "neuron: there is no device: ", configuration().error);
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
