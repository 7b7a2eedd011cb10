#include "device/Generator.h"

#include "device/Device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <vector>

namespace trn {

namespace {

constexpr int64_t kStateBytes = 16;

} // namespace

NeuronGeneratorImpl::NeuronGeneratorImpl(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(kNeuron, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

c10::DeviceType NeuronGeneratorImpl::device_type() {
  return kNeuron;
}

void NeuronGeneratorImpl::set_current_seed(uint64_t seed) {
  state_->seed = seed;
  state_->offset = 0;
}

void NeuronGeneratorImpl::set_offset(uint64_t offset) {
  state_->offset = offset;
}

uint64_t NeuronGeneratorImpl::get_offset() const {
  return state_->offset;
}

uint64_t NeuronGeneratorImpl::current_seed() const {
  return state_->seed;
}

uint64_t NeuronGeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return state_->seed;
}

void NeuronGeneratorImpl::set_state(const c10::TensorImpl& new_state) {
  TORCH_CHECK_VALUE(
      new_state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && new_state.numel() == kStateBytes &&
          new_state.is_contiguous() && new_state.device().is_cpu(),
      "neuron: a generator's state is a contiguous uint8 CPU tensor of ",
      kStateBytes,
      " bytes (seed and offset), not one of ",
      new_state.numel(),
      " elements of ",
      new_state.dtype().name(),
      " on ",
      new_state.device());
  const auto* bytes = static_cast<const char*>(new_state.data());
  std::memcpy(&state_->seed, bytes, 8);
  std::memcpy(&state_->offset, bytes + 8, 8);
}

c10::intrusive_ptr<c10::TensorImpl> NeuronGeneratorImpl::get_state() const {
  // Not at::empty: the dispatcher may lead into a Python mode that waits for the mutex held by our caller.
  auto state = at::detail::empty_cpu({kStateBytes}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  auto* bytes = static_cast<char*>(state.mutable_data_ptr());
  std::memcpy(bytes, &state_->seed, 8);
  std::memcpy(bytes + 8, &state_->offset, 8);
  return state.getIntrusivePtr();
}

void NeuronGeneratorImpl::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) {
  auto* generator = dynamic_cast<NeuronGeneratorImpl*>(other.get());
  TORCH_CHECK(generator != nullptr, "neuron: the state of a generator of another device: ", other->device());
  state_ = generator->state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> NeuronGeneratorImpl::graphsafe_get_state() const {
  auto generator = c10::make_intrusive<NeuronGeneratorImpl>(device().index());
  generator->state_ = state_;
  return generator;
}

uint64_t NeuronGeneratorImpl::advance(uint64_t count) {
  const uint64_t begin = state_->offset;
  state_->offset += (count + 3) / 4 * 4;
  return begin;
}

NeuronGeneratorImpl* NeuronGeneratorImpl::clone_impl() const {
  auto* clone = new NeuronGeneratorImpl(device().index());
  *clone->state_ = *state_;
  return clone;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::once_flag once;
  static std::vector<at::Generator>* generators = nullptr;
  std::call_once(once, [] {
    generators = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      generators->push_back(new_generator(index));
    }
  });
  const auto index = device < 0 ? current_device() : device;
  check_device(index);
  return (*generators)[static_cast<size_t>(index)];
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<NeuronGeneratorImpl>(device < 0 ? current_device() : device);
}

namespace {

std::atomic<bool>& cpu_rng_flag() {
  static std::atomic<bool> flag = [] {
    const char* value = std::getenv("TRN_CPU_RNG");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return flag;
}

} // namespace

bool cpu_rng() {
  return cpu_rng_flag().load(std::memory_order_relaxed);
}

void set_cpu_rng(bool enabled) {
  cpu_rng_flag().store(enabled, std::memory_order_relaxed);
}

} // namespace trn
