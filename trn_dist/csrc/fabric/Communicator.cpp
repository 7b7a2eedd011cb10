#include "fabric/Communicator.h"

#include "fabric/BlockReduction.h"
#include "fabric/CallSite.h"
#include "fabric/CollectiveOperation.h"
#include "fabric/Deadlock.h"
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
#include <map>
#include <new>
#include <sstream>
#include <thread>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr milliseconds kSlice{50}; // the longest sleep without a look around
constexpr milliseconds kHealthInterval{200};
constexpr milliseconds kFlush{2000}; // for what is on its way to other hosts when a group is destroyed, or has failed
constexpr size_t kSuspectsPerCheck = 16; // each costs a read of /proc
constexpr int kMinSpin = 64; // pauses, of 20 to 50 ns each
constexpr int kMaxSpin = 4096;
constexpr microseconds kWorthSpinning{100}; // a sleep and a wake-up take about 50 us
constexpr int kYields = 4;
// Yields that take longer than this have let something else run than ranks on their way to the same collective.
constexpr microseconds kShortYield{50};
constexpr microseconds kYieldPerRank{10};
constexpr int kMinYieldBackoff = 32; // waits
constexpr int kMaxYieldBackoff = 256;
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

uint64_t random_number() {
  uint64_t number = 0;
  fill_random(&number, sizeof(number));
  return number;
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
      spin_limit_(kMaxSpin),
      yield_backoff_(kMinYieldBackoff) {}

std::shared_ptr<Communicator> Communicator::create(
    std::shared_ptr<Fabric> fabric,
    std::vector<int> fabric_ranks,
    int rank,
    std::string name,
    const c10::intrusive_ptr<c10d::Store>& store,
    milliseconds timeout,
    const Communicator* for_group_of,
    VirtualGroup virtual_group) {
  std::shared_ptr<Communicator> communicator(
      new Communicator(std::move(fabric), std::move(fabric_ranks), rank, std::move(name)));
  communicator->virtual_ranks_ = std::move(virtual_group.ranks);
  communicator->group_ranks_ = std::move(virtual_group.live);
  if (for_group_of != nullptr) {
    const std::vector<int>& group = for_group_of->fabric_ranks_;
    for (const int r : communicator->fabric_ranks_) {
      communicator->group_ranks_.push_back(static_cast<int>(std::find(group.begin(), group.end(), r) - group.begin()));
    }
  }
  communicator->attach(communicator->fabric_->own_part(store), timeout);
  communicator->enlist();
  if (!communicator->remote_hosts_.empty()) {
    if (for_group_of == nullptr) {
      communicator->blocks_ =
          BlockReduction::create(*communicator, communicator->fabric_, communicator->fabric_ranks_, store, timeout);
    }
    Network& network = *communicator->fabric_->network();
    network.enter(communicator->group_id_, communicator);
    for (int r = 0; r < communicator->size(); ++r) {
      if (!communicator->is_local(r) &&
          communicator->arena_ranks_[r] == communicator->fabric_ranks_[communicator->rank()]) {
        network.listen(communicator->fabric_ranks_[r]);
      }
    }
  }
  return communicator;
}

void Communicator::enlist() {
  offer_private_memory();
  messages_ = std::make_unique<PointToPoint>(*this);
  name_text_ = intern_call_site(name_);
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
  registry().live.push_back(weak_from_this());
}

// On every host, the i-th of the group's ranks there stands in for the i-th of each other host, and so on round.
void Communicator::assign_proxies() {
  const std::vector<int>& host_of = fabric_->hosts().host_of;
  std::map<int, std::vector<int>> members; // by host
  for (int r = 0; r < static_cast<int>(fabric_ranks_.size()); ++r) {
    members[host_of[fabric_ranks_[r]]].push_back(r);
  }
  const int own_host = host_of[fabric_ranks_[rank_]];
  const std::vector<int>& own = members[own_host];
  const auto place = static_cast<size_t>(std::find(own.begin(), own.end(), rank_) - own.begin());
  arena_ranks_ = fabric_ranks_;
  for (const auto& [host, ranks] : members) {
    if (host == own_host) {
      continue;
    }
    remote_hosts_.push_back({ranks, ranks[place % ranks.size()]});
    for (size_t i = 0; i < ranks.size(); ++i) {
      arena_ranks_[ranks[i]] = fabric_ranks_[own[i % own.size()]];
    }
  }
}

int Communicator::local_leader() const {
  int leader = 0;
  while (!is_local(leader)) {
    ++leader;
  }
  return leader;
}

void Communicator::attach(const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout) {
  assign_proxies();
  const int leader = local_leader();
  const std::string key =
      remote_hosts_.empty() ? kStoreKey : c10::str(kStoreKey, "/", fabric_->hosts().host_of[fabric_ranks_[rank_]]);
  if (!remote_hosts_.empty()) {
    const std::string group_key = "trn/group";
    if (rank_ == 0) {
      group_id_ = random_number();
      const auto* bytes = reinterpret_cast<const uint8_t*>(&group_id_);
      store->set(group_key, std::vector<uint8_t>(bytes, bytes + sizeof(group_id_)));
    } else {
      store->wait({group_key}, timeout);
      const std::vector<uint8_t> raw = store->get(group_key);
      TORCH_CHECK_WITH(
          DistBackendError, raw.size() == sizeof(group_id_), "neuron: group ", name_, " has no valid id in the store");
      std::memcpy(&group_id_, raw.data(), sizeof(group_id_));
    }
  }
  if (rank_ == leader) {
    const Locator locator = found_block();
    if (fabric_ranks_.size() > 1) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(&locator);
      store->set(key, std::vector<uint8_t>(bytes, bytes + sizeof(locator)));
    }
    return;
  }
  store->wait({key}, timeout);
  const std::vector<uint8_t> raw = store->get(key);
  Locator locator{UINT64_MAX, 0};
  if (raw.size() == sizeof(locator)) {
    std::memcpy(&locator, raw.data(), sizeof(locator));
  }
  join_block(locator);
}

