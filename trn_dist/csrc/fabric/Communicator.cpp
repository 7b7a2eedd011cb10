#include "fabric/Communicator.h"

#include "fabric/CollectiveOperation.h"
#include "fabric/Futex.h"
#include "fabric/Host.h"
#include "fabric/PointToPoint.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <sstream>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr milliseconds kSlice{50}; // the longest sleep without a look around
constexpr milliseconds kHealthInterval{200};
constexpr size_t kSuspectsPerCheck = 16; // each costs a read of /proc
constexpr int kMinSpin = 64; // pauses, of 20 to 50 ns each
constexpr int kMaxSpin = 4096;
constexpr microseconds kWorthSpinning{100}; // a sleep and a wake-up take about 50 us
constexpr uint64_t kSegmentBytes = 256 << 10;
// Collectives that move less than this are done by the last to arrive: waking the others would take longer.
constexpr uint64_t kSoloBytes = 64 << 10;
const char* const kStoreKey = "trn/communicator";

// What all communicators of this process share. Never destroyed: threads and tensors outlive static destructors.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> live;
  // Left by this process, but not by all its peers, who may still look into its memory.
  std::vector<std::shared_ptr<Communicator>> departed;
  // Of operations that failed: a peer may be in the middle of reading or writing them.
  std::vector<at::Tensor> abandoned;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

int64_t milliseconds_since(Clock::time_point begin) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begin).count();
}

std::string in_seconds(milliseconds value) {
  std::ostringstream text;
  text << static_cast<double>(value.count()) / 1000 << " s";
  return text.str();
}

} // namespace

// ---- Communicator: life ---------------------------------------------------------------------------------------------

Communicator::Communicator(std::shared_ptr<Fabric> fabric, std::vector<int> fabric_ranks, int rank, std::string name)
    : fabric_(std::move(fabric)),
      fabric_ranks_(std::move(fabric_ranks)),
      rank_(rank),
      name_(std::move(name)),
      spin_limit_(kMaxSpin) {}

std::shared_ptr<Communicator> Communicator::create(
    std::shared_ptr<Fabric> fabric,
    std::vector<int> fabric_ranks,
    int rank,
    std::string name,
    const c10::intrusive_ptr<c10d::Store>& store,
    milliseconds timeout) {
  std::shared_ptr<Communicator> communicator(
      new Communicator(std::move(fabric), std::move(fabric_ranks), rank, std::move(name)));
  communicator->attach(store, timeout);
  communicator->messages_ = std::make_unique<PointToPoint>(*communicator);

  std::vector<std::shared_ptr<Communicator>> finished;
  std::lock_guard<std::mutex> guard(registry().mutex);
  std::erase_if(registry().live, [](const auto& entry) { return entry.expired(); });
  std::erase_if(registry().departed, [&](auto& left) {
    const bool all = left->control_.header().departed.load() == static_cast<uint32_t>(left->size());
    if (all) {
      finished.push_back(std::move(left));
    }
    return all;
  });
  registry().live.push_back(communicator);
  return communicator;
}

