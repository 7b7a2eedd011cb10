// Operators that the device carries out itself: creation, views, resizing and copies. They only move metadata or bytes,
// so a trip through a CPU kernel would cost more than the operator.

#include "device/Alias.h"
#include "device/Allocator.h"
#include "device/Device.h"
#include "device/Inspection.h"
#include "device/Sanitizer.h"
#include "device/Stream.h"
#include "device/TimingOnly.h"
#include "timing/OperatorCost.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Context.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_efficientzerotensor_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace trn {

namespace {

using at::Tensor;

constexpr c10::DispatchKeySet kNeuronKeys(c10::DispatchKey::PrivateUse1);

c10::Device target_device(std::optional<at::Device> device) {
  return c10::Device(kNeuron, device.has_value() ? resolve(*device) : current_device());
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(
      c10::layout_or_default(layout) == at::kStrided, "neuron: only strided tensors can be created on the device");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

// torch.use_deterministic_algorithms: fresh memory is NaN, or the largest integer, so that reading it shows.
bool fills_fresh_memory() {
  return at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory();
}

Tensor filled_if_deterministic(Tensor tensor) {
  if (C10_UNLIKELY(fills_fresh_memory() && !timing_only())) {
    Tensor alias = cpu_alias(tensor);
    at::native::fill_empty_deterministic_(alias);
  }
  return tensor;
}

Tensor empty_memory_format(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(target_device(device));
  return filled_if_deterministic(
      at::detail::empty_generic(size, device_allocator(), kNeuronKeys, c10::dtype_or_default(dtype), memory_format));
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(target_device(device));
  return filled_if_deterministic(
      at::detail::empty_strided_generic(size, stride, device_allocator(), kNeuronKeys, c10::dtype_or_default(dtype)));
}

Tensor efficient_zero_tensor(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  static auto* allocator = new at::native::ZeroTensorAllocator(c10::Device(kNeuron, 0));
  const c10::DeviceGuard guard(target_device(device));
  return at::detail::empty_generic(
      size,
      allocator,
      kNeuronKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype),
      {});
}

void resize_bytes(c10::StorageImpl* storage, size_t nbytes) {
  if (nbytes > storage->nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(
        c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), nbytes);
  }
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto old_nbytes = static_cast<int64_t>(impl->unsafe_storage().nbytes());
  if (impl->sizes() != size) {
    impl->set_sizes_contiguous(size);
    const auto needed =
        at::detail::computeStorageNbytesContiguous(size, impl->itemsize(), static_cast<size_t>(impl->storage_offset()));
    if (impl->numel() > 0) {
      resize_bytes(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
    }
  }
  if (memory_format.has_value()) {
    TORCH_CHECK(*memory_format != at::MemoryFormat::Preserve, "Unsupported memory format ", *memory_format);
    impl->empty_tensor_restride(*memory_format);
  }
  if (C10_UNLIKELY(fills_fresh_memory() && !timing_only())) {
    at::native::fill_resize_deterministic_(cpu_alias(self), old_nbytes);
  }
  return self;
}

Tensor& set_source_storage_offset(
    Tensor& self,
    at::Storage source,
    int64_t storage_offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), storage_offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(storage_offset);
  const auto strides = stride.data() != nullptr ? std::optional<c10::IntArrayRef>(stride) : std::nullopt;
  if (strides.has_value()) {
    impl->set_sizes_and_strides(size, *strides);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (impl->numel() > 0) {
    resize_bytes(
        impl->unsafe_storage().unsafeGetStorageImpl(),
        at::detail::computeStorageNbytes(
            impl->sizes(), impl->strides(), impl->itemsize(), static_cast<size_t>(storage_offset)));
  }
  return self;
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_source_storage_offset(self, std::move(source), 0, {count}, {});
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) {
    return self;
  }
  return set_source_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), /*resizable=*/true);
  return set_source_storage_offset(self, std::move(storage), 0, {0}, {});
}

bool is_set_to(const Tensor& self, const Tensor& source) {
  return self.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
      self.strides() == source.strides();
}

// Launches a copy in virtual time. As in CUDA the host waits for one between the memories, unless it asked not to and its
// own memory is pinned.
void charge_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  static const uint32_t kOnDevice = name_id("aten::copy_");
  static const uint32_t kBetweenRanks = name_id("copy between ranks");
  static const uint32_t kToDevice = name_id("copy from host");
  static const uint32_t kToHost = name_id("copy to host");
  if (to.numel() == 0) {
    return;
  }
  const int64_t from_bytes = touched_bytes(*from.unsafeGetTensorImpl());
  const int64_t to_bytes = touched_bytes(*to.unsafeGetTensorImpl());
  if (to.is_privateuseone() && from.is_privateuseone()) {
    const auto source = from.device().index();
    const auto target = to.device().index();
    if (C10_UNLIKELY(source != target)) {
      stream_wait_stream(current_stream(source), current_stream(target));
      stream_learns(current_stream(source), clock_of(current_stream(target)));
    }
    const void* of_peer = !Arena::owns(from.const_data_ptr()) ? from.const_data_ptr()
        : !Arena::owns(to.const_data_ptr())                   ? to.const_data_ptr()
                                                              : nullptr;
    const Picoseconds end = C10_LIKELY(of_peer == nullptr)
        ? launch(source, kOnDevice, price_copy(from_bytes, to_bytes))
        : launch(source, kBetweenRanks, price_peer_copy(of_peer, from_bytes, to_bytes));
    if (inspecting()) {
      inspect(source, kOnDevice, {Touched{from, /*written=*/false}, Touched{to, /*written=*/true}});
    }
    if (C10_UNLIKELY(source != target)) {
      stream_wait(current_stream(target), end, last_launch());
      stream_learns(current_stream(target), clock_of(current_stream(source)));
    }
    return;
  }
  const bool to_device = to.is_privateuseone();
  const Tensor& on_device = to_device ? to : from;
  const Tensor& on_host = to_device ? from : to;
  const auto device = on_device.device().index();
  const uint32_t name = to_device ? kToDevice : kToHost;
  const Picoseconds end = launch(device, name, price_host_copy(to_device ? to_bytes : from_bytes));
  if (inspecting()) {
    inspect(device, name, Touched{on_device, to_device});
  }
  if (!(non_blocking && on_host.is_pinned())) {
    host_wait(end, last_launch());
    host_learns(clock_of(current_stream(device)));
  }
}

