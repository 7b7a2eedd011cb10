#include "c10d/SymmetricMemoryNeuron.h"

#include "c10d/ProcessGroupNeuron.h"
#include "device/Allocator.h"
#include "device/Device.h"
#include "device/Ledger.h"
#include "device/TimingOnly.h"
#include "fabric/Futex.h"
#include "timing/OperatorCost.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace trn {

namespace {

using std::chrono::milliseconds;

constexpr int64_t kSignalBytes = 4;

constexpr uint64_t round_up(uint64_t nbytes) {
  return (nbytes + 63) / 64 * 64;
}

// What a rank tells the others at a rendezvous.
struct Offer {
  uint64_t buffer; // offsets in the rank's arena
  uint64_t records;
  uint64_t buffer_nbytes;
  uint64_t pad_nbytes;
};

// Whose memory lies where in this process, for the time of copies between ranks.
struct Mapped {
  const std::byte* base;
  uint64_t size;
  std::weak_ptr<Communicator> communicator;
};
struct MappedPeers {
  std::mutex mutex;
  std::vector<Mapped> peers;
};

MappedPeers& mapped() {
  static auto* instance = new MappedPeers();
  return *instance;
}

} // namespace

// ---- Rendezvous -----------------------------------------------------------------------------------------------------

SymmetricMemoryNeuron::SymmetricMemoryNeuron(
    ProcessGroupNeuron& group,
    c10::Device device,
    std::byte* buffer,
    uint64_t buffer_nbytes,
    uint64_t pad_nbytes)
    : communicator_(group.communicator()),
      name_(group.group_name()),
      timeout_(group.getBackendOptions()->timeout),
      device_(device),
      buffer_nbytes_(buffer_nbytes),
      pad_words_(pad_nbytes / sizeof(uint32_t)),
      own_records_(sizeof(Header) + pad_words_ * sizeof(Signal)) {
  const int size = communicator_->size();
  for (int r = 0; r < size; ++r) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        communicator_->is_local(r),
        "neuron: symmetric memory is shared within a host, and group ",
        communicator_->name(),
        " has ",
        communicator_->rank_label(r),
        " on another: use a group of this host's ranks");
  }
  std::memset(own_records_.data(), 0, sizeof(Header) + pad_words_ * sizeof(Signal));
  communicator_->prepare_message_costs();
  const Arena& arena = Arena::get();
  const Offer offer{arena.offset_of(buffer), own_records_.offset(), buffer_nbytes, pad_nbytes};
  at::Tensor mine = at::empty({static_cast<int64_t>(sizeof(Offer))}, at::kByte);
  at::Tensor all = at::empty({static_cast<int64_t>(sizeof(Offer)) * size}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &offer, sizeof(offer));
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  group._allgather_base(all, mine, options);
  const auto* offers = static_cast<const Offer*>(all.const_data_ptr());
  for (int r = 0; r < size; ++r) {
    TORCH_CHECK_VALUE(
        offers[r].buffer_nbytes == buffer_nbytes && offers[r].pad_nbytes == pad_nbytes,
        "neuron: rendezvous of symmetric memory in group ",
        communicator_->name(),
        ": ",
        communicator_->rank_label(r),
        " has a buffer of ",
        offers[r].buffer_nbytes,
        " bytes with ",
        offers[r].pad_nbytes,
        " of signals, and ",
        communicator_->rank_label(communicator_->rank()),
        " one of ",
        buffer_nbytes,
        " with ",
        pad_nbytes,
        "; all ranks must allocate alike");
    const Fabric::Peer& peer = communicator_->peer(r);
    const auto inside = [&](uint64_t offset, uint64_t nbytes) {
      return offset % 64 == 0 && offset <= peer.size && nbytes <= peer.size - offset;
    };
    TORCH_CHECK_WITH(
        DistBackendError,
        inside(offers[r].buffer, round_up(buffer_nbytes) + pad_nbytes) &&
            inside(offers[r].records, sizeof(Header) + pad_words_ * sizeof(Signal)),
        "neuron: rendezvous of symmetric memory in group ",
        communicator_->name(),
        ": what ",
        communicator_->rank_label(r),
        " offers does not lie in its memory");
    buffers_.push_back(peer.base + offers[r].buffer);
    pads_.push_back(peer.base + offers[r].buffer + round_up(buffer_nbytes));
    records_.push_back(peer.base + offers[r].records);
  }
  barriers_.resize(pad_words_ / size);
  std::lock_guard<std::mutex> guard(mapped().mutex);
  auto& peers = mapped().peers;
  std::erase_if(peers, [](const Mapped& entry) { return entry.communicator.expired(); });
  for (int r = 0; r < size; ++r) {
    const Fabric::Peer& peer = communicator_->peer(r);
    const bool known = std::any_of(peers.begin(), peers.end(), [&](const Mapped& e) { return e.base == peer.base; });
    if (r != communicator_->rank() && !known) {
      peers.push_back({peer.base, peer.size, communicator_});
    }
  }
}

