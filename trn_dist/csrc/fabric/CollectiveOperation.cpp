#include "fabric/CollectiveOperation.h"

#include "device/TimingOnly.h"
#include "fabric/BlockReduction.h"
#include "fabric/FlightRecorder.h"
#include "fabric/Futex.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace trn {

namespace {

constexpr uint64_t kPrivateBytes = 16 << 10;

uint64_t total(const c10::SmallVector<Region, 4>& regions) {
  uint64_t sum = 0;
  for (const Region& region : regions) {
    sum += region.nbytes;
  }
  return sum;
}

// FNV-1a over numbers: equal calls give equal values, and different ones practically never do.
class Hash {
 public:
  void add(uint64_t number) {
    for (int i = 0; i < 8; ++i) {
      value_ = (value_ ^ (number >> (8 * i) & 0xFF)) * 0x100000001b3ULL;
    }
  }
  uint64_t value() const {
    return value_;
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

bool overlap(const Region& a, const Region& b) {
  return a.nbytes > 0 && b.nbytes > 0 && a.data < b.data + b.nbytes && b.data < a.data + a.nbytes;
}

bool overlap(const c10::SmallVector<Region, 4>& left, const c10::SmallVector<Region, 4>& right) {
  return std::any_of(left.begin(), left.end(), [&](const Region& a) {
    return std::any_of(right.begin(), right.end(), [&](const Region& b) { return overlap(a, b); });
  });
}

} // namespace

CollectiveOperation::CollectiveOperation(Communicator& communicator, CollectiveCall&& call)
    : Operation(communicator), call_(std::move(call)) {
  tensors_ = std::move(call_.tensors);
  timeout_ = call_.timeout;
  enqueued_ = call_.enqueued;
  name_ = collective_name(call_.operation);
  message_nbytes_ = std::max({input_nbytes(), output_nbytes(), call_.virtual_nbytes});
  in_blocks_ = communicator.blocks_ != nullptr && BlockReduction::takes(call_);
  in_slot_ = !in_blocks_ && travels_in_slot();
}

std::string CollectiveOperation::describe() const {
  return c10::str(call_.monitored ? "monitored_barrier" : collective_name(call_.operation), " #", sequence_);
}

bool CollectiveOperation::overlaps(const CollectiveOperation& other) const {
  return overlap(call_.outputs, other.call_.outputs) || overlap(call_.outputs, other.call_.inputs) ||
      overlap(call_.inputs, other.call_.outputs);
}

uint64_t CollectiveOperation::input_nbytes() const {
  return total(call_.inputs);
}

uint64_t CollectiveOperation::output_nbytes() const {
  return total(call_.outputs);
}

// The sizes that all ranks must see alike. Both forms of a call, the list and the one tensor, give the same value.
uint64_t CollectiveOperation::agreement() const {
  const auto size = static_cast<uint64_t>(communicator_->size());
  Hash hash;
  const auto add_parts = [&](const c10::SmallVector<Region, 4>& regions, bool chunked) {
    hash.add(chunked ? regions.size() * size : regions.size());
    for (const Region& region : regions) {
      for (uint64_t i = 0; i < (chunked ? size : 1); ++i) {
        hash.add(chunked ? region.nbytes / size : region.nbytes);
      }
    }
  };
  const bool at_root = call_.root == communicator_->rank();
  const bool same_everywhere = !has_root(call_.operation) && call_.operation != Collective::AllToAll;
  hash.add(same_everywhere ? call_.virtual_nbytes : 0);
  switch (call_.operation) {
    case Collective::AllReduce:
    case Collective::Reduce:
      add_parts(call_.inputs, false);
      break;
    case Collective::Broadcast:
      add_parts(at_root ? call_.inputs : call_.outputs, false);
      break;
    case Collective::AllGather:
      add_parts(call_.outputs, call_.chunked_outputs);
      break;
    case Collective::ReduceScatter:
      add_parts(call_.inputs, call_.chunked_inputs);
      break;
    case Collective::Gather:
      add_parts(call_.inputs, false);
      break;
    case Collective::Scatter:
      add_parts(call_.outputs, false);
      break;
    case Collective::Barrier:
    case Collective::AllToAll: // its splits may differ; Exchange compares them one by one
      break;
  }
  return hash.value();
}

// Decided by sizes that all ranks see alike, so all decide the same.
bool CollectiveOperation::travels_in_slot() const {
  const auto size = static_cast<uint64_t>(communicator_->size());
  const auto equal_parts = [](const c10::SmallVector<Region, 4>& regions) {
    return std::all_of(
        regions.begin(), regions.end(), [&](const Region& region) { return region.nbytes == regions[0].nbytes; });
  };
  if (call_.inputs.empty() && call_.outputs.empty()) {
    return true; // a barrier, or [Note: Live ranks]
  }
  switch (call_.operation) {
    case Collective::AllReduce:
    case Collective::Reduce:
      return input_nbytes() <= kInlineBytes;
    case Collective::Broadcast:
      return input_nbytes() + output_nbytes() <= kInlineBytes; // one of them is empty
    case Collective::AllGather:
      return call_.inputs.size() == 1 && equal_parts(call_.outputs) && output_nbytes() / size <= kInlineBytes;
    case Collective::ReduceScatter:
      return call_.outputs.size() == 1 && equal_parts(call_.inputs) && input_nbytes() <= kInlineBytes;
    case Collective::Gather:
      return input_nbytes() <= kInlineBytes;
    case Collective::Scatter:
      return output_nbytes() * size <= kInlineBytes;
    default:
      return false; // all_to_all: uneven splits are known only pairwise
  }
}

void CollectiveOperation::stage() {
  if (in_slot_ || in_blocks_) {
    return;
  }
  Arena& arena = Arena::get();
  spans_.reserve(call_.inputs.size() + call_.outputs.size());
  staged_.reserve(call_.inputs.size() + call_.outputs.size());
  const auto in_arena = [&](const Region& region) { return region.layout == nullptr && arena.contains(region.data); };
  // Of a small tensor a copy is cheaper than the kernel's help.
  const bool shared = message_nbytes_ >= kPrivateBytes && communicator_->private_memory_shared();
  const auto in_private_memory = [&](const Region& region) {
    return shared && region.layout == nullptr && region.nbytes >= kPrivateBytes;
  };
  // An all_to_all in place would overwrite what others have yet to read.
  const bool copy_inputs = call_.operation == Collective::AllToAll && overlap(call_.inputs, call_.outputs);
  std::vector<uint64_t> staged_inputs(call_.inputs.size(), kNoOffset); // offset, where there is a copy
  for (size_t i = 0; i < call_.inputs.size(); ++i) {
    const Region& region = call_.inputs[i];
    if (region.nbytes == 0) {
      spans_.push_back({0, 0});
    } else if (in_arena(region) && !copy_inputs) {
      spans_.push_back({arena.offset_of(region.data), region.nbytes});
    } else if (!copy_inputs && in_private_memory(region)) {
      spans_.push_back({reinterpret_cast<uint64_t>(region.data) | kPrivate, region.nbytes});
    } else {
      staged_.emplace_back(region.nbytes);
      region.read(staged_.back().data());
      staged_inputs[i] = staged_.back().offset();
      spans_.push_back({staged_.back().offset(), region.nbytes});
    }
  }
  for (size_t i = 0; i < call_.outputs.size(); ++i) {
    const Region& region = call_.outputs[i];
    if (region.nbytes == 0) {
      spans_.push_back({0, 0});
      continue;
    }
    if (in_arena(region)) {
      spans_.push_back({arena.offset_of(region.data), region.nbytes});
      continue;
    }
    if (in_private_memory(region)) {
      spans_.push_back({reinterpret_cast<uint64_t>(region.data) | kPrivate, region.nbytes});
      continue;
    }
    uint64_t offset = 0;
    if (call_.operation == Collective::AllReduce && staged_inputs[i] != kNoOffset &&
        call_.inputs[i].data == region.data) {
      offset = staged_inputs[i]; // reduced in place
    } else {
      staged_.emplace_back(region.nbytes);
      offset = staged_.back().offset();
    }
    spans_.push_back({offset, region.nbytes});
    copies_out_.emplace_back(region, arena.base() + offset);
  }
  if (spans_.size() > kInlineSpans) {
    span_table_.emplace_back(spans_.size() * sizeof(Span));
    std::memcpy(span_table_.back().data(), spans_.data(), spans_.size() * sizeof(Span));
  }
}

std::pair<uint64_t, uint64_t> CollectiveOperation::needed_by(size_t input, const std::vector<int>& ranks) const {
  const uint64_t nbytes = call_.inputs[input].nbytes;
  const auto here = [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
  switch (call_.operation) {
    case Collective::Reduce:
    case Collective::Gather:
      return {0, here(call_.root) ? nbytes : 0};
    case Collective::Scatter:
    case Collective::AllToAll:
    case Collective::ReduceScatter: {
      const auto size = static_cast<uint64_t>(communicator_->size());
      if (!call_.chunked_inputs) {
        return {0, here(static_cast<int>(input % size)) ? nbytes : 0};
      }
      const auto [first, last] = std::minmax_element(ranks.begin(), ranks.end());
      return {nbytes / size * *first, nbytes / size * (*last + 1)};
    }
    default:
      return {0, nbytes};
  }
}

void CollectiveOperation::publish(Post& post) {
  post.operation = call_.operation;
  post.dtype = call_.dtype;
  post.reduction = call_.reduction;
  post.away = false;
  post.in_blocks = in_blocks_;
  post.in_slot = in_slot_;
  post.root = call_.root;
  post.agreement = agreement();
  post.factor = call_.factor;
  post.output_nbytes = output_nbytes();
  post.message_nbytes = message_nbytes_;
  post.has_numbers = call_.has_numbers;
  post.ready_ps = enqueued_.ready_ps;
  trace_sequence_ = sequence_;
  describe_transfer(RecordedTransfer::Collective);
  post.num_inputs = static_cast<uint32_t>(call_.inputs.size());
  post.num_outputs = static_cast<uint32_t>(call_.outputs.size());
  post.chunked_inputs = call_.chunked_inputs;
  post.chunked_outputs = call_.chunked_outputs;
  post.ndim = static_cast<uint8_t>(std::min<size_t>(call_.shape.size(), kMaxShape + 1));
  std::copy_n(call_.shape.begin(), std::min<size_t>(call_.shape.size(), kMaxShape), post.shape);
  post.site = enqueued_.call_site;
  post.spans_offset = kNoOffset;
  FlightRecord record;
  record.sequence = sequence_;
  record.operation = static_cast<uint64_t>(call_.operation);
  record.chunked = call_.chunked_inputs || call_.chunked_outputs;
  record.dtype = static_cast<uint64_t>(call_.dtype);
  record.input_nbytes = input_nbytes();
  record.output_nbytes = post.output_nbytes;
  record.ndim = post.ndim;
  std::copy_n(post.shape, kMaxShape, record.shape.begin());
  record_in_flight(record);
  if (in_slot_) {
    std::byte* at = post.payload;
    // What does not fit is a call that disagrees with the others' (and is about to be refused).
    for (const Region& region : call_.inputs) {
      if (region.nbytes <= static_cast<uint64_t>(post.payload + kInlineBytes - at)) {
        region.read(at);
        at += region.nbytes;
      }
    }
    return;
  }
  if (in_blocks_) {
    return;
  }
  if (span_table_.empty()) {
    std::copy(spans_.begin(), spans_.end(), post.spans);
  } else {
    post.spans_offset = span_table_.back().offset();
  }
}

bool CollectiveOperation::advance(Wait& wait, bool thorough) {
  Slot& slot = communicator_->control_.slot(sequence_);
  uint32_t state = slot.state.load(std::memory_order_acquire);
  if (!Slot::reached(state, Slot::done(sequence_)) && Slot::reached(state, Slot::ready(sequence_))) {
    if (communicator_->help(sequence_, thorough)) {
      state = Slot::done(sequence_);
    } else {
      wait.patience = std::chrono::milliseconds(2); // for the ranks whose ranges were left to them
    }
  }
  if (Slot::reached(state, Slot::done(sequence_)) && in_blocks_) {
    wait.word = &carried_out_;
    wait.seen = carried_out_.load(std::memory_order_acquire);
    wait.sleepers = &sleepers_;
    return done();
  }
  if (Slot::reached(state, Slot::done(sequence_))) {
    take_result();
    times_ = {enqueued_.ready_ps, slot.start_ps, slot.end_ps};
    complete();
    return true;
  }
  wait.word = &slot.state;
  wait.seen = state;
  wait.sleepers = &slot.sleepers;
  return false;
}

void CollectiveOperation::carry_out(const std::function<void(const CollectiveCall&)>& reduce) {
  Slot& slot = communicator_->control_.slot(sequence_);
  std::exception_ptr error;
  try {
    {
      Communicator::Section section(*communicator_);
      communicator_->wait_until(
          section,
          [&](Wait& wait, bool) {
            wait.word = &slot.state;
            wait.seen = slot.state.load(std::memory_order_acquire);
            wait.sleepers = &slot.sleepers;
            return done() || Slot::reached(wait.seen, Slot::done(sequence_));
          },
          [this] { return missing(); },
          [this] { return describe(); },
          [](WaitRecord&) {}, // not one of the program's threads
          enqueued_.call_site,
          timeout_,
          /*fail_on_timeout=*/true);
      times_ = {enqueued_.ready_ps, slot.start_ps, slot.end_ps};
    }
    if (!done()) {
      reduce(call_);
    }
  } catch (const c10::Error& problem) {
    communicator_->fail(
        c10::str("neuron: ", describe(), " of group ", communicator_->name(), ": ", problem.what_without_backtrace()));
    error = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, communicator_->failure()));
  }
  {
    Communicator::Section section(*communicator_);
    complete(error);
  }
  carried_out_.store(1, std::memory_order_release);
  futex_wake_all(&carried_out_);
}

void CollectiveOperation::take_result() {
  if (in_slot_) {
    take_from_slot();
  }
  for (const auto& [region, staged] : copies_out_) {
    region.write(staged);
  }
  staged_.clear();
  span_table_.clear();
  if (timing_only() && call_.operation == Collective::Broadcast && !call_.outputs.empty()) {
    const bool has_numbers = communicator_->control_.post(sequence_, call_.root).has_numbers;
    for (const at::Tensor& tensor : tensors_) {
      if (tensor.is_privateuseone()) {
        set_known(tensor, has_numbers && may_become_known(tensor));
      }
    }
  }
}

void CollectiveOperation::take_from_slot() {
  if (call_.operation == Collective::Barrier || output_nbytes() == 0) {
    return;
  }
  const int size = communicator_->size();
  const int rank = communicator_->rank();
  // A payload's bytes, spread over the outputs in order.
  const auto spread = [&](const std::byte* source) {
    for (const Region& region : call_.outputs) {
      region.write(source);
      source += region.nbytes;
    }
  };
  if (call_.operation == Collective::AllReduce) {
    spread(communicator_->control_.slot(sequence_).result);
    return;
  }
  const Exchange exchange = communicator_->read_posts(sequence_);
  switch (call_.operation) {
    case Collective::Reduce: {
      alignas(64) std::byte result[kInlineBytes];
      exchange.reduce_payloads(result, 0, output_nbytes());
      spread(result);
      break;
    }
    case Collective::ReduceScatter: {
      alignas(64) std::byte result[kInlineBytes];
      const uint64_t nbytes = output_nbytes();
      exchange.reduce_payloads(result, nbytes * rank, nbytes);
      spread(result);
      break;
    }
    case Collective::Broadcast:
      spread(exchange.payload(call_.root));
      break;
    case Collective::Scatter:
      spread(exchange.payload(call_.root) + output_nbytes() * rank);
      break;
    case Collective::AllGather:
    case Collective::Gather: {
      const uint64_t nbytes = output_nbytes() / size;
      for (int r = 0; r < size; ++r) {
        if (call_.chunked_outputs) {
          std::memcpy(call_.outputs[0].data + nbytes * r, exchange.payload(r), nbytes);
        } else {
          call_.outputs[r].write(exchange.payload(r));
        }
      }
      break;
    }
    default:
      break;
  }
}

std::vector<int> CollectiveOperation::missing() const {
  std::vector<int> absent;
  std::vector<int> present;
  const ControlBlock& control = communicator_->control_;
  for (int r = 0; r < control.size(); ++r) {
    const Member& member = control.member(r);
    if (r == communicator_->rank()) {
      continue;
    }
    if (member.posted.load(std::memory_order_acquire) <= sequence_) {
      absent.push_back(r);
    } else if (member.departed.load(std::memory_order_acquire) == 0) {
      present.push_back(r);
    }
  }
  if (absent.empty() && in_blocks_) {
    return {}; // the steps of a BlockReduction look after their ranks themselves
  }
  // With all posts there, any rank may have the rest of the work in its hands.
  return absent.empty() ? present : absent;
}

void CollectiveOperation::describe_wait(WaitRecord& record) const {
  record.kind = WaitKind::Collective;
  record.sequence = sequence_;
}

void CollectiveOperation::attend(bool waiting) {
  communicator_->control_.member(communicator_->rank())
      .attending.store(waiting ? sequence_ + 1 : 0, std::memory_order_relaxed);
}

} // namespace trn