void Communicator::attach(const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout) {
  const int size = static_cast<int>(fabric_ranks_.size());
  const uint64_t nbytes = ControlBlock::nbytes(size);
  struct Locator {
    uint64_t offset;
    uint64_t nonce;
  } locator{};
  if (rank_ == 0) {
    own_control_ = std::make_unique<StagedBlock>(nbytes);
    std::byte* base = own_control_->data();
    // Fresh pages, all zero, which cost nothing until they are used. (Blocks of this size are whole pages.)
    if (madvise(base, nbytes, MADV_REMOVE) != 0) {
      std::memset(base, 0, nbytes);
    }
    control_ = ControlBlock(base, size);
    ControlHeader& header = control_.header();
    header.magic = kControlMagic;
    header.size = size;
    TORCH_CHECK_WITH(
        DistBackendError,
        getrandom(&header.nonce, sizeof(header.nonce), 0) == sizeof(header.nonce),
        "neuron: no random numbers (getrandom: ",
        std::strerror(errno),
        ")");
    locator = {own_control_->offset(), header.nonce};
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (size > 1) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(&locator);
      store->set(kStoreKey, std::vector<uint8_t>(bytes, bytes + sizeof(locator)));
    }
    return;
  }
  store->wait({kStoreKey}, timeout);
  const std::vector<uint8_t> raw = store->get(kStoreKey);
  const Fabric::Peer& leader = peer(0);
  bool valid = raw.size() == sizeof(locator);
  if (valid) {
    std::memcpy(&locator, raw.data(), sizeof(locator));
    valid = locator.offset % 64 == 0 && locator.offset <= leader.size && nbytes <= leader.size - locator.offset;
  }
  if (valid) {
    control_ = ControlBlock(leader.base + locator.offset, size);
    const ControlHeader& header = control_.header();
    valid =
        header.magic == kControlMagic && header.nonce == locator.nonce && header.size == static_cast<uint64_t>(size);
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      valid,
      "neuron: what ",
      rank_label(0),
      " published for group ",
      name_,
      " is not the control block of a group of ",
      size,
      " ranks; was the group created with the same ranks everywhere?");
}

Communicator::~Communicator() = default;

void Communicator::depart() {
  if (Arena::in_bad_fork()) {
    return;
  }
  std::vector<std::shared_ptr<Operation>> dropped;
  {
    Section section(*this);
    if (departed_) {
      return;
    }
    if (control_.header().failure.load(std::memory_order_acquire) == 0) {
      progress(/*work=*/true);
    }
    messages_->depart();
    // What is left waits for ranks that have not posted. They can do without this one; its tensors stay for them.
    for (const auto& operation : outstanding_) {
      if (!operation->done()) {
        operation->complete(
            std::make_exception_ptr(C10_BUILD_ERROR(
                DistBackendError,
                c10::str("neuron: ", operation->describe(), ": group ", name_, " was destroyed before"))));
      }
      dropped.push_back(operation);
    }
    outstanding_.clear();
    departed_ = true;
    control_.member(rank_).departed.store(1, std::memory_order_release);
    control_.header().departed.fetch_add(1, std::memory_order_acq_rel);
    wake_everybody();
  }
  if (control_.header().departed.load() != static_cast<uint32_t>(size())) {
    std::lock_guard<std::mutex> guard(registry().mutex);
    registry().departed.push_back(shared_from_this());
  }
}

void Communicator::throw_if_unusable() const {
  TORCH_CHECK(
      !Arena::in_bad_fork(),
      "Cannot re-initialize neuron in forked subprocess. To use neuron with multiprocessing, you must use the 'spawn' "
      "start method");
}

// ---- Communicator: errors -------------------------------------------------------------------------------------------

std::string Communicator::rank_label(int rank) const {
  const int in_job = fabric_ranks_[rank];
  return in_job == rank ? c10::str("rank ", rank) : c10::str("rank ", rank, " (", in_job, " in the job)");
}