void SymmetricMemoryNeuron::leave() {
  header(0).left.fetch_add(1);
}

bool SymmetricMemoryNeuron::forsaken() {
  const auto size = static_cast<uint32_t>(communicator_->size());
  if (communicator_->rank() != 0) {
    if (header(0).left.load() != size) {
      return false;
    }
    header(0).noticed.fetch_add(1);
    return true;
  }
  return header(0).left.load() == size && header(0).noticed.load() == size - 1;
}

// ---- Signals --------------------------------------------------------------------------------------------------------

size_t SymmetricMemoryNeuron::slot(int channel, int source, const char* what) const {
  const int size = communicator_->size();
  TORCH_CHECK_VALUE(
      source >= 0 && source < size, "neuron: ", what, ": rank ", source, " of a group of ", size, " does not exist");
  const uint64_t channels = pad_words_ / size;
  TORCH_CHECK_VALUE(
      channel >= 0 && static_cast<uint64_t>(channel) < channels,
      "neuron: ",
      what,
      ": channel ",
      channel,
      " is not one of the ",
      channels,
      " that a signal pad of ",
      pad_words_ * sizeof(uint32_t),
      " bytes has for ",
      size,
      " ranks");
  return static_cast<size_t>(channel) * size + source;
}

void SymmetricMemoryNeuron::wait_for(
    int rank,
    size_t slot,
    uint32_t goal,
    const std::vector<int>& peers,
    const char* call,
    int channel,
    size_t timeout_ms) {
  std::atomic<uint32_t>& awaited = word(rank, slot);
  if (awaited.load() == goal) {
    return;
  }
  const auto missing = [&] {
    std::vector<int> absent;
    for (const int peer : peers) {
      // In a barrier: all whose signal is not there yet, this one first.
      const size_t of_peer =
          rank == communicator_->rank() ? static_cast<size_t>(channel) * communicator_->size() + peer : slot;
      if (word(rank, of_peer).load() != goal) {
        absent.push_back(peer);
      }
    }
    return absent;
  };
  Communicator::Section section(*communicator_);
  communicator_->wait_until(
      section,
      [&](auto& wait, bool) {
        wait.word = &awaited;
        wait.seen = awaited.load();
        wait.sleepers = &signal(rank, slot).sleepers;
        return wait.seen == goal;
      },
      missing,
      [&] { return c10::str(call, "(channel=", channel, ") of symmetric memory"); },
      [](WaitRecord&) {}, // cannot be judged from outside
      kNoOffset,
      timeout_ms > 0 ? milliseconds(timeout_ms) : timeout_,
      /*fail_on_timeout=*/timeout_ms == 0);
}

void SymmetricMemoryNeuron::change(int rank, size_t slot, uint32_t value) const {
  word(rank, slot).store(value); // sequentially consistent, against the sleepers' count
  if (signal(rank, slot).sleepers.load() > 0) {
    futex_wake_all(&word(rank, slot));
  }
}

Picoseconds SymmetricMemoryNeuron::flight_ps() const {
  return communicator_->control_.header().costs[kCollectives].time_ps(kSignalBytes);
}

Picoseconds SymmetricMemoryNeuron::send(int to, int channel, Picoseconds ready, const char* call, size_t timeout_ms) {
  const size_t index = slot(channel, communicator_->rank(), call);
  wait_for(to, index, 0, {to}, call, channel, timeout_ms);
  Signal& sent = signal(to, index);
  const Picoseconds departure = std::max(ready, sent.taken_ps.load(std::memory_order_relaxed));
  sent.sent_ps.store(departure, std::memory_order_relaxed);
  change(to, index, 1);
  return departure;
}

Picoseconds SymmetricMemoryNeuron::take(int from, int channel, Picoseconds ready, const char* call, size_t timeout_ms) {
  const size_t index = slot(channel, from, call);
  const int self = communicator_->rank();
  wait_for(self, index, 1, {from}, call, channel, timeout_ms);
  Signal& taken = signal(self, index);
  const Picoseconds departure = taken.sent_ps.load(std::memory_order_relaxed);
  taken.taken_ps.store(std::max(ready, departure + flight_ps()), std::memory_order_relaxed);
  change(self, index, 0);
  return departure;
}

