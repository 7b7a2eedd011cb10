#include "device/Ledger.h"

#include "device/Arena.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <bit>

namespace trn {

namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr uint64_t kGranule = 256; // sizes and offsets are multiples of it
// Where the modelled address space of a device begins. Not zero, so that an address is never mistaken for null.
constexpr uint64_t kFirstAddress = 1ULL << 40;

std::array<std::atomic<Ledger*>, 128> ledgers{};

// Size classes, `classes` (a power of two) to a doubling; plain multiples of `unit` below that many units, and everywhere
// when there are no classes.
uint64_t round_to_class(uint64_t nbytes, uint64_t unit, uint64_t classes) {
  const uint64_t units = (nbytes + unit - 1) / unit;
  if (classes == 0 || units <= classes) {
    return units * unit;
  }
  const int shift = std::bit_width(units - 1) - std::bit_width(classes);
  return (((units - 1) >> shift) + 1) * unit << shift;
}

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The list that holds free blocks of `size` bytes: row by doubling, column by eighths of it.
std::pair<int, int> list_of(uint64_t size) {
  const uint64_t granules = size / kGranule;
  const int row = std::bit_width(granules) - 1;
  const int column =
      row >= 3 ? static_cast<int>((granules >> (row - 3)) & 7) : static_cast<int>((granules << (3 - row)) & 7);
  return {row, column};
}

void increase(StatArray& stat, bool small, uint64_t amount) {
  stat[static_cast<size_t>(StatType::AGGREGATE)].increase(amount);
  stat[static_cast<size_t>(small ? StatType::SMALL_POOL : StatType::LARGE_POOL)].increase(amount);
}

void decrease(StatArray& stat, bool small, uint64_t amount) {
  stat[static_cast<size_t>(StatType::AGGREGATE)].decrease(amount);
  stat[static_cast<size_t>(small ? StatType::SMALL_POOL : StatType::LARGE_POOL)].decrease(amount);
}

// Whether the block is a part of its segment and not the whole.
bool is_split(const Ledger::Block& block) {
  return block.left != nullptr || block.right != nullptr;
}

int64_t total_of(const StatArray& stat) {
  return stat[static_cast<size_t>(StatType::AGGREGATE)].current;
}

} // namespace

Ledger::Ledger(c10::DeviceIndex device)
    : device_(device),
      policy_(device_config().policy),
      total_bytes_(device_config().hbm_bytes),
      limit_bytes_(total_bytes_),
      next_address_(kFirstAddress) {}

Ledger& Ledger::of(c10::DeviceIndex device) {
  Arena::refuse_bad_fork();
  Ledger* ledger = ledgers[device].load(std::memory_order_acquire);
  if (C10_UNLIKELY(ledger == nullptr)) {
    check_device(device);
    freeze_device_config();
    static std::mutex mutex;
    std::lock_guard<std::mutex> guard(mutex);
    ledger = ledgers[device].load(std::memory_order_acquire);
    if (ledger == nullptr) {
      ledger = new Ledger(device); // never destroyed: tensors may outlive every static destructor
      ledgers[device].store(ledger, std::memory_order_release);
    }
  }
  return *ledger;
}

bool Ledger::exists(c10::DeviceIndex device) {
  return ledgers[device].load(std::memory_order_acquire) != nullptr;
}

Ledger::Block* Ledger::make_block() {
  if (spare_blocks_.empty()) {
    return new Block();
  }
  Block* block = spare_blocks_.back();
  spare_blocks_.pop_back();
  *block = Block();
  return block;
}

Ledger::Pool& Ledger::pool_of(bool small, int64_t stream) {
  if (C10_LIKELY(stream == 0 && default_pools_[small] != nullptr)) {
    return *default_pools_[small];
  }
  auto& pool = pools_[stream][small];
  if (!pool) {
    pool = std::make_unique<Pool>();
    pool->small = small;
    pool->stream = stream;
    if (stream == 0) {
      default_pools_[small] = pool.get();
    }
  }
  return *pool;
}

void Ledger::push_free(Block* block) {
  Pool& pool = *block->segment->pool;
  const auto [row, column] = list_of(block->size);
  Block*& head = pool.lists[row][column];
  block->previous_free = nullptr;
  block->next_free = head;
  if (head != nullptr) {
    head->previous_free = block;
  }
  head = block;
  pool.rows |= 1ULL << row;
  pool.columns[row] |= static_cast<uint8_t>(1U << column);
  if (is_split(*block)) {
    increase(stats_.inactive_split, pool.small, 1);
    increase(stats_.inactive_split_bytes, pool.small, block->size);
  }
}

