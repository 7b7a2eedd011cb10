#pragma once

#include "device/Arena.h"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace trn {

// A block of the arena, freed with the object.
class StagedBlock {
 public:
  explicit StagedBlock(uint64_t nbytes) : block_(Arena::get().allocate(nbytes > 0 ? nbytes : 1)) {}
  ~StagedBlock() {
    if (block_ != nullptr) {
      Arena::get().free(block_);
    }
  }
  StagedBlock(StagedBlock&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  StagedBlock& operator=(StagedBlock&&) = delete;
  std::byte* data() const {
    return static_cast<std::byte*>(Arena::get().address(block_));
  }
  uint64_t offset() const {
    return block_->offset;
  }

 private:
  Arena::Block* block_;
};

} // namespace trn