Communicator::Locator Communicator::found_block() {
  const int size = static_cast<int>(fabric_ranks_.size());
  const uint64_t nbytes = ControlBlock::nbytes(size);
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
  header.nonce = random_number();
  for (int r = 0; r < size; ++r) {
    control_.member(r).cpu.store(-1, std::memory_order_relaxed);
    control_.member(r).fabric_rank.store(fabric_ranks_[r], std::memory_order_relaxed);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return {own_control_->offset(), header.nonce};
}

void Communicator::join_block(const Locator& locator) {
  const int size = static_cast<int>(fabric_ranks_.size());
  const uint64_t nbytes = ControlBlock::nbytes(size);
  const int leader = local_leader();
  const Fabric::Peer& owner = peer(leader);
  bool valid = locator.offset % 64 == 0 && locator.offset <= owner.size && nbytes <= owner.size - locator.offset;
  if (valid) {
    control_ = ControlBlock(owner.base + locator.offset, size);
    const ControlHeader& header = control_.header();
    valid =
        header.magic == kControlMagic && header.nonce == locator.nonce && header.size == static_cast<uint64_t>(size);
  }
  TORCH_CHECK_WITH(
      DistBackendError,
      valid,
      "neuron: what ",
      rank_label(leader),
      " published for group ",
      name_,
      " is not the control block of a group of ",
      size,
      " ranks; was the group created with the same ranks everywhere?");
}

std::shared_ptr<Communicator>
Communicator::shrink(const std::vector<int>& ranks, std::string name, milliseconds timeout) {
  throw_if_unusable();
  TORCH_CHECK_NOT_IMPLEMENTED(
      remote_hosts_.empty(),
      "neuron: group ",
      name_,
      " has ranks on several hosts and cannot be shrunk yet: make a new one");
  std::vector<int> places;
  for (const int r : ranks) {
    places.push_back(fabric_ranks_[r]);
  }
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  TORCH_CHECK_VALUE(self != ranks.end(), "neuron: a rank that is excluded cannot shrink group ", name_);
  std::shared_ptr<Communicator> communicator(
      new Communicator(fabric_, std::move(places), static_cast<int>(self - ranks.begin()), std::move(name)));
  communicator->assign_proxies();
  const uint64_t count = shrinks_.fetch_add(1) + 1;
  Member& leader = control_.member(ranks[0]);
  if (communicator->rank_ == 0) {
    const Locator locator = communicator->found_block();
    leader.successor_offset.store(locator.offset, std::memory_order_relaxed);
    leader.successor_nonce.store(locator.nonce, std::memory_order_relaxed);
    leader.successor.store(count, std::memory_order_release);
  } else {
    const auto begin = Clock::now();
    while (leader.successor.load(std::memory_order_acquire) < count) {
      TORCH_CHECK_WITH(
          DistBackendError,
          fabric_->alive(fabric_ranks_[ranks[0]]) && milliseconds_since(begin) < timeout.count(),
          "neuron: group ",
          name_,
          " cannot shrink: ",
          rank_label(ranks[0]),
          ", which is to lead the smaller group, has died or did not call shrink_group within ",
          in_seconds(timeout));
      check_interrupt();
      HostLockRelease released;
      std::this_thread::sleep_for(milliseconds(1));
    }
    communicator->join_block({leader.successor_offset.load(), leader.successor_nonce.load()});
  }
  communicator->enlist();
  return communicator;
}

// Lets the peers find out whether they may use this process's private memory.
void Communicator::offer_private_memory() {
  mark_ = std::make_unique<uint64_t>(0);
  if (getrandom(mark_.get(), sizeof(*mark_), 0) != sizeof(*mark_)) {
    return;
  }
  Member& member = control_.member(rank_);
  member.mark.store(*mark_);
  member.mark_address.store(reinterpret_cast<uint64_t>(mark_.get()), std::memory_order_release);
}

Communicator::~Communicator() = default;

void Communicator::depart() {
  if (Arena::in_bad_fork()) {
    return;
  }
  if (blocks_ != nullptr && !departed_) {
    blocks_->close(failure().empty() ? kFlush : milliseconds(0));
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
        const std::string reason = failure(); // aborted by another thread, say
        operation->complete(
            std::make_exception_ptr(C10_BUILD_ERROR(
                DistBackendError,
                !reason.empty()
                    ? reason
                    : c10::str("neuron: ", operation->describe(), ": group ", name_, " was destroyed before"))));
      }
      dropped.push_back(operation);
    }
    outstanding_.clear();
    departed_ = true;
    ship(FrameKind::Departure, "");
    control_.member(rank_).departed.store(1, std::memory_order_release);
    control_.header().departed.fetch_add(1, std::memory_order_acq_rel);
    wake_everybody(control_);
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
  const int place = fabric_ranks_[rank];
  rank = group_rank(rank);
  const int in_job = fabric_->job_rank(place);
  std::string label = c10::str("rank ", rank);
  if (in_job != rank) {
    label += c10::str(" (", in_job, " in the job)");
  }
  if (fabric_->network() != nullptr) {
    label += " on " + fabric_->hosts().host(place).label;
  }
  return label;
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

void Communicator::report_failure() {
  if (Arena::in_bad_fork() || control_.header().failure.load(std::memory_order_acquire) == 0) {
    return;
  }
  if (!remote_hosts_.empty()) {
    tell_other_hosts(failure());
    fabric_->network()->flush(kFlush);
  }
  if (host_hooks.on_failure != nullptr) {
    host_hooks.on_failure();
  }
}

void Communicator::throw_if_failed() const {
  if (control_.header().failure.load(std::memory_order_acquire) != 0) {
    TORCH_CHECK_WITH(DistBackendError, false, failure());
  }
  TORCH_CHECK_WITH(DistBackendError, !departed_, "neuron: group ", name_, " has been destroyed on this rank");
}

// Each rank by itself, although one would do: this rank may end once its program has the error, and whoever reads its stream
// must find the reason there before its end. report_failure() waits until it has been read.
void Communicator::tell_other_hosts(const std::string& reason) {
  if (!remote_hosts_.empty() && !told_other_hosts_.exchange(true, std::memory_order_acq_rel)) {
    // Twice: Gloo sends what its receiver asks for, and that asks for the second once it has dealt with the first.
    ship(FrameKind::Failure, reason.substr(0, kErrorBytes));
    ship(FrameKind::Failure, reason.substr(0, kErrorBytes));
  }
}

void Communicator::fail(const std::string& reason) {
  if (!fail(control_, reason)) {
    return;
  }
  tell_other_hosts(reason);
  if (blocks_ != nullptr) {
    blocks_->fail(reason);
  }
}

bool Communicator::fail(const ControlBlock& control, const std::string& reason) {
  ControlHeader& header = control.header();
  uint32_t none = 0;
  if (header.failure.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    const size_t n = std::min(reason.size(), kErrorBytes - 1);
    std::memcpy(header.error, reason.data(), n);
    header.error[n] = 0;
    header.failure.store(2, std::memory_order_release);
    futex_wake_all(&header.failure);
  }
  wake_everybody(control);
  return none == 0;
}

void Communicator::wake_everybody(const ControlBlock& control) {
  for (uint64_t s = 0; s < kSlots; ++s) {
    if (control.slot(s).sleepers.load() > 0) {
      futex_wake_all(&control.slot(s).state);
    }
  }
  for (int r = 0; r < control.size(); ++r) {
    Member& member = control.member(r);
    member.doorbell.fetch_add(1);
    if (member.doorbell_sleepers.load() > 0) {
      futex_wake_all(&member.doorbell);
    }
  }
  ControlHeader& header = control.header();
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
    const bool lost = control_.member(suspect).lost.load(std::memory_order_acquire) != 0;
    // For a rank on another host, this looks at its proxy.
    if (!departed && !lost && fabric_->alive(arena_ranks_[suspect])) {
      continue;
    }
    // It may have done its part before it went.
    const std::vector<int> still = missing();
    if (std::find(still.begin(), still.end(), suspect) == still.end()) {
      continue;
    }
    std::string fate;
    int culprit = suspect;
    if (!departed && !lost) { // of a rank on another host, the proxy
      culprit = static_cast<int>(
          std::find(fabric_ranks_.begin(), fabric_ranks_.end(), arena_ranks_[suspect]) - fabric_ranks_.begin());
    }
    if (departed) {
      fate = "has left the group (destroy_process_group)";
    } else if (lost) {
      fate = "has died, or the connection to its host has broken";
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
            rank_label(culprit),
            " ",
            fate,
            ". Noticed by ",
            rank_label(rank_),
            "."));
    throw_if_failed();
  }
}