void Ledger::remove_free(Block* block) {
  Pool& pool = *block->segment->pool;
  const auto [row, column] = list_of(block->size);
  if (is_split(*block)) {
    decrease(stats_.inactive_split, pool.small, 1);
    decrease(stats_.inactive_split_bytes, pool.small, block->size);
  }
  if (block->next_free != nullptr) {
    block->next_free->previous_free = block->previous_free;
  }
  if (block->previous_free != nullptr) {
    block->previous_free->next_free = block->next_free;
    return;
  }
  pool.lists[row][column] = block->next_free;
  if (block->next_free == nullptr) {
    pool.columns[row] &= static_cast<uint8_t>(~(1U << column));
    if (pool.columns[row] == 0) {
      pool.rows &= ~(1ULL << row);
    }
  }
}

Ledger::Block* Ledger::take_free(Pool& pool, uint64_t size) {
  auto [row, column] = list_of(size);
  // The list of `size` itself may hold smaller blocks; its head is taken if it fits.
  Block* block = pool.lists[row][column];
  if (block == nullptr || block->size < size) {
    // Every block of a later list fits.
    uint32_t later_columns = pool.columns[row] & (0xFEU << column) & 0xFFU;
    if (later_columns == 0) {
      const uint64_t later_rows = pool.rows & (~0ULL << (row + 1));
      if (later_rows == 0) {
        // Last resort: the rest of the list of `size`.
        for (; block != nullptr && block->size < size; block = block->next_free) {
        }
        if (block == nullptr) {
          return nullptr;
        }
      } else {
        row = std::countr_zero(later_rows);
        later_columns = pool.columns[row];
      }
    }
    if (later_columns != 0) {
      block = pool.lists[row][std::countr_zero(later_columns)];
    }
  }
  remove_free(block);
  if (block->size > size) {
    Block* rest = make_block();
    rest->segment = block->segment;
    rest->offset = block->offset + size;
    rest->size = block->size - size;
    rest->left = block;
    rest->right = block->right;
    if (rest->right != nullptr) {
      rest->right->left = rest;
    }
    block->right = rest;
    block->size = size;
    push_free(rest);
  }
  return block;
}

Ledger::Block* Ledger::new_segment(Pool& pool, uint64_t size) {
  const uint64_t shared = pool.small ? policy_.small_segment : policy_.large_segment;
  const uint64_t segment_size = size >= policy_.unrounded_limit
      ? round_up(size, policy_.segment_granule)
      : std::max(shared, round_up(size, policy_.segment_granule));
  if (static_cast<uint64_t>(total_of(stats_.reserved_bytes)) + segment_size > limit_bytes_) {
    return nullptr;
  }
  auto segment = std::make_unique<Segment>();
  segment->address = next_address_;
  segment->size = segment_size;
  segment->pool = &pool;
  next_address_ += segment_size;
  Block* block = make_block();
  block->segment = segment.get();
  block->size = segment_size;
  segment->first = block;
  segments_.push_back(std::move(segment));
  push_free(block);
  increase(stats_.segment, pool.small, 1);
  increase(stats_.reserved_bytes, pool.small, segment_size);
  stats_.num_device_alloc += 1;
  record(MemoryAction::kSegmentAlloc, block->segment->address, segment_size, pool.stream, nullptr);
  return take_free(pool, size);
}

