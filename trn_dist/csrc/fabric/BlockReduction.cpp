#include "fabric/BlockReduction.h"

#include "fabric/CollectiveOperation.h"
#include "fabric/ExactSum.h"
#include "fabric/Futex.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <pthread.h>

#include <algorithm>
#include <bit>

namespace trn {

namespace {

using std::chrono::milliseconds;

// Smaller ones cost less when every rank sends its own contribution, in one step.
constexpr uint64_t kSmallestBytes = 64 << 10;
constexpr uint64_t kShareElements = 16; // shares of an all_reduce are multiples of this

uint64_t share_begin(uint64_t numel, int rank, int size) {
  const auto ranks = static_cast<uint64_t>(size);
  return rank == size ? numel : numel / kShareElements * static_cast<uint64_t>(rank) / ranks * kShareElements;
}

Region region_of(std::byte* data, uint64_t nbytes) {
  return {data, nbytes, nullptr};
}

} // namespace

bool BlockReduction::takes(const CollectiveCall& call) {
  if (call.operation != Collective::AllReduce && call.operation != Collective::ReduceScatter) {
    return false;
  }
  if (is_exact(call.reduction)) {
    return false; // partial sums would be rounded
  }
  uint64_t nbytes = 0;
  for (const Region& region : call.inputs) {
    nbytes += region.nbytes;
  }
  return nbytes >= kSmallestBytes;
}

std::unique_ptr<BlockReduction> BlockReduction::create(
    Communicator& group,
    const std::shared_ptr<Fabric>& fabric,
    const std::vector<int>& fabric_ranks,
    const c10::intrusive_ptr<c10d::Store>& store,
    milliseconds timeout) {
  const int size = static_cast<int>(fabric_ranks.size());
  const std::vector<int>& host_of = fabric->hosts().host_of;
  int block = 1;
  while (block < size && host_of[fabric_ranks[block]] == host_of[fabric_ranks[0]]) {
    ++block;
  }
  if (block < 2 || !std::has_single_bit(static_cast<unsigned>(block)) || size % block != 0) {
    return nullptr;
  }
  std::vector<int> seen;
  for (int r = 0; r < size; ++r) {
    const int host = host_of[fabric_ranks[r]];
    if (r % block == 0) {
      if (std::find(seen.begin(), seen.end(), host) != seen.end()) {
        return nullptr;
      }
      seen.push_back(host);
    } else if (host != seen.back()) {
      return nullptr;
    }
  }
  std::unique_ptr<BlockReduction> reduction(new BlockReduction());
  reduction->block_ = block;
  reduction->hosts_ = size / block;
  reduction->host_ = group.rank() / block;
  reduction->place_ = group.rank() % block;
  std::vector<int> local, peers;
  for (int i = 0; i < block; ++i) {
    local.push_back(fabric_ranks[reduction->host_ * block + i]);
  }
  for (int h = 0; h < reduction->hosts_; ++h) {
    peers.push_back(fabric_ranks[h * block + reduction->place_]);
  }
  const auto make = [&](std::vector<int> ranks, int rank, const std::string& part) {
    return Communicator::create(
        fabric,
        std::move(ranks),
        rank,
        group.name() + " (" + part + ")",
        c10::make_intrusive<c10d::PrefixStore>("trn/" + part, store),
        timeout,
        /*for_group_of=*/&group);
  };
  reduction->local_ = make(local, reduction->place_, c10::str("host ", reduction->host_));
  reduction->peers_ = make(peers, reduction->host_, c10::str("place ", reduction->place_));
  reduction->whole_ = make(fabric_ranks, group.rank(), "whole");
  reduction->thread_ = std::thread([raw = reduction.get()] { raw->work(); });
  return reduction;
}

BlockReduction::~BlockReduction() {
  if (!thread_.joinable()) {
    return;
  }
  if (Arena::in_bad_fork()) {
    new std::thread(std::move(thread_)); // the parent's
    return;
  }
  close(milliseconds(0));
}

void BlockReduction::close(milliseconds patience) {
  HostLockRelease released;
  bool done = false;
  {
    std::unique_lock<std::mutex> guard(mutex_);
    done = changed_.wait_for(guard, patience, [&] { return queue_.empty(); });
    closing_ = true;
  }
  changed_.notify_all();
  if (!done) {
    fail("neuron: the group was destroyed");
  }
  if (thread_.joinable()) {
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  for (const auto& communicator : {local_, peers_, whole_}) {
    communicator->depart();
  }
}

void BlockReduction::fail(const std::string& reason) {
  for (const auto& communicator : {local_, peers_, whole_}) {
    communicator->fail(reason);
  }
}

void BlockReduction::enqueue(std::shared_ptr<CollectiveOperation> operation) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    queue_.push_back(std::move(operation));
  }
  changed_.notify_all();
}