void Communicator::check_deadlock(BlockedScope& blocked, What what, DescribeWait describe_wait, uint64_t site) {
  // First, so that nobody takes this rank for blocked by an older count.
  publish_threads(host_hooks.count_threads != nullptr ? host_hooks.count_threads() : 1);
  if (!blocked.entered()) {
    WaitRecord record;
    describe_wait(record);
    record.rank = rank_;
    record.fabric = fabric_->id();
    record.leader = fabric_ranks_[local_leader()];
    record.size = size();
    record.control_offset = static_cast<uint64_t>(control_.base() - peer(local_leader()).base);
    record.nonce = control_.header().nonce;
    record.text = c10::str(what(), " of group ", name_, call_site_text(peer(rank_), site));
    blocked.enter(record);
  }
  if (const auto deadlock = find_deadlock(*fabric_)) {
    for (const ControlBlock& group : deadlock->groups) {
      fail(group, deadlock->text);
    }
    throw_if_failed();
  }
}

const Operation* Communicator::oldest_before(const Operation& operation) const {
  const auto oldest =
      std::find_if(outstanding_.begin(), outstanding_.end(), [](const auto& other) { return !other->done(); });
  if (oldest == outstanding_.end() || oldest->get() == &operation) {
    return nullptr;
  }
  const bool later =
      std::any_of(oldest, outstanding_.end(), [&](const auto& other) { return other.get() == &operation; });
  return later ? oldest->get() : nullptr;
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
           << trn::describe(control_.post(posted - 1, absent[i]))
           << call_site_text(peer(absent[i]), control_.post(posted - 1, absent[i]).site);
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
  control_.member(rank_).cpu.store(cpu, std::memory_order_relaxed);
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && control_.member(r).cpu.load(std::memory_order_relaxed) == cpu) {
      return true;
    }
  }
  return false;
}

