#include "device/Arena.h"

#include "OsError.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <bit>

namespace trn {

namespace {

// Reserved address space, not memory: room for one core's HBM, for what CPU kernels need beside their outputs, and for
// the fragmentation of the host's placement, which may differ from the chip's.
constexpr uint64_t kArenaBytes = 96ULL << 30;
constexpr uint64_t kSmallLimit = 32 << 10; // larger blocks are whole pages and coalesce when freed
constexpr uint64_t kSmallChunk = 256 << 10; // what small blocks are carved from
// Pages of free ranges above this go back to the operating system. Touching them again costs about 0.6 ms a MiB, so an
// ordinary free keeps them.
constexpr uint64_t kTrimWatermark = 1ULL << 30;

std::atomic<Arena*> instance{nullptr};

// Four classes to a doubling, the smallest 64 bytes: 64, 128, 192, 256, 320, 384, 448, 512, 640, ...
uint32_t size_class_of(uint64_t nbytes) {
  const uint64_t units = (nbytes + 63) / 64;
  if (units <= 4) {
    return static_cast<uint32_t>(units - 1);
  }
  const int doubling = std::bit_width(units - 1) - 3; // quarter steps of size 2^doubling units
  return static_cast<uint32_t>(4 * doubling + ((units - 1) >> doubling));
}

uint64_t size_of_class(uint32_t size_class) {
  if (size_class < 4) {
    return 64ULL * (size_class + 1);
  }
  const uint32_t doubling = size_class / 4 - 1;
  return 64ULL * ((size_class - 4 * doubling + 1ULL) << doubling);
}

} // namespace

Arena& Arena::get() {
  // Never destroyed: tensors may outlive every static destructor.
  static Arena* arena = new Arena();
  refuse_bad_fork();
  return *arena;
}

std::atomic<bool> Arena::bad_fork_{false};

void Arena::throw_bad_fork() {
  TORCH_CHECK(
      false,
      "Cannot re-initialize neuron in forked subprocess. To use neuron with multiprocessing, you must use the 'spawn' "
      "start method");
}

bool Arena::exists() {
  return instance.load(std::memory_order_acquire) != nullptr;
}

bool Arena::owns(const void* ptr) {
  const Arena* arena = instance.load(std::memory_order_acquire);
  return arena != nullptr && arena->contains(ptr);
}

Arena::Arena() : size_(kArenaBytes), free_small_(size_class_of(kSmallLimit) + 1) {
  fd_ = memfd_create("trn_dist-hbm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  TORCH_CHECK(fd_ >= 0, "neuron: cannot create the HBM arena (memfd_create: ", os_error(), ")");
  TORCH_CHECK(
      ftruncate(fd_, static_cast<off_t>(size_)) == 0,
      "neuron: cannot reserve ",
      size_ >> 30,
      " GiB of address space for the HBM arena (ftruncate: ",
      os_error(),
      ")");
  // A peer that holds the descriptor must not be able to pull the memory from under this process.
  fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  void* address = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  TORCH_CHECK(
      address != MAP_FAILED,
      "neuron: cannot map ",
      size_ >> 30,
      " GiB of address space for the HBM arena (mmap: ",
      os_error(),
      "); is the address space limited (ulimit -v)?");
  base_ = static_cast<std::byte*>(address);
  void* pages = mmap(
      nullptr,
      size_ / kPageBytes * sizeof(Page),
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
      -1,
      0);
  TORCH_CHECK(pages != MAP_FAILED, "neuron: cannot map the HBM arena's index (mmap: ", os_error(), ")");
  pages_ = static_cast<Page*>(pages);
  give_range(0, size_);
  freed_since_trim_ = 0;
  pthread_atfork(nullptr, nullptr, [] { bad_fork_.store(true, std::memory_order_relaxed); });
  instance.store(this, std::memory_order_release);
}

Arena::Block* Arena::new_block() {
  if (!spare_blocks_.empty()) {
    Block* block = spare_blocks_.back();
    spare_blocks_.pop_back();
    return block;
  }
  return new Block();
}

uint64_t Arena::take_range(uint64_t nbytes) {
  // Best fit, lowest address first: the same program gets the same addresses.
  auto it = free_by_size_.lower_bound({nbytes, 0});
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      it != free_by_size_.end(),
      "neuron: the host address space of the simulated HBM (",
      size_ >> 30,
      " GiB) has no free run of ",
      nbytes,
      " bytes");
  const auto [size, offset] = *it;
  free_by_size_.erase(it);
  free_by_offset_.erase(offset);
  if (size > nbytes) {
    free_by_offset_.emplace(offset + nbytes, size - nbytes);
    free_by_size_.emplace(size - nbytes, offset + nbytes);
  }
  freed_since_trim_ -= std::min(freed_since_trim_, nbytes);
  return offset;
}

void Arena::give_range(uint64_t offset, uint64_t size) {
  freed_since_trim_ += size;
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && next->first == offset + size) {
    size += next->second;
    free_by_size_.erase({next->second, next->first});
    next = free_by_offset_.erase(next);
  }
  if (next != free_by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      free_by_size_.erase({previous->second, previous->first});
      free_by_offset_.erase(previous);
    }
  }
  free_by_offset_.emplace(offset, size);
  free_by_size_.emplace(size, offset);
}

Arena::Block* Arena::allocate(uint64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  Block* block = nullptr;
  if (nbytes <= kSmallLimit) {
    const uint32_t size_class = size_class_of(nbytes);
    auto& free_list = free_small_[size_class];
    if (free_list.empty()) {
      const uint64_t size = size_of_class(size_class);
      const uint64_t count = kSmallChunk / size;
      const uint64_t offset = take_range(kSmallChunk);
      // Kept for good: small blocks keep their address.
      auto* chunk = new Chunk{offset, size, new Block[count]};
      for (uint64_t page = 0; page < kSmallChunk / kPageBytes; ++page) {
        pages_[offset / kPageBytes + page] = Page{chunk, nullptr};
      }
      // Pushed from the top, so that the list hands out ascending addresses.
      for (uint64_t i = count; i-- > 0;) {
        chunk->blocks[i] = Block{offset + i * size, size, size_class, -1, nullptr};
        free_list.push_back(chunk->blocks + i);
      }
    }
    block = free_list.back();
    free_list.pop_back();
  } else {
    const uint64_t size = (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    const uint64_t offset = take_range(size);
    block = new_block();
    *block = Block{offset, size, kLarge, -1, nullptr};
    pages_[offset / kPageBytes] = Page{nullptr, block};
  }
  used_bytes_ += block->size;
  return block;
}

void Arena::free(Block* block) {
  if (in_bad_fork()) {
    return;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  used_bytes_ -= block->size;
  block->device = -1;
  block->ledger_entry = nullptr;
  if (block->size_class != kLarge) {
    free_small_[block->size_class].push_back(block);
    return;
  }
  give_range(block->offset, block->size);
  spare_blocks_.push_back(block);
  if (freed_since_trim_ > kTrimWatermark) {
    trim_locked();
  }
}

void Arena::trim() {
  if (in_bad_fork()) {
    return;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  trim_locked();
}

void Arena::trim_locked() {
  for (const auto& [offset, size] : free_by_offset_) {
    // A hole in memory never touched costs nothing but the call.
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(size));
  }
  freed_since_trim_ = 0;
}

uint64_t Arena::used_bytes() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return used_bytes_;
}

} // namespace trn
