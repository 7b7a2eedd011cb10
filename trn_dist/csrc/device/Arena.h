#pragma once

// The host memory behind the simulated HBM of this process: one memfd, reserved in full and touched only when used.
// Ranks on one machine map each other's arena, so a collective reads and writes its peers' tensors in place.
//
// Where a tensor lies here is the host's business. What the chip would have allocated is kept in the Ledger.

#include <c10/macros/Macros.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace trn {

class Arena {
 public:
  // A run of bytes inside the arena. Owned by the arena; stays valid until free().
  struct Block {
    uint64_t offset; // bytes from the arena's base
    uint64_t size; // bytes reserved, at least what was asked for
    uint32_t size_class; // index of the free list it returns to, or kLarge
    int16_t device; // neuron device it is charged to, or -1
    void* ledger_entry; // what the Ledger holds for it, or nullptr
  };

  // The arena of this process, created at the first call.
  // Throws in a forked child of a process that already had one.
  static Arena& get();
  // Whether get() has been called in this process (or in the parent, for a forked child).
  static bool exists();
  // Whether this process is a forked child that inherited an arena. Such a child may drop tensors but not use them.
  static bool in_bad_fork() {
    return bad_fork_.load(std::memory_order_relaxed);
  }
  // Throws what CUDA says in that case, which is what programs and people know.
  static void refuse_bad_fork() {
    if (C10_UNLIKELY(in_bad_fork())) {
      throw_bad_fork();
    }
  }

  // Whether `ptr` lies in this process's arena (for a forked child: its parent's); false when there is none.
  static bool owns(const void* ptr);

  std::byte* base() const {
    return base_;
  }
  uint64_t size() const {
    return size_;
  }
  int fd() const {
    return fd_;
  }
  bool contains(const void* ptr) const {
    auto p = static_cast<const std::byte*>(ptr);
    return p >= base_ && p < base_ + size_;
  }
  // Bytes from base() to ptr, which must lie inside.
  uint64_t offset_of(const void* ptr) const {
    return static_cast<const std::byte*>(ptr) - base_;
  }
  void* address(const Block* block) const {
    return base_ + block->offset;
  }

  // The block that begins at `ptr`, which must have been handed out.
  Block* block_at(const void* ptr) const {
    const uint64_t offset = offset_of(ptr);
    const Page& page = pages_[offset / kPageBytes];
    return page.chunk == nullptr ? page.block
                                 : page.chunk->blocks + (offset - page.chunk->offset) / page.chunk->block_size;
  }

  // nbytes > 0; aligned to 64 bytes. Fresh memory reads as zero, reused memory as whatever it held.
  Block* allocate(uint64_t nbytes);
  // A no-op in a forked child, whose pages are its parent's.
  void free(Block* block);
  // Gives the pages of free blocks back to the operating system.
  void trim();
  // Bytes in blocks that are handed out.
  uint64_t used_bytes() const;

 private:
  Arena();

  // Memory that small blocks of one size are carved from.
  struct Chunk {
    uint64_t offset; // bytes from the arena's base
    uint64_t block_size;
    Block* blocks;
  };
  // What lies at a page: small blocks of a chunk, or the beginning of a large block.
  struct Page {
    Chunk* chunk;
    Block* block;
  };

  static constexpr uint32_t kLarge = UINT32_MAX;
  static constexpr uint64_t kPageBytes = 4096;
  [[noreturn]] static void throw_bad_fork();
  static std::atomic<bool> bad_fork_;
  Block* new_block();
  uint64_t take_range(uint64_t nbytes);
  void give_range(uint64_t offset, uint64_t size);
  void trim_locked();

  std::byte* base_ = nullptr;
  uint64_t size_ = 0;
  int fd_ = -1;
  Page* pages_ = nullptr; // reserved like the arena and as little touched
  mutable std::mutex mutex_;
  uint64_t used_bytes_ = 0;
  uint64_t freed_since_trim_ = 0; // bytes in free ranges that may still hold pages
  std::vector<std::vector<Block*>> free_small_; // per size class; the blocks keep their address
  std::vector<Block*> spare_blocks_; // Block structs without an address
  std::map<uint64_t, uint64_t> free_by_offset_; // offset -> size
  std::set<std::pair<uint64_t, uint64_t>> free_by_size_; // (size, offset)
};

} // namespace trn