std::string Communicator::list_ranks(const std::vector<int>& ranks) const {
  std::ostringstream text;
  for (size_t i = 0; i < ranks.size() && i < 16; ++i) {
    text << (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") << rank_label(ranks[i]);
  }
  if (ranks.size() > 16) {
    text << " and " << ranks.size() - 16 << " more";
  }
  return text.str();
}

std::string Communicator::failure() const {
  const ControlHeader& header = control_.header();
  uint32_t state = header.failure.load(std::memory_order_acquire);
  // Being written by some rank; it might have died over it.
  for (int i = 0; state == 1 && i < 1000; ++i) {
    futex_wait(&header.failure, 1, microseconds(100));
    state = header.failure.load(std::memory_order_acquire);
  }
  if (state == 0) {
    return "";
  }
  if (state == 1) {
    return c10::str("neuron: group ", name_, " has failed, and the rank that noticed has died before it could say why");
  }
  return std::string(header.error, strnlen(header.error, kErrorBytes));
}

void Communicator::throw_if_failed() const {
  if (control_.header().failure.load(std::memory_order_acquire) != 0) {
    TORCH_CHECK_WITH(DistBackendError, false, failure());
  }
  TORCH_CHECK_WITH(DistBackendError, !departed_, "neuron: group ", name_, " has been destroyed on this rank");
}

void Communicator::fail(const std::string& reason) {
  ControlHeader& header = control_.header();
  uint32_t none = 0;
  if (header.failure.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    const size_t n = std::min(reason.size(), kErrorBytes - 1);
    std::memcpy(header.error, reason.data(), n);
    header.error[n] = 0;
    header.failure.store(2, std::memory_order_release);
    futex_wake_all(&header.failure);
  }
  wake_everybody();
}

void Communicator::wake_everybody() {
  for (uint64_t s = 0; s < kSlots; ++s) {
    if (control_.slot(s).sleepers.load() > 0) {
      futex_wake_all(&control_.slot(s).state);
    }
  }
  for (int r = 0; r < size(); ++r) {
    Member& member = control_.member(r);
    member.doorbell.fetch_add(1);
    if (member.doorbell_sleepers.load() > 0) {
      futex_wake_all(&member.doorbell);
    }
  }
  ControlHeader& header = control_.header();
  header.retire_bell.fetch_add(1);
  futex_wake_all(&header.retire_bell);
}

void Communicator::abandon(std::vector<at::Tensor> tensors) {
  std::lock_guard<std::mutex> guard(registry().mutex);
  for (auto& tensor : tensors) {
    registry().abandoned.push_back(std::move(tensor));
  }
}

void Communicator::check_health(Missing missing, What what) {
  const std::vector<int> suspects = missing();
  for (size_t i = 0; i < std::min(suspects.size(), kSuspectsPerCheck); ++i) {
    const size_t turn = next_suspect_.fetch_add(1, std::memory_order_relaxed);
    const int suspect = suspects[turn % suspects.size()];
    const bool departed = control_.member(suspect).departed.load(std::memory_order_acquire) != 0;
    if (!departed && fabric_->alive(fabric_ranks_[suspect])) {
      continue;
    }
    // It may have done its part before it went.
    const std::vector<int> still = missing();
    if (std::find(still.begin(), still.end(), suspect) == still.end()) {
      continue;
    }
    std::string fate;
    if (departed) {
      fate = "has left the group (destroy_process_group)";
    } else {
      fate = c10::str("has died: its process, ", peer(suspect).pid, ", is gone");
    }
    fail(
        c10::str(
            "neuron: ",
            what(),
            " of group ",
            name_,
            " cannot complete: ",
            rank_label(suspect),
            " ",
            fate,
            ". Noticed by ",
            rank_label(rank_),
            "."));
    throw_if_failed();
  }
}

void Communicator::time_out(Missing missing, What what, milliseconds timeout, bool fail_group) {
  const std::vector<int> absent = missing();
  std::ostringstream text;
  text << "neuron: " << what() << " of group " << name_ << " timed out: " << rank_label(rank_) << " waited "
       << in_seconds(timeout) << " for " << list_ranks(absent) << ".";
  for (size_t i = 0; i < std::min<size_t>(absent.size(), 8); ++i) {
    const uint64_t posted = control_.member(absent[i]).posted.load(std::memory_order_acquire);
    text << "\n  " << rank_label(absent[i]) << ": ";
    if (posted == 0) {
      text << "has not called a collective of this group yet";
    } else {
      text << "its last collective in this group was #" << posted - 1 << ", "
           << trn::describe(control_.post(posted - 1, absent[i]));
    }
  }
  if (fail_group) {
    fail(text.str());
    throw_if_failed();
  }
  TORCH_CHECK_WITH(DistBackendError, false, text.str());
  std::abort(); // not reached
}

// ---- Communicator: waiting ------------------------------------------------------------------------------------------

bool Communicator::shares_cpu() const {
  const int cpu = sched_getcpu();
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && control_.member(r).cpu.load(std::memory_order_relaxed) == cpu) {
      return true;
    }
  }
  return false;
}

