#pragma once

// The two directions of the zero-copy bridge between a neuron tensor and PyTorch's CPU kernels: a CPU tensor over the same
// bytes, and a neuron tensor over bytes that a CPU kernel allocated.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace trn {

// A CPU tensor over the bytes of `tensor` (which is on neuron), with its sizes, strides, offset, dtype and its conj and
// neg bits. It has a storage of its own, since a view made inside a CPU kernel takes its device from the storage. It does
// not keep `tensor` alive.
at::Tensor cpu_alias(const at::Tensor& tensor);
// The same, in the storage of another alias of the same memory.
at::Tensor cpu_alias(const at::Tensor& tensor, c10::Storage alias_storage);

// The same without the bytes: a meta tensor, for kernels that only work out shapes.
at::Tensor meta_alias(const at::Tensor& tensor);
at::Tensor meta_alias(const at::Tensor& tensor, c10::Storage alias_storage);

// cpu_alias for a neuron tensor; any other tensor as it is.
inline at::Tensor to_cpu_alias(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() ? cpu_alias(tensor) : tensor;
}

// The neuron tensor that a CPU kernel's fresh output becomes: its storage is adopted and charged to the device. A meta
// kernel's output gets memory that nobody has written.
at::Tensor adopt_output(const at::Tensor& output, c10::DeviceIndex device);

// A neuron tensor with the geometry of `output`, a CPU view into the alias of `base`.
at::Tensor adopt_view(const at::Tensor& output, const at::Tensor& base);

// The sparse tensor (COO or compressed) on `device` whose indices and values are those of `tensor`, each put through `part`.
at::Tensor
map_sparse(const at::Tensor& tensor, c10::DeviceType device, c10::function_ref<at::Tensor(const at::Tensor&)> part);
// Makes `original` the sparse tensor that `changed`, its alias, became, in place.
void replace_sparse(
    const at::Tensor& original,
    const at::Tensor& changed,
    c10::function_ref<at::Tensor(const at::Tensor&)> part);

// Carries over to `original` what a kernel did to its alias beside writing elements: new sizes and a new allocation.
void write_back(const at::Tensor& original, const at::Tensor& alias);

} // namespace trn
