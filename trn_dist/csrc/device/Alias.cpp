#include "device/Alias.h"

#include "device/Allocator.h"
#include "device/Arena.h"
#include "device/Device.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/detail/FunctionTraits.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>

namespace trn {

namespace {

// Sizes, strides, offset and the bits that say how the elements are to be read.
void copy_geometry(const c10::TensorImpl& from, c10::TensorImpl& to) {
  to.set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (C10_UNLIKELY(from.is_conj())) {
    to._set_conj(true);
  }
  if (C10_UNLIKELY(from.is_neg())) {
    to._set_neg(true);
  }
}

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const c10::TensorImpl& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_geometry(like, *tensor.unsafeGetTensorImpl());
  return tensor;
}

c10::DataPtr fresh_memory(size_t nbytes, c10::DeviceIndex device) {
  const c10::DeviceGuard guard(c10::Device(kNeuron, device));
  return device_allocator()->allocate(nbytes);
}

} // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  Arena::refuse_bad_fork();
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  static c10::Allocator* const allocator = c10::GetCPUAllocator();
  auto alias_storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage->nbytes(),
      c10::DataPtr(const_cast<void*>(storage->data()), c10::Device(c10::DeviceType::CPU)),
      allocator,
      /*resizable=*/true);
  return cpu_alias(tensor, c10::Storage(std::move(alias_storage)));
}

namespace {

at::Tensor alias_in(const at::Tensor& tensor, c10::Storage alias_storage, c10::DispatchKey key) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  auto alias = make_tensor(std::move(alias_storage), key, impl);
  if (C10_UNLIKELY(impl.is_wrapped_number())) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return alias;
}

} // namespace

at::Tensor cpu_alias(const at::Tensor& tensor, c10::Storage alias_storage) {
  return alias_in(tensor, std::move(alias_storage), c10::DispatchKey::CPU);
}

at::Tensor meta_alias(const at::Tensor& tensor) {
  static c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::Meta);
  auto alias_storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes(),
      c10::DataPtr(nullptr, c10::Device(c10::DeviceType::Meta)),
      allocator,
      /*resizable=*/true);
  return meta_alias(tensor, c10::Storage(std::move(alias_storage)));
}

at::Tensor meta_alias(const at::Tensor& tensor, c10::Storage alias_storage) {
  return alias_in(tensor, std::move(alias_storage), c10::DispatchKey::Meta);
}

at::Tensor adopt_output(const at::Tensor& output, c10::DeviceIndex device) {
  const c10::TensorImpl& impl = *output.unsafeGetTensorImpl();
  c10::Storage storage = impl.storage();
  c10::StorageImpl* storage_impl = storage.unsafeGetStorageImpl();
  // Two outputs of one kernel may share a storage, which the first of them has then turned already.
  if (C10_UNLIKELY(storage_impl->device_type() == c10::DeviceType::Meta)) {
    storage_impl->set_data_ptr_noswap(fresh_memory(storage_impl->nbytes(), device));
    storage_impl->set_allocator(device_allocator());
  } else if (storage_impl->device_type() != kNeuron) {
    c10::DataPtr data = storage_impl->set_data_ptr(c10::DataPtr());
    storage_impl->set_data_ptr_noswap(adopt(std::move(data), storage_impl->nbytes(), device));
    storage_impl->set_allocator(device_allocator());
  }
  return make_tensor(std::move(storage), c10::DispatchKey::PrivateUse1, impl);
}

at::Tensor adopt_view(const at::Tensor& output, const at::Tensor& base) {
  return make_tensor(base.storage(), c10::DispatchKey::PrivateUse1, *output.unsafeGetTensorImpl());
}

namespace {

void set_parts(at::SparseTensorImpl& to, const at::SparseTensorImpl& from, at::Tensor indices, at::Tensor values) {
  to.raw_resize_(from.sparse_dim(), from.dense_dim(), from.sizes());
  to.set_indices_and_values_unsafe(indices, values);
  to.set_coalesced(from.coalesced());
}

at::SparseTensorImpl& coo(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::SparseCsrTensorImpl& compressed(const at::Tensor& tensor) {
  return *static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

} // namespace

at::Tensor
map_sparse(const at::Tensor& tensor, c10::DeviceType device, c10::function_ref<at::Tensor(const at::Tensor&)> part) {
  const bool on_cpu = device == c10::DeviceType::CPU;
  if (tensor.layout() == at::kSparse) {
    const auto key = on_cpu ? c10::DispatchKey::SparseCPU : c10::DispatchKey::SparsePrivateUse1;
    at::Tensor mapped = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), tensor.dtype());
    const auto& from = coo(tensor);
    set_parts(coo(mapped), from, part(from.indices()), part(from.values()));
    return mapped;
  }
  const auto key = on_cpu ? c10::DispatchKey::SparseCsrCPU : c10::DispatchKey::SparseCsrPrivateUse1;
  const auto& from = compressed(tensor);
  const at::Tensor values = part(from.values());
  at::Tensor mapped = at::detail::make_tensor<at::SparseCsrTensorImpl>(
      c10::DispatchKeySet(key), values.device(), tensor.layout(), tensor.dtype());
  compressed(mapped).set_member_tensors(
      part(from.compressed_indices()), part(from.plain_indices()), values, from.sizes());
  return mapped;
}

void replace_sparse(
    const at::Tensor& original,
    const at::Tensor& changed,
    c10::function_ref<at::Tensor(const at::Tensor&)> part) {
  if (original.layout() == at::kSparse) {
    const auto& from = coo(changed);
    set_parts(coo(original), from, part(from.indices()), part(from.values()));
  } else {
    const auto& from = compressed(changed);
    compressed(original).set_member_tensors(
        part(from.compressed_indices()), part(from.plain_indices()), part(from.values()), from.sizes());
  }
}

void write_back(const at::Tensor& original, const at::Tensor& alias) {
  c10::TensorImpl& to = *original.unsafeGetTensorImpl();
  const c10::TensorImpl& from = *alias.unsafeGetTensorImpl();
  c10::StorageImpl* to_storage = to.unsafe_storage().unsafeGetStorageImpl();
  c10::StorageImpl* from_storage = from.unsafe_storage().unsafeGetStorageImpl();
  const bool shapes_only = from_storage->device_type() == c10::DeviceType::Meta;
  if (C10_UNLIKELY(shapes_only)) {
    if (from_storage->nbytes() != to_storage->nbytes()) {
      to_storage->set_data_ptr_noswap(fresh_memory(from_storage->nbytes(), resolve(to.device())));
      to_storage->set_nbytes(from_storage->nbytes());
    }
  } else if (
      C10_UNLIKELY(from_storage->data() != to_storage->data() || from_storage->nbytes() != to_storage->nbytes())) {
    const auto device = resolve(to.device());
    const size_t nbytes = from_storage->nbytes();
    c10::DataPtr data = from_storage->set_data_ptr(c10::DataPtr());
    to_storage->set_data_ptr_noswap(adopt(std::move(data), nbytes, device));
    to_storage->set_nbytes(nbytes);
  }
  if (C10_UNLIKELY(
          from.sizes() != to.sizes() || from.strides() != to.strides() ||
          from.storage_offset() != to.storage_offset())) {
    to.set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  }
  if (C10_UNLIKELY(from.is_conj() != to.is_conj())) {
    to._set_conj(from.is_conj());
  }
  if (C10_UNLIKELY(from.is_neg() != to.is_neg())) {
    to._set_neg(from.is_neg());
  }
}

} // namespace trn