bool Communicator::sleep(const Operation::Wait& wait) {
  const bool may_spin = fabric_->has_core_per_rank() && !shares_cpu();
  const int limit = spin_limit_.load(std::memory_order_relaxed);
  for (int i = 0; may_spin && i < limit; ++i) {
    if (wait.word->load(std::memory_order_acquire) != wait.seen) {
      return false;
    }
    cpu_pause();
  }
  const auto begin = Clock::now();
  {
    HostLockRelease released;
    wait.sleepers->fetch_add(1);
    futex_wait(wait.word, wait.seen, std::min<microseconds>(wait.patience, kSlice));
    wait.sleepers->fetch_sub(1);
  }
  if (may_spin) {
    // Spin longer if that would have saved this sleep, less if it would not.
    const bool short_sleep = Clock::now() - begin < kWorthSpinning;
    spin_limit_.store(short_sleep ? std::min(2 * limit, kMaxSpin) : std::max(limit / 2, kMinSpin));
  }
  return wait.word->load(std::memory_order_acquire) == wait.seen;
}

void Communicator::wait_until(
    Section& section,
    Advance advance,
    Missing missing,
    What what,
    milliseconds timeout,
    bool fail_on_timeout) {
  const auto begin = Clock::now();
  int64_t next_check_ms = kHealthInterval.count();
  bool thorough = false;
  while (true) {
    Operation::Wait wait;
    if (advance(wait, thorough)) {
      return;
    }
    if (!messages_->idle() && thorough) {
      messages_->progress();
    }
    if (messages_->queued()) {
      wait.patience = std::min<microseconds>(wait.patience, milliseconds(1));
    }
    section.unlock();
    try {
      throw_if_failed();
      // Right after an attempt that did not succeed: time that this process spent stopped, by a debugger say, must not
      // turn what the others have completed meanwhile into a timeout.
      const int64_t waited_ms = milliseconds_since(begin);
      if (waited_ms >= timeout.count()) {
        time_out(missing, what, timeout, fail_on_timeout);
      }
      if (waited_ms >= next_check_ms) {
        next_check_ms = waited_ms + kHealthInterval.count();
        check_health(missing, what);
      }
      thorough = sleep(wait);
      if (thorough) {
        check_interrupt();
        progress_all(this);
      }
    } catch (...) {
      section.lock();
      throw;
    }
    section.lock();
  }
}

void Communicator::progress_all(const Communicator* except) {
  std::vector<std::shared_ptr<Communicator>> others;
  {
    std::lock_guard<std::mutex> guard(registry().mutex);
    for (const auto& entry : registry().live) {
      if (auto communicator = entry.lock(); communicator != nullptr && communicator.get() != except) {
        others.push_back(std::move(communicator));
      }
    }
  }
  for (const auto& communicator : others) {
    std::vector<at::Tensor> tensors;
    if (std::unique_lock<std::mutex> guard(communicator->mutex_, std::try_to_lock); guard.owns_lock()) {
      if (!communicator->departed_ && communicator->control_.header().failure.load(std::memory_order_acquire) == 0) {
        communicator->progress(/*work=*/true);
      }
      tensors.swap(communicator->retired_tensors_);
    }
  }
}

// ---- Communicator: collectives --------------------------------------------------------------------------------------

void Communicator::progress(bool work) {
  for (const auto& operation : outstanding_) {
    if (operation->done()) {
      continue;
    }
    const uint32_t state = control_.slot(operation->sequence_).state.load(std::memory_order_acquire);
    if (Slot::reached(state, work ? Slot::ready(operation->sequence_) : Slot::done(operation->sequence_))) {
      Operation::Wait wait;
      operation->advance(wait, /*thorough=*/false);
    }
  }
  retire();
  if (!messages_->idle()) {
    messages_->progress();
  }
}