bool Communicator::give_way(const Operation::Wait& wait) {
  if (yields_to_skip_.load(std::memory_order_relaxed) > 0) {
    yields_to_skip_.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  const auto begin = Clock::now();
  bool changed = false;
  {
    HostLockRelease released;
    for (int i = 0; i < kYields && !changed; ++i) {
      sched_yield();
      changed = wait.word->load(std::memory_order_acquire) != wait.seen;
    }
  }
  const int backoff = yield_backoff_.load(std::memory_order_relaxed);
  if (Clock::now() - begin > kShortYield + size() * kYieldPerRank) {
    yields_to_skip_.store(backoff, std::memory_order_relaxed);
    yield_backoff_.store(std::min(2 * backoff, kMaxYieldBackoff), std::memory_order_relaxed);
  } else if (changed && backoff > kMinYieldBackoff) {
    yield_backoff_.store(backoff / 2, std::memory_order_relaxed);
  }
  return changed;
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
  if (!may_spin && give_way(wait)) {
    return false;
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
    DescribeWait describe_wait,
    uint64_t site,
    milliseconds timeout,
    bool fail_on_timeout) {
  const auto begin = Clock::now();
  int64_t next_check_ms = kHealthInterval.count();
  int64_t last_look_ms = 0;
  int64_t paused_ms = 0; // of the time since `begin`, in which a debugger held a rank
  BlockedScope blocked;
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
      if (waited_ms >= next_check_ms || waited_ms - paused_ms >= timeout.count()) {
        if (fabric_->paused()) {
          paused_ms += waited_ms - last_look_ms;
        }
        last_look_ms = waited_ms;
      }
      if (waited_ms - paused_ms >= timeout.count()) {
        time_out(missing, what, timeout, fail_on_timeout);
      }
      if (waited_ms >= next_check_ms) {
        next_check_ms = waited_ms + kHealthInterval.count();
        check_health(missing, what);
        check_deadlock(blocked, what, describe_wait, site);
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
  if (!remote_hosts_.empty()) {
    enter_arrivals();
  }
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
    // A rank on another host does not look at this slot.
    if (is_local(r) && member.departed.load(std::memory_order_acquire) == 0) {
      lowest = std::min(lowest, member.retired.load());
    }
  }
  retired_by_all_ = lowest;
  return sequence < retired_by_all_ + kSlots;
}

void Communicator::prepare_costs(Collective operation) {
  throw_if_unusable(); // a forked child does not have the control block
  control_.header().costs[static_cast<size_t>(operation)].prepare(job_ranks(), collective_name(operation));
}

void Communicator::prepare_message_costs() {
  throw_if_unusable();
  control_.header().costs[kCollectives].prepare(job_ranks(), "send");
}

void Communicator::time_slot(Slot& slot, const Exchange& exchange) {
  if (!group_ranks_.empty() && virtual_ranks_.empty()) {
    return;
  }
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
            if (r != rank_ && is_local(r) && control_.member(r).retired.load() + kSlots <= next_sequence()) {
              slow.push_back(r);
            }
          }
          return slow;
        },
        [this] { return c10::str("collective #", next_sequence(), " (", kSlots, " ahead of the slowest rank)"); },
        [this](WaitRecord& record) {
          record.kind = WaitKind::Slot;
          record.sequence = next_sequence();
        },
        operation->enqueued_.call_site,
        operation->timeout_,
        /*fail_on_timeout=*/true);
  }

  const uint64_t sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
  operation->sequence_ = sequence;
  operation->publish(control_.post(sequence, rank_));
  outstanding_.push_back(operation);
  // Before anybody here can overwrite the inputs.
  ship(*operation, control_.post(sequence, rank_));
  control_.member(rank_).cpu.store(sched_getcpu(), std::memory_order_relaxed);
  control_.member(rank_).posted.store(sequence + 1, std::memory_order_release);
  if (operation->in_blocks()) {
    blocks_->enqueue(operation);
  }
  arrive(sequence);
  return operation;
}