void SymmetricMemoryNeuron::record(const char* call, uint64_t sequence, Transfer times) {
  const c10::Stream stream = current_stream(device_.index());
  // Apart from the collectives of the group, which count from 0.
  constexpr uint64_t kSignals = 1ULL << 52;
  record_collective(
      stream, name_id(c10::str("symm_mem::", call)), name_, kSignals + sequence, kSignalBytes, times, launch_site());
  stream_wait(stream, times.end, Origin{});
}

void SymmetricMemoryNeuron::barrier(int channel, size_t timeout_ms) {
  const int self = communicator_->rank();
  const int size = communicator_->size();
  slot(channel, self, "barrier");
  communicator_->throw_if_unusable();
  communicator_->throw_if_failed();
  const Picoseconds ready = enqueue(current_stream(device_.index())).ready;
  Picoseconds start = ready;
  for (int step = 1; step < size; ++step) {
    start = std::max(start, send((self + step) % size, channel, ready, "barrier", timeout_ms));
  }
  for (int step = 1; step < size; ++step) {
    start = std::max(start, take((self + step) % size, channel, ready, "barrier", timeout_ms));
  }
  record("barrier", static_cast<uint64_t>(channel) << 32 | barriers_[channel]++, {ready, start, start + flight_ps()});
}

void SymmetricMemoryNeuron::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  slot(channel, dst_rank, "put_signal");
  communicator_->throw_if_unusable();
  communicator_->throw_if_failed();
  const c10::Stream stream = current_stream(device_.index());
  stream_wait(stream, send(dst_rank, channel, enqueue(stream).ready, "put_signal", timeout_ms), Origin{});
}

void SymmetricMemoryNeuron::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  slot(channel, src_rank, "wait_signal");
  communicator_->throw_if_unusable();
  communicator_->throw_if_failed();
  const c10::Stream stream = current_stream(device_.index());
  const Picoseconds ready = enqueue(stream).ready;
  const Picoseconds sent = take(src_rank, channel, ready, "wait_signal", timeout_ms);
  stream_wait(stream, std::max(ready, sent + flight_ps()), Origin{});
}

Picoseconds SymmetricMemoryNeuron::link_time_ps(const void* address, int64_t nbytes) {
  std::shared_ptr<Communicator> communicator;
  {
    const auto* place = static_cast<const std::byte*>(address);
    std::lock_guard<std::mutex> guard(mapped().mutex);
    for (const Mapped& peer : mapped().peers) {
      if (place >= peer.base && place < peer.base + peer.size) {
        communicator = peer.communicator.lock();
      }
    }
  }
  if (communicator == nullptr || communicator->departed_) {
    return 0;
  }
  return communicator->control_.header().costs[kCollectives].time_ps(nbytes);
}

// ---- Allocation -----------------------------------------------------------------------------------------------------

namespace {

using c10d::symmetric_memory::SymmetricMemory;
using Handle = c10::intrusive_ptr<SymmetricMemoryNeuron>;

struct Allocation {
  c10::DataPtr data;
  uint64_t nbytes = 0;
  uint64_t pad_nbytes = 0;
  c10::Device device{c10::DeviceType::CPU};
  std::optional<std::string> group_name;
  std::map<std::string, Handle> handles; // by group
  std::vector<Handle> left; // of groups that were destroyed, or whose peers have not freed theirs yet
};

ProcessGroupNeuron& group_of(const std::string& name) {
  const auto group = c10d::resolve_process_group(name);
  const auto backend = group->getBackend(kNeuron);
  auto* neuron = dynamic_cast<ProcessGroupNeuron*>(backend.get());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !timing_only(),
      "neuron: timing mode (TRN_TIMING_ONLY) has no symmetric memory, for the other ranks of group ",
      name,
      " do not run; switch asynchronous tensor parallelism off");
  TORCH_CHECK_VALUE(
      neuron != nullptr,
      "neuron: symmetric memory needs a group of backend neuron; group ",
      name,
      " has ",
      backend->getBackendName());
  return *neuron;
}