Ledger::Block* Ledger::allocate(uint64_t nbytes, int64_t stream) {
  const uint64_t size = nbytes >= policy_.unrounded_limit
      ? round_up(nbytes, policy_.min_block)
      : round_to_class(nbytes, policy_.min_block, policy_.classes_per_doubling);
  Context context = context_for(ContextLevel::kState);
  std::unique_lock<std::mutex> lock(mutex_);
  const bool small = nbytes < policy_.small_limit || (policy_.small_limit_included && nbytes == policy_.small_limit);
  Pool& pool = pool_of(small, stream);
  Block* block = take_free(pool, size);
  if (block == nullptr) {
    block = new_segment(pool, size);
  }
  if (block == nullptr) {
    stats_.num_alloc_retries += 1;
    release_free_segments();
    block = new_segment(pool, size);
    if (block == nullptr) {
      stats_.num_ooms += 1;
      record(
          MemoryAction::kOutOfMemory,
          limit_bytes_ - std::min(limit_bytes_, reserved_bytes_locked()),
          nbytes,
          stream,
          context);
      throw_out_of_memory(nbytes, std::move(lock));
    }
  }
  block->free = false;
  block->requested = nbytes;
  increase(stats_.allocation, small, 1);
  increase(stats_.active, small, 1);
  increase(stats_.allocated_bytes, small, block->size);
  increase(stats_.active_bytes, small, block->size);
  increase(stats_.requested_bytes, small, nbytes);
  if (C10_UNLIKELY(history_enabled.load(std::memory_order_relaxed))) {
    record(
        MemoryAction::kAlloc,
        block->segment->address + block->offset,
        nbytes,
        stream,
        history_settings().context >= ContextLevel::kAlloc ? context : nullptr);
    block->context = std::move(context);
  }
  return block;
}

void Ledger::record(MemoryAction action, uint64_t address, uint64_t size, int64_t stream, const Context& context) {
  if (C10_UNLIKELY(history_enabled.load(std::memory_order_relaxed))) {
    history_.record(action, address, size, stream, context);
  }
}

void Ledger::release(Block* block) {
  const Context context = context_for(ContextLevel::kAll);
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto action : {MemoryAction::kFreeRequested, MemoryAction::kFreeCompleted}) {
    record(action, block->segment->address + block->offset, block->requested, block->segment->pool->stream, context);
  }
  block->context.reset();
  const bool small = block->segment->pool->small;
  decrease(stats_.allocation, small, 1);
  decrease(stats_.active, small, 1);
  decrease(stats_.allocated_bytes, small, block->size);
  decrease(stats_.active_bytes, small, block->size);
  decrease(stats_.requested_bytes, small, block->requested);
  block->free = true;
  block->requested = 0;
  for (Block* neighbour : {block->left, block->right}) {
    if (neighbour == nullptr || !neighbour->free) {
      continue;
    }
    remove_free(neighbour);
    Block* first = neighbour == block->left ? neighbour : block;
    Block* second = first == block ? neighbour : block;
    first->size += second->size;
    first->right = second->right;
    if (first->right != nullptr) {
      first->right->left = first;
    }
    spare_blocks_.push_back(second);
    block = first;
  }
  push_free(block);
}

void Ledger::release_free_segments() {
  auto wholly_free = [](const Segment& segment) { return segment.first->free && segment.first->right == nullptr; };
  for (auto& segment : segments_) {
    if (!wholly_free(*segment)) {
      continue;
    }
    remove_free(segment->first);
    spare_blocks_.push_back(segment->first);
    const bool small = segment->pool->small;
    decrease(stats_.segment, small, 1);
    decrease(stats_.reserved_bytes, small, segment->size);
    stats_.num_device_free += 1;
    record(MemoryAction::kSegmentFree, segment->address, segment->size, segment->pool->stream, nullptr);
    segment.reset();
  }
  std::erase(segments_, nullptr);
}

void Ledger::empty_cache() {
  std::lock_guard<std::mutex> guard(mutex_);
  release_free_segments();
}

void Ledger::set_memory_fraction(double fraction) {
  TORCH_CHECK_VALUE(
      fraction > 0 && fraction <= 1, "neuron: the memory fraction must be above 0 and at most 1, not ", fraction);
  std::lock_guard<std::mutex> guard(mutex_);
  limit_bytes_ = static_cast<uint64_t>(fraction * static_cast<double>(total_bytes_));
}

