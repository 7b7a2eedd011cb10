#include "fabric/Region.h"

#include "fabric/Copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

namespace trn {

namespace {

at::Tensor host_view(const Region& region) {
  return at::from_blob(
      region.data, region.layout->sizes, region.layout->strides, at::TensorOptions().dtype(region.layout->dtype));
}

at::Tensor host_copy(const Region& region, std::byte* contiguous) {
  return at::from_blob(contiguous, region.layout->sizes, at::TensorOptions().dtype(region.layout->dtype));
}

} // namespace

void Region::read(std::byte* destination) const {
  if (nbytes == 0) {
    return;
  }
  if (layout == nullptr) {
    std::memcpy(destination, data, nbytes);
    return;
  }
  at::AutoDispatchBelowAutograd guard;
  host_copy(*this, destination).copy_(host_view(*this));
}

void Region::write(const std::byte* source) const {
  if (nbytes == 0) {
    return;
  }
  if (layout == nullptr) {
    if (nbytes >= kStreamBytes) {
      copy_streaming(data, source, nbytes);
    } else {
      std::memcpy(data, source, nbytes);
    }
    return;
  }
  at::AutoDispatchBelowAutograd guard;
  host_view(*this).copy_(host_copy(*this, const_cast<std::byte*>(source)));
}

} // namespace trn