void BlockReduction::work() {
  pthread_setname_np(pthread_self(), "trn_blocks");
  std::unique_lock<std::mutex> guard(mutex_);
  while (true) {
    changed_.wait(guard, [&] { return closing_ || !queue_.empty(); });
    if (closing_) {
      return;
    }
    std::shared_ptr<CollectiveOperation> operation = queue_.front();
    guard.unlock();
    operation->carry_out([this](const CollectiveCall& call) { reduce_blocks(call); });
    operation = nullptr;
    guard.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

void BlockReduction::run(Communicator& communicator, CollectiveCall&& call, milliseconds timeout) {
  call.timeout = timeout;
  communicator.post(std::move(call))->finish();
}

void BlockReduction::reduce_blocks(const CollectiveCall& call) {
  const int size = block_ * hosts_;
  const bool scatter = call.operation == Collective::ReduceScatter;
  const c10::ScalarType wide = accumulator_type(call.dtype);
  const uint64_t element = c10::elementSize(call.dtype);
  const uint64_t wide_element = c10::elementSize(wide);
  const bool list = scatter && !call.chunked_inputs;
  const size_t tensors = list ? 1 : call.inputs.size();

  // The inputs as accumulators: where they are, or a converted copy.
  std::vector<StagedBlock> staged;
  std::vector<std::byte*> inputs;
  for (const Region& region : call.inputs) {
    if (wide == call.dtype && region.layout == nullptr) {
      inputs.push_back(region.data);
      continue;
    }
    const std::byte* values = region.data;
    std::optional<StagedBlock> dense;
    if (region.layout != nullptr) {
      dense.emplace(region.nbytes);
      region.read(dense->data());
      values = dense->data();
    }
    staged.emplace_back(region.nbytes / element * wide_element);
    widen(call.dtype, staged.back().data(), values, region.nbytes / element);
    inputs.push_back(staged.back().data());
  }
  // What rank r is to sum of tensor t, in elements of its input.
  struct Chunk {
    std::byte* data;
    uint64_t numel;
  };
  const auto begin_of = [&](size_t t, int r) {
    const uint64_t numel = call.inputs[t].nbytes / element;
    return scatter ? numel / size * r : share_begin(numel, r, size);
  };
  const auto chunk = [&](size_t t, int r) -> Chunk {
    if (list) {
      return {inputs[r], call.inputs[r].nbytes / element};
    }
    const uint64_t begin = begin_of(t, r);
    const uint64_t end = r + 1 == size ? call.inputs[t].nbytes / element : begin_of(t, r + 1);
    return {inputs[t] + begin * wide_element, end - begin};
  };
  // Contiguous accumulators for some chunks, one region each.
  const auto make_room = [&](c10::SmallVector<Region, 4>& regions, const std::vector<uint64_t>& numels) {
    for (const uint64_t numel : numels) {
      staged.emplace_back(numel * wide_element);
      regions.push_back(region_of(staged.back().data(), numel * wide_element));
    }
  };

  const bool premul = call.reduction == Reduction::PremulSum;
  const Reduction partial = call.reduction == Reduction::Avg || premul ? Reduction::Sum : call.reduction;
  CollectiveCall within;
  within.operation = Collective::ReduceScatter;
  within.dtype = wide;
  within.reduction = premul ? Reduction::PremulSum : partial;
  within.factor = call.factor;
  std::vector<uint64_t> numels;
  for (size_t t = 0; t < tensors; ++t) {
    for (int h = 0; h < hosts_; ++h) {
      for (int i = 0; i < block_; ++i) {
        const Chunk part = chunk(t, h * block_ + i);
        within.inputs.push_back(region_of(part.data, part.numel * wide_element));
      }
      numels.push_back(chunk(t, h * block_ + place_).numel);
    }
  }
  make_room(within.outputs, numels);
  CollectiveCall between;
  between.operation = Collective::ReduceScatter;
  between.dtype = wide;
  between.reduction = partial;
  between.inputs = within.outputs;
  numels.clear();
  for (size_t t = 0; t < tensors; ++t) {
    numels.push_back(chunk(t, host_ * block_ + place_).numel);
  }
  make_room(between.outputs, numels);
  const c10::SmallVector<Region, 4> sums = between.outputs;
  run(*local_, std::move(within), call.timeout);
  run(*peers_, std::move(between), call.timeout);

  if (scatter) {
    for (size_t t = 0; t < tensors; ++t) {
      StagedBlock rounded(call.outputs[t].nbytes);
      narrow(call.dtype, call.reduction, size, rounded.data(), sums[t].data, numels[t]);
      call.outputs[t].write(rounded.data());
    }
    return;
  }
  CollectiveCall gather;
  gather.operation = Collective::AllGather;
  gather.dtype = call.dtype;
  for (size_t t = 0; t < tensors; ++t) {
    staged.emplace_back(numels[t] * element);
    narrow(call.dtype, call.reduction, size, staged.back().data(), sums[t].data, numels[t]);
    gather.inputs.push_back(region_of(staged.back().data(), numels[t] * element));
    for (int r = 0; r < size; ++r) {
      const uint64_t begin = begin_of(t, r);
      const uint64_t end = r + 1 == size ? call.outputs[t].nbytes / element : begin_of(t, r + 1);
      gather.outputs.push_back(region_of(call.outputs[t].data + begin * element, (end - begin) * element));
    }
  }
  run(*whole_, std::move(gather), call.timeout);
}

} // namespace trn
