// The guard through which PyTorch's device-independent code (torch.accelerator, torch.Stream, torch.Event, autograd,
// futures) steers the neuron device.

#include "device/Device.h"
#include "device/Stream.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace trn {

namespace {

struct NeuronGuardImpl final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kNeuron;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kNeuron, exchange_device(resolve(device)));
  }
  c10::Device getDevice() const override {
    return c10::Device(kNeuron, current_device());
  }
  void setDevice(c10::Device device) const override {
    exchange_device(resolve(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) {
      exchange_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  // What torch.accelerator.get_device_capability tells: all dtypes but the quantized ones, which PyTorch gives up and of
  // which the device neither makes an empty tensor nor copies one.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    auto& dtypes = capability.capability_data.supported_scalar_types;
    dtypes.has_QInt8 = dtypes.has_QUInt8 = dtypes.has_QInt32 = dtypes.has_QUInt4x2 = dtypes.has_QUInt2x4 = 0;
    return capability;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(resolve(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(resolve(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return new_stream(resolve(device), high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return new_stream(resolve(device), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query_stream(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto* state = static_cast<EventState*>(*event);
    if (state == nullptr) {
      state = new EventState();
      *event = state;
    }
    record_event(*state, stream);
  }
  // Operators run as they are issued, so whatever `stream` is given next would read the data at once: the work that the
  // event stands for is carried out here.
  void block(void* event, const c10::Stream& stream) const override {
    if (auto* state = static_cast<EventState*>(event)) {
      const Picoseconds time_ps = finish_event(*state);
      stream_wait(stream, time_ps, state->origin);
      stream_learns(stream, state->clock);
    }
  }
  void synchronizeEvent(void* event) const override {
    if (auto* state = static_cast<EventState*>(event)) {
      const Picoseconds time_ps = finish_event(*state);
      host_wait(time_ps, state->origin);
      host_learns(state->clock);
    }
  }
  bool queryEvent(void* event) const override {
    if (auto* state = static_cast<EventState*>(event)) {
      Picoseconds time_ps = state->time_ps;
      const bool done = poll_all(state->pending, time_ps);
      if (!host_poll(done ? time_ps : INT64_MAX)) {
        return false;
      }
      acknowledge_all(state->pending);
      host_learns(state->clock);
    }
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  // Milliseconds of virtual time.
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return elapsed_ms(*static_cast<EventState*>(first), *static_cast<EventState*>(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NeuronGuardImpl);

} // namespace

} // namespace trn