void Ledger::throw_out_of_memory(uint64_t nbytes, std::unique_lock<std::mutex> lock) {
  constexpr size_t kNamed = 5; // of the live tensors, the biggest
  const auto allocated = static_cast<uint64_t>(total_of(stats_.allocated_bytes));
  const auto reserved = static_cast<uint64_t>(total_of(stats_.reserved_bytes));
  const uint64_t largest = largest_free_block_locked();
  std::vector<std::pair<uint64_t, Context>> live; // bytes asked for, and where
  for (const auto& segment : segments_) {
    for (const Block* block = segment->first; block != nullptr; block = block->right) {
      if (!block->free) {
        live.emplace_back(block->requested, block->context);
      }
    }
  }
  lock.unlock();
  std::stable_sort(live.begin(), live.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string biggest;
  for (size_t i = 0; i < std::min(kNamed, live.size()); ++i) {
    const std::string line = line_of(live[i].second);
    biggest += c10::str(i == 0 ? "" : ", ", format_size(live[i].first), line.empty() ? "" : " (" + line + ")");
  }
  if (!live.empty()) {
    biggest = c10::str(
        " The biggest of ",
        live.size(),
        " live storages: ",
        biggest,
        history_enabled.load()
            ? "."
            : "; torch.neuron.memory._record_memory_history() makes this message name where they were made.");
  }
  const std::string limit = limit_bytes_ == total_bytes_
      ? ""
      : c10::str(" (", format_size(limit_bytes_), " allowed by set_per_process_memory_fraction)");
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "neuron out of memory. Tried to allocate ",
      format_size(nbytes),
      ". neuron:",
      static_cast<int>(device_),
      " has a total capacity of ",
      format_size(total_bytes_),
      limit,
      " of which ",
      format_size(limit_bytes_ > reserved ? limit_bytes_ - reserved : 0),
      " is free. ",
      format_size(allocated),
      " is allocated by PyTorch, and ",
      format_size(reserved - allocated),
      " is reserved by PyTorch but unallocated; the largest free block is ",
      format_size(largest),
      ".",
      biggest,
      " This is the modelled HBM of one logical NeuronCore, not memory of this machine.");
}

uint64_t Ledger::largest_free_block_locked() const {
  uint64_t largest = 0;
  for (const auto& segment : segments_) {
    for (const Block* block = segment->first; block != nullptr; block = block->right) {
      if (block->free) {
        largest = std::max(largest, block->size);
      }
    }
  }
  return largest;
}

uint64_t Ledger::largest_free_block() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return largest_free_block_locked();
}

c10::CachingDeviceAllocator::DeviceStats Ledger::stats() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return stats_;
}

uint64_t Ledger::reserved_bytes_locked() const {
  return static_cast<uint64_t>(total_of(stats_.reserved_bytes));
}

uint64_t Ledger::reserved_bytes() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return reserved_bytes_locked();
}

uint64_t Ledger::allocated_bytes() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return static_cast<uint64_t>(total_of(stats_.allocated_bytes));
}

namespace {

template <typename F>
void for_each_stat(c10::CachingDeviceAllocator::DeviceStats& stats, F apply) {
  for (StatArray* array :
       {&stats.allocation,
        &stats.segment,
        &stats.active,
        &stats.inactive_split,
        &stats.allocated_bytes,
        &stats.reserved_bytes,
        &stats.active_bytes,
        &stats.inactive_split_bytes,
        &stats.requested_bytes}) {
    for (Stat& stat : *array) {
      apply(stat);
    }
  }
}

} // namespace

void Ledger::reset_peak_stats() {
  std::lock_guard<std::mutex> guard(mutex_);
  for_each_stat(stats_, [](Stat& stat) { stat.reset_peak(); });
}

void Ledger::reset_accumulated_stats() {
  std::lock_guard<std::mutex> guard(mutex_);
  for_each_stat(stats_, [](Stat& stat) { stat.reset_accumulated(); });
  stats_.num_alloc_retries = 0;
  stats_.num_ooms = 0;
}

std::vector<Ledger::SegmentRecord> Ledger::snapshot() const {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<SegmentRecord> records;
  for (const auto& segment : segments_) {
    SegmentRecord record{segment->address, segment->size, segment->pool->stream, segment->pool->small, {}};
    for (const Block* block = segment->first; block != nullptr; block = block->right) {
      record.blocks.push_back(
          {segment->address + block->offset, block->size, block->requested, block->free, block->context});
    }
    records.push_back(std::move(record));
  }
  return records;
}

std::vector<MemoryEvent> Ledger::history() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return {history_.events().begin(), history_.events().end()};
}

void Ledger::clear_history() {
  std::lock_guard<std::mutex> guard(mutex_);
  history_.clear();
  for (const auto& segment : segments_) {
    for (Block* block = segment->first; block != nullptr; block = block->right) {
      block->context.reset();
    }
  }
}

} // namespace trn
