#pragma once

// What the chip would have allocated: one ledger a device. The modelled segment allocator is fed with every storage that
// appears on the device, in program order, and knows nothing of where the host put the bytes. Statistics, fragmentation
// and out-of-memory come from here, so they are the same on every machine.
//
// The policy (SegmentPolicy) is that of the Neuron runtime as far as it is public: two pools, size classes, freed blocks
// are kept in their segment until empty_cache or until memory runs out. Which free block a request takes is not public;
// here it is the most recently freed of the smallest class of free blocks that surely fits (two-level segregated fit),
// which costs the same however many blocks are free.

#include "device/Device.h"
#include "device/History.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace trn {

class Ledger {
 public:
  struct Segment;
  struct Pool;

  // A block of modelled HBM, handed out or free; the blocks of a segment form a list in order of address.
  struct Block {
    Segment* segment = nullptr;
    uint64_t offset = 0; // bytes from the segment's start
    uint64_t size = 0; // bytes
    uint64_t requested = 0; // bytes the program asked for
    bool free = true;
    Block* left = nullptr; // neighbours by address
    Block* right = nullptr;
    Block* previous_free = nullptr; // neighbours in the pool's list of free blocks
    Block* next_free = nullptr;
    Context context; // where it was allocated, when the history is kept
  };

  struct Segment {
    uint64_t address = 0; // in the modelled address space of the device
    uint64_t size = 0; // bytes
    Pool* pool = nullptr;
    Block* first = nullptr;
  };

  // Free blocks of one stream and one size range, in lists by size.
  struct Pool {
    static constexpr int kRows = 44; // doublings of 256 bytes
    static constexpr int kColumns = 8; // steps in a doubling
    bool small = false;
    int64_t stream = 0;
    uint64_t rows = 0; // bit r: row r has a free block
    std::array<uint8_t, kRows> columns{}; // bit c of columns[r]: list (r, c) is not empty
    std::array<std::array<Block*, kColumns>, kRows> lists{};
  };

  explicit Ledger(c10::DeviceIndex device);

  // The ledger of a device, made at its first use.
  static Ledger& of(c10::DeviceIndex device);
  static bool exists(c10::DeviceIndex device);

  // Throws c10::OutOfMemoryError when the request does not fit, even after free segments were given back.
  Block* allocate(uint64_t nbytes, int64_t stream);
  void release(Block* block);

  // Gives back segments that are wholly free.
  void empty_cache();
  // Bytes that may be reserved at most; `fraction` in (0, 1] of the device's HBM.
  void set_memory_fraction(double fraction);
  c10::CachingDeviceAllocator::DeviceStats stats() const;
  void reset_peak_stats();
  void reset_accumulated_stats();
  uint64_t total_bytes() const {
    return total_bytes_;
  }
  uint64_t reserved_bytes() const;
  uint64_t allocated_bytes() const;
  uint64_t largest_free_block() const;

  // For memory snapshots: every segment with its blocks, in order of address.
  struct BlockRecord {
    uint64_t address, size, requested;
    bool free;
    Context context;
  };
  struct SegmentRecord {
    uint64_t address, size;
    int64_t stream;
    bool small;
    std::vector<BlockRecord> blocks;
  };
  std::vector<SegmentRecord> snapshot() const;
  std::vector<MemoryEvent> history() const;
  void clear_history();

 private:
  Pool& pool_of(bool small, int64_t stream);
  Block* take_free(Pool& pool, uint64_t size);
  void push_free(Block* block);
  void remove_free(Block* block);
  Block* new_segment(Pool& pool, uint64_t size);
  void release_free_segments();
  uint64_t largest_free_block_locked() const;
  uint64_t reserved_bytes_locked() const;
  // Lets go of the lock first: the message names lines of the program, which needs the GIL.
  [[noreturn]] void throw_out_of_memory(uint64_t nbytes, std::unique_lock<std::mutex> lock);
  void record(MemoryAction action, uint64_t address, uint64_t size, int64_t stream, const Context& context);
  Block* make_block();

  const c10::DeviceIndex device_;
  const SegmentPolicy policy_;
  const uint64_t total_bytes_;
  uint64_t limit_bytes_;
  uint64_t next_address_;
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, std::array<std::unique_ptr<Pool>, 2>> pools_;
  std::array<Pool*, 2> default_pools_{}; // of stream 0, which nearly all requests come from
  std::vector<std::unique_ptr<Segment>> segments_; // in order of creation, which is that of address
  std::vector<Block*> spare_blocks_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  History history_;
};

} // namespace trn