void Communicator::retire() {
  const uint64_t before = retired_;
  while (!outstanding_.empty() && outstanding_.front()->done() && outstanding_.front()->error_ == nullptr) {
    outstanding_.pop_front();
    ++retired_;
  }
  if (retired_ != before && !departed_) {
    control_.member(rank_).retired.store(retired_); // sequentially consistent, against the sleepers' count
    ControlHeader& header = control_.header();
    if (header.retire_sleepers.load() > 0) {
      header.retire_bell.fetch_add(1);
      futex_wake_all(&header.retire_bell);
    }
  }
}

bool Communicator::slot_free(uint64_t sequence) {
  if (sequence < retired_by_all_ + kSlots) {
    return true;
  }
  uint64_t lowest = UINT64_MAX;
  for (int r = 0; r < size(); ++r) {
    const Member& member = control_.member(r);
    if (member.departed.load(std::memory_order_acquire) == 0) {
      lowest = std::min(lowest, member.retired.load());
    }
  }
  retired_by_all_ = lowest;
  return sequence < retired_by_all_ + kSlots;
}

void Communicator::prepare_costs(Collective operation) {
  throw_if_unusable(); // a forked child does not have the control block
  control_.header().costs[static_cast<size_t>(operation)].prepare(fabric_ranks_, collective_name(operation));
}

void Communicator::prepare_message_costs() {
  throw_if_unusable();
  control_.header().costs[kCollectives].prepare(fabric_ranks_, "send");
}

void Communicator::time_slot(Slot& slot, const Exchange& exchange) {
  ControlHeader& header = control_.header();
  Picoseconds start = header.busy_until_ps;
  uint64_t nbytes = 0;
  for (int r = 0; r < size(); ++r) {
    start = std::max(start, exchange.post(r).ready_ps);
    nbytes = std::max(nbytes, exchange.post(r).message_nbytes);
  }
  const auto operation = static_cast<size_t>(exchange.post(rank_).operation);
  slot.start_ps = start;
  slot.end_ps = start + header.costs[operation].time_ps(static_cast<int64_t>(nbytes));
  header.busy_until_ps = slot.end_ps;
}

std::shared_ptr<Operation> Communicator::post(CollectiveCall&& call) {
  throw_if_unusable();
  auto operation = std::make_shared<CollectiveOperation>(*this, std::move(call));
  Section section(*this);
  throw_if_failed();
  progress(/*work=*/false);
  // As on one stream: a collective that uses what an earlier one writes comes after it.
  for (size_t i = 0; i < outstanding_.size(); ++i) {
    auto earlier = std::static_pointer_cast<CollectiveOperation>(outstanding_[i]);
    if (!earlier->done() && operation->overlaps(*earlier)) {
      section.unlock();
      earlier->finish();
      section.lock();
      i = static_cast<size_t>(-1); // the list may have changed
    }
  }
  operation->stage();
  if (!slot_free(next_sequence())) {
    wait_until(
        section,
        [this](Operation::Wait& wait, bool) {
          const ControlHeader& header = control_.header();
          wait.word = &header.retire_bell;
          wait.seen = header.retire_bell.load();
          wait.sleepers = &control_.header().retire_sleepers;
          progress(/*work=*/true);
          return slot_free(next_sequence());
        },
        [this] {
          std::vector<int> slow;
          for (int r = 0; r < size(); ++r) {
            if (r != rank_ && control_.member(r).retired.load() + kSlots <= next_sequence()) {
              slow.push_back(r);
            }
          }
          return slow;
        },
        [this] { return c10::str("collective #", next_sequence(), " (", kSlots, " ahead of the slowest rank)"); },
        operation->timeout_,
        /*fail_on_timeout=*/true);
  }

  const uint64_t sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
  operation->sequence_ = sequence;
  operation->publish(control_.post(sequence, rank_));
  outstanding_.push_back(operation);
  control_.member(rank_).cpu.store(sched_getcpu(), std::memory_order_relaxed);
  control_.member(rank_).posted.store(sequence + 1, std::memory_order_release);
  const uint32_t arrived = control_.slot(sequence).arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrived == static_cast<uint32_t>((sequence / kSlots + 1) * size())) {
    open_slot(sequence);
  }
  return operation;
}