void Communicator::arrive(uint64_t sequence) {
  const uint32_t arrived = control_.slot(sequence).arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrived == static_cast<uint32_t>((sequence / kSlots + 1) * size())) {
    open_slot(sequence);
  }
}

Exchange Communicator::read_posts(uint64_t sequence) const {
  return Exchange(control_, sequence, rank_, *fabric_, arena_ranks_, private_memory_);
}

bool Communicator::private_memory_shared() {
  if (private_memory_shared_) {
    return true;
  }
  if (!remote_hosts_.empty()) {
    return false; // what goes to other hosts is read in the arena
  }
  const auto all = [this](auto&& condition) {
    for (int r = 0; r < size(); ++r) {
      if (!condition(r, control_.member(r))) {
        return false;
      }
    }
    return true;
  };
  if (!private_memory_tried_) {
    if (!all([](int, const Member& member) { return member.mark_address.load(std::memory_order_acquire) != 0; })) {
      return false;
    }
    private_memory_tried_ = true;
    const bool reached = all([this](int r, const Member& member) {
      private_memory_.emplace_back(peer(r).pid, member.mark_address.load(), member.mark.load());
      return r == rank_ || private_memory_.back().accessible();
    });
    control_.member(rank_).reaches_all.store(reached ? 1 : 0, std::memory_order_release);
  }
  private_memory_shared_ =
      all([](int, const Member& member) { return member.reaches_all.load(std::memory_order_acquire) != 0; });
  return private_memory_shared_;
}