// [Note: Known numbers]
void copy_known_alone(Tensor& self, const Tensor& source) {
  TORCH_CHECK(
      at::is_expandable_to(source.sizes(), self.sizes()),
      "The size of the source ",
      source.sizes(),
      " does not fit the size of the target ",
      self.sizes());
  const bool from_known = source.is_privateuseone() ? known(source) : true;
  if (!self.is_privateuseone()) {
    if (from_known) {
      Tensor target = self;
      at::native::copy_(target, to_cpu_alias(source), false);
    } else if (at::isFloatingType(self.scalar_type()) && at::isFloatingType(source.scalar_type())) {
      self.fill_(std::numeric_limits<double>::quiet_NaN());
    } else {
      refuse_unknown(c10::str("a copy of a tensor of ", source.scalar_type(), " to the host"));
    }
    return;
  }
  const bool becomes_known = from_known && may_become_known(self);
  if (becomes_known) {
    Tensor target = cpu_alias(self);
    at::native::copy_(target, to_cpu_alias(source), false);
  }
  set_known(self, becomes_known);
}

// All memory is the host's, so a copy in any direction is one between CPU tensors over the same bytes.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (C10_UNLIKELY(timing_only())) {
    copy_known_alone(self, source);
    charge_copy(self, source, non_blocking);
    return self;
  }
  Tensor target = to_cpu_alias(self);
  // In the same storage as the target when they share memory, so that an overlap is seen.
  const Tensor origin =
      source.is_privateuseone() && self.is_privateuseone() && self.storage().is_alias_of(source.storage())
      ? cpu_alias(source, target.storage())
      : to_cpu_alias(source);
  at::native::copy_(target, origin, non_blocking);
  charge_copy(self, source, non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor target = dst;
  copy_(target, self, non_blocking);
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::native::resize_output(dst, self.sizes());
  return copy_from(self, dst, false);
}

// Counts of integers, as CUDA has them and the CPU has not: mixture-of-experts routing counts tokens by expert so.
Tensor integer_histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  TORCH_CHECK(bins > 0, "bins must be > 0");
  const Tensor values = self.to(at::kLong).contiguous();
  int64_t low = min.to<int64_t>();
  int64_t high = max.to<int64_t>();
  const auto* value = values.const_data_ptr<int64_t>();
  const int64_t count = values.numel();
  if (low == high && count > 0) {
    const auto [smallest, largest] = std::minmax_element(value, value + count);
    low = *smallest;
    high = *largest;
  }
  if (low == high) {
    low -= 1;
    high += 1;
  }
  TORCH_CHECK(low < high, "max must be larger than min");
  std::vector<int64_t> counts(static_cast<size_t>(bins), 0);
  for (int64_t i = 0; i < count; ++i) {
    if (value[i] >= low && value[i] <= high) {
      const int64_t bin = static_cast<int64_t>(static_cast<__int128>(value[i] - low) * bins / (high - low));
      counts[static_cast<size_t>(std::min(bin, bins - 1))] += 1;
    }
  }
  return at::tensor(counts).to(self.scalar_type());
}

Tensor device_histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (C10_UNLIKELY(timing_only() && !known(self))) {
    // Counts of what is not known: as many as bins.
    return at::empty({bins}, self.options());
  }
  ArenaScope scope;
  const Tensor alias = cpu_alias(self);
  return adopt_output(
      at::isIntegralType(self.scalar_type(), /*includeBool=*/false) ? integer_histc(alias, bins, min, max)
                                                                    : at::histc(alias, bins, min, max),
      self.device().index());
}

Tensor& device_histc_out(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max, Tensor& out) {
  const Tensor result = device_histc(self, bins, min, max);
  TORCH_CHECK(
      out.scalar_type() == result.scalar_type(),
      "torch.histogram: input tensor and hist tensor should have the same dtype, but got input ",
      result.scalar_type(),
      " and hist ",
      out.scalar_type());
  at::native::resize_output(out, result.sizes());
  return out.copy_(result);
}

void record_stream(Tensor&, at::Stream) {
  // Operators are carried out as they are issued: the memory is never reused before its readers are done.
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, c10::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage_offset);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_empty);
  m.impl("is_set_to", &is_set_to);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("histc", &device_histc);
  m.impl("histc.out", &device_histc_out);
  m.impl("record_stream", &record_stream);
}

// The copy's own kernel reads conj and neg bits; resolving them first would come back to it and never end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace

} // namespace trn