class NeuronSymmetricMemoryAllocator final : public c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int device_index, const std::optional<std::string>& group_name) override {
    reclaim();
    Allocation allocation;
    allocation.nbytes = std::max<uint64_t>(size, 1);
    allocation.pad_nbytes = c10d::symmetric_memory::get_signal_pad_size();
    allocation.device =
        c10::Device(kNeuron, device_index < 0 ? current_device() : static_cast<c10::DeviceIndex>(device_index));
    allocation.group_name = group_name;
    const c10::DeviceGuard device(allocation.device);
    allocation.data = device_allocator()->allocate(round_up(allocation.nbytes) + allocation.pad_nbytes);
    auto* address = static_cast<std::byte*>(allocation.data.get());
    std::memset(address + round_up(allocation.nbytes), 0, allocation.pad_nbytes);
    std::lock_guard<std::mutex> guard(mutex_);
    allocations_.emplace(address, std::move(allocation));
    return address;
  }

  void free(void* ptr) override {
    if (Arena::in_bad_fork()) {
      return;
    }
    Allocation allocation;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto it = allocations_.find(static_cast<std::byte*>(ptr));
      if (it == allocations_.end()) {
        return;
      }
      allocation = std::move(it->second);
      allocations_.erase(it);
    }
    for (auto& [name, handle] : allocation.handles) {
      handle->leave();
      allocation.left.push_back(std::move(handle));
    }
    allocation.handles.clear();
    if (!allocation.left.empty()) { // [Note: Freed buffers]
      Arena::Block* block = Arena::get().block_at(ptr);
      Ledger::of(block->device).release(static_cast<Ledger::Block*>(std::exchange(block->ledger_entry, nullptr)));
      std::lock_guard<std::mutex> guard(mutex_);
      freed_.push_back(std::move(allocation));
    }
    reclaim();
  }

  size_t get_alloc_size(void* ptr) override {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto it = allocations_.find(static_cast<std::byte*>(ptr));
    TORCH_CHECK_VALUE(it != allocations_.end(), "neuron: get_alloc_size: no symmetric memory begins at ", ptr);
    return it->second.nbytes;
  }

  c10::intrusive_ptr<SymmetricMemory> rendezvous(void* ptr, const std::optional<std::string>& group_name) override {
    std::byte* begin = nullptr;
    uint64_t nbytes = 0;
    uint64_t pad_nbytes = 0;
    c10::Device device(c10::DeviceType::CPU);
    std::string name;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      auto it = allocations_.find(static_cast<std::byte*>(ptr));
      if (it == allocations_.end()) {
        return nullptr; // ordinary memory, as on CUDA
      }
      Allocation& allocation = it->second;
      TORCH_CHECK_VALUE(
          group_name.has_value() || allocation.group_name.has_value(),
          "neuron: rendezvous of symmetric memory needs a group: neither it nor the allocation named one");
      name = group_name.has_value() ? *group_name : *allocation.group_name;
      if (auto handle = allocation.handles.find(name); handle != allocation.handles.end()) {
        if (handle->second->usable()) {
          return handle->second;
        }
        // The group was destroyed, and perhaps another made by its name.
        handle->second->leave();
        allocation.left.push_back(std::move(handle->second));
        allocation.handles.erase(handle);
      }
      begin = it->first;
      nbytes = allocation.nbytes;
      pad_nbytes = allocation.pad_nbytes;
      device = allocation.device;
    }
    auto handle = c10::make_intrusive<SymmetricMemoryNeuron>(group_of(name), device, begin, nbytes, pad_nbytes);
    std::lock_guard<std::mutex> guard(mutex_);
    if (auto it = allocations_.find(begin); it != allocations_.end()) {
      it->second.handles.emplace(name, handle);
    }
    return handle;
  }

  bool has_multicast_support(int) override {
    return false;
  }
  c10::DeviceType supported_device_type() override {
    return kNeuron;
  }
  std::string name() override {
    return "NEURON";
  }
  bool has_allocation(void* ptr) override {
    std::lock_guard<std::mutex> guard(mutex_);
    return allocations_.contains(static_cast<std::byte*>(ptr));
  }

 private:
  // Gives back the memory of freed buffers that no rank uses any more.
  void reclaim() {
    std::vector<Allocation> unused; // dropped after the lock
    std::lock_guard<std::mutex> guard(mutex_);
    std::erase_if(freed_, [&](Allocation& allocation) {
      std::erase_if(allocation.left, [](const Handle& handle) { return handle->forsaken(); });
      if (!allocation.left.empty()) {
        return false;
      }
      unused.push_back(std::move(allocation));
      return true;
    });
  }

  std::mutex mutex_;
  std::map<std::byte*, Allocation> allocations_;
  std::vector<Allocation> freed_;
};

} // namespace

void register_symmetric_memory() {
  auto allocator = c10::make_intrusive<NeuronSymmetricMemoryAllocator>();
  c10d::symmetric_memory::register_availability(allocator->name(), allocator);
  c10d::symmetric_memory::register_allocator(kNeuron, allocator);
  set_link_time(&SymmetricMemoryNeuron::link_time_ps);
}

} // namespace trn