void Communicator::open_slot(uint64_t sequence) {
  const Exchange exchange = read_posts(sequence);
  if (auto problem = exchange.disagreement(group_ranks_)) {
    fail(c10::str("neuron: collective #", sequence, " of group ", name_, ": ", *problem));
    throw_if_failed();
  }
  Slot& slot = control_.slot(sequence);
  time_slot(slot, exchange);
  const Post& post = exchange.post(rank_);
  if (post.in_blocks) {
    finish_slot(slot, sequence);
    return;
  }
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
      carry_out(exchange, r, 0, exchange.range_nbytes(r));
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

// Others wait for what this rank has taken upon itself, so that they are told when it cannot do it.
void Communicator::carry_out(const Exchange& exchange, int range, uint64_t begin, uint64_t end) {
  try {
    exchange.execute(range, begin, end);
  } catch (const c10::Error& error) {
    fail(c10::str(error.what_without_backtrace(), " Group ", name_, ", noticed by ", rank_label(rank_), "."));
    throw_if_failed();
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
  const Exchange exchange = read_posts(sequence);
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
      carry_out(exchange, range, index * segment, std::min(nbytes, (index + 1) * segment));
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
  control_.member(rank_).cpu.store(sched_getcpu(), std::memory_order_relaxed);
  return messages_->receive(tensor, region, from, tag, timeout, enqueued);
}

} // namespace trn