void Communicator::open_slot(uint64_t sequence) {
  const Exchange exchange(control_, sequence, *fabric_, fabric_ranks_);
  if (auto problem = exchange.disagreement()) {
    fail(c10::str("neuron: collective #", sequence, " of group ", name_, ": ", *problem));
    throw_if_failed();
  }
  Slot& slot = control_.slot(sequence);
  time_slot(slot, exchange);
  const Post& post = exchange.post(rank_);
  if (post.in_slot) {
    if (post.operation == Collective::AllReduce) {
      exchange.reduce_payloads(slot.result, 0, post.output_nbytes);
    }
    finish_slot(slot, sequence);
    return;
  }
  uint64_t total = 0;
  for (int r = 0; r < size(); ++r) {
    total += exchange.range_nbytes(r);
  }
  const uint64_t traffic = total * (is_reduction(post.operation) ? 2 * size() : 2);
  if (traffic <= kSoloBytes) {
    for (int r = 0; r < size(); ++r) {
      exchange.execute(r, 0, exchange.range_nbytes(r));
    }
    finish_slot(slot, sequence);
    return;
  }
  uint64_t segments = 0;
  for (int r = 0; r < size(); ++r) {
    segments += (exchange.range_nbytes(r) + kSegmentBytes - 1) / kSegmentBytes;
    control_.ticket(sequence, r).next.store(0, std::memory_order_relaxed);
  }
  slot.segment_bytes = kSegmentBytes;
  slot.remaining.store(static_cast<uint32_t>(segments), std::memory_order_relaxed);
  slot.state.store(Slot::ready(sequence));
  if (slot.sleepers.load() > 0) {
    futex_wake_all(&slot.state);
  }
}

void Communicator::finish_slot(Slot& slot, uint64_t sequence) {
  slot.state.store(Slot::done(sequence));
  if (slot.sleepers.load() > 0) {
    futex_wake_all(&slot.state);
  }
}

bool Communicator::help(uint64_t sequence, bool thorough) {
  Slot& slot = control_.slot(sequence);
  const Exchange exchange(control_, sequence, *fabric_, fabric_ranks_);
  const uint64_t segment = slot.segment_bytes;
  // Each rank first writes the results that it alone, or first, will touch; then what others have left. A rank that is
  // about to run is left its range where cores are short: it would only find other pages of the same memory to touch.
  for (int i = 0; i < size(); ++i) {
    const int range = (rank_ + i) % size();
    if (i > 0 && !thorough && !fabric_->has_core_per_rank() &&
        control_.member(range).attending.load(std::memory_order_relaxed) == sequence + 1) {
      continue;
    }
    const uint64_t nbytes = exchange.range_nbytes(range);
    const auto segments = static_cast<uint32_t>((nbytes + segment - 1) / segment);
    auto& next = control_.ticket(sequence, range).next;
    uint32_t finished = 0;
    while (next.load(std::memory_order_relaxed) < segments) {
      const uint32_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= segments) {
        break;
      }
      exchange.execute(range, index * segment, std::min(nbytes, (index + 1) * segment));
      ++finished;
    }
    if (finished > 0 && slot.remaining.fetch_sub(finished, std::memory_order_acq_rel) == finished) {
      finish_slot(slot, sequence);
    }
  }
  return Slot::reached(slot.state.load(std::memory_order_acquire), Slot::done(sequence));
}

std::shared_ptr<Operation>
Communicator::send(const at::Tensor& tensor, Region region, int to, int tag, milliseconds timeout, Enqueued enqueued) {
  throw_if_unusable();
  Section section(*this);
  throw_if_failed();
  return messages_->send(tensor, region, to, tag, timeout, enqueued);
}

std::shared_ptr<Operation> Communicator::receive(
    const at::Tensor& tensor,
    Region region,
    int from,
    int tag,
    milliseconds timeout,
    Enqueued enqueued) {
  throw_if_unusable();
  Section section(*this);
  throw_if_failed();
  return messages_->receive(tensor, region, from, tag, timeout, enqueued);
}

} // namespace trn
