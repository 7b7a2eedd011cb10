#pragma once

// Memory of a tensor, anywhere in this process: what a call hands to the fabric.

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace trn {

// How elements lie that are not contiguous.
struct Layout {
  c10::ScalarType dtype;
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides; // in elements
};

struct Region {
  std::byte* data = nullptr;
  uint64_t nbytes = 0;
  std::shared_ptr<const Layout> layout; // nullptr: contiguous

  // Copies between the region, in its logical order, and contiguous memory. Work on the host's memory alone: they may be
  // called where no other PyTorch operator may.
  void read(std::byte* destination) const;
  void write(const std::byte* source) const;
};

} // namespace trn
