#include "fabric/PointToPoint.h"

#include "OsError.h"
#include "device/TimingOnly.h"
#include "fabric/FlightRecorder.h"
#include "fabric/Futex.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;

// Payloads up to this are copied when they are sent: cheaper than to come back for them.
constexpr uint64_t kEagerBytes = 16 << 10;

uint32_t value(MessageState state) {
  return static_cast<uint32_t>(state);
}

// How long a sender that has to go on waits for its receiver to take the message: as long as the copy would take that it
// saves, so that it never loses more than that again.
constexpr uint64_t kCopyBytesPerUs = 4096;
constexpr std::chrono::microseconds kShortestPatience{50};

} // namespace

// ---- Operations -----------------------------------------------------------------------------------------------------

SendOperation::SendOperation(Communicator& communicator, const at::Tensor& tensor, Region region, int to, int tag)
    : Operation(communicator), region_(region), to_(to), tag_(tag) {
  tensors_.push_back(tensor);
}

std::string SendOperation::describe() const {
  return c10::str("send to ", communicator_->rank_label(to_), " (tag ", tag_, ", ", region_.nbytes, " bytes)");
}

bool SendOperation::advance(Wait& wait, bool) {
  PointToPoint& messages = *communicator_->messages_;
  Member& self = communicator_->control_.member(communicator_->rank());
  // Read before looking, so that what comes meanwhile ends the sleep.
  wait.seen = self.doorbell.load();
  wait.word = &self.doorbell;
  wait.sleepers = &self.doorbell_sleepers;
  messages.progress(); // also receives: in a ring where everybody sends first, all get on
  messages.collect(messages.outboxes_[to_]);
  if (done() || !waiting_) {
    return done();
  }
  for (auto& entry : messages.outboxes_[to_].entries) {
    if (entry.operation.get() != this) {
      continue;
    }
    if (entry.in_ring) {
      Message& message = communicator_->control_.channel(communicator_->rank(), to_).ring[entry.serial % kChannelDepth];
      message.awaited.store(1);
      if (message.state.load() == value(MessageState::Done)) {
        messages.collect(messages.outboxes_[to_]);
        return true;
      }
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - waiting_since_);
      const auto patience = std::max(kShortestPatience, std::chrono::microseconds(region_.nbytes / kCopyBytesPerUs));
      if (waited < patience) {
        wait.patience = patience - waited;
        return false;
      }
    }
    return messages.detach(entry, messages.outboxes_[to_]);
  }
  return done();
}

std::vector<int> SendOperation::missing() const {
  return {to_};
}

ReceiveOperation::ReceiveOperation(
    Communicator& communicator,
    const at::Tensor& tensor,
    Region region,
    int from,
    int tag)
    : Operation(communicator), region_(region), from_(from), tag_(tag) {
  tensors_.push_back(tensor);
}

std::string ReceiveOperation::describe() const {
  return c10::str(
      "recv from ",
      from_ < 0 ? std::string("any rank") : communicator_->rank_label(from_),
      " (tag ",
      tag_,
      ", ",
      region_.nbytes,
      " bytes)");
}

bool ReceiveOperation::advance(Wait& wait, bool) {
  Member& self = communicator_->control_.member(communicator_->rank());
  // Read before looking, so that a message that comes meanwhile ends the sleep.
  wait.seen = self.doorbell.load();
  wait.word = &self.doorbell;
  wait.sleepers = &self.doorbell_sleepers;
  communicator_->messages_->progress();
  return done();
}

std::vector<int> ReceiveOperation::missing() const {
  if (done()) {
    return {};
  }
  if (from_ >= 0) {
    return {from_};
  }
  // From any source: those who are left could send.
  std::vector<int> left;
  std::vector<int> others;
  for (int r = 0; r < communicator_->size(); ++r) {
    if (r != communicator_->rank()) {
      others.push_back(r);
      if (communicator_->control_.member(r).departed.load(std::memory_order_acquire) == 0) {
        left.push_back(r);
      }
    }
  }
  return left.empty() ? others : left;
}

void ReceiveOperation::describe_wait(WaitRecord& record) const {
  record.kind = WaitKind::Receive;
  record.from = from_;
  record.tag = tag_;
}

// ---- PointToPoint: sending ------------------------------------------------------------------------------------------

PointToPoint::PointToPoint(Communicator& communicator)
    : communicator_(communicator), outboxes_(communicator.size()), heads_(communicator.size(), 0) {
  for (int to = 0; to < communicator.size(); ++to) {
    outboxes_[to].from = communicator.rank();
    outboxes_[to].to = to;
  }
}

std::shared_ptr<Operation> PointToPoint::send(
    const at::Tensor& tensor,
    Region region,
    int to,
    int tag,
    std::chrono::milliseconds timeout,
    Enqueued enqueued) {
  auto operation = std::make_shared<SendOperation>(communicator_, tensor, region, to, tag);
  operation->timeout_ = timeout;
  Outbox& outbox = outboxes_[to];
  // In virtual time, too, the sender goes on without its receiver: after it has put the payload on the link.
  const Picoseconds start = std::max(enqueued.ready_ps, outbox.busy_until_ps);
  outbox.busy_until_ps = start + transfer_ps(region.nbytes);
  operation->enqueue(enqueued, "send", region.nbytes, {enqueued.ready_ps, start, outbox.busy_until_ps});
  operation->trace_sequence_ = trace_sequence(outbox.next_serial, communicator_.rank(), to);
  operation->describe_transfer(RecordedTransfer::Send);
  record_message(*operation, FlightRecord::kSend, to, tensor, region.nbytes);
  if (!communicator_.is_local(to)) {
    operation->sequence_ = outbox.next_serial;
    communicator_.ship_message(to, tag, outbox.next_serial++, start, region);
    operation->complete();
    return operation;
  }
  collect(outbox);
  Outbox::Entry entry;
  entry.operation = operation;
  entry.nbytes = region.nbytes;
  entry.tag = tag;
  entry.serial = outbox.next_serial++;
  entry.ready_ps = start;
  operation->sequence_ = entry.serial;
  const bool without_numbers = region.data == nullptr && region.nbytes > 0;
  const bool in_place =
      region.layout == nullptr && (Arena::get().contains(region.data) || communicator_.private_memory_shared());
  if (without_numbers || region.nbytes <= kEagerBytes || !in_place) {
    if (!without_numbers) {
      stage(entry);
    }
    operation->complete();
    entry.operation = nullptr;
  }
  communicator_.control_.channel(communicator_.rank(), to).sent.store(outbox.next_serial, std::memory_order_release);
  add(outbox, std::move(entry));
  return operation;
}

void PointToPoint::add(Outbox& outbox, Outbox::Entry entry) {
  if (outbox.entries.empty()) {
    active_.push_back(&outbox);
  }
  outbox.entries.push_back(std::move(entry));
  ++queued_;
  push(outbox);
}

void PointToPoint::deliver(
    int from,
    int to,
    int tag,
    uint64_t serial,
    Picoseconds ready_ps,
    std::unique_ptr<StagedBlock> payload,
    uint64_t nbytes) {
  Outbox& outbox = proxied_[{from, to}];
  outbox.from = from;
  outbox.to = to;
  collect(outbox);
  Outbox::Entry entry;
  entry.staged = std::move(payload);
  entry.nbytes = nbytes;
  entry.tag = tag;
  entry.serial = serial;
  entry.ready_ps = ready_ps;
  add(outbox, std::move(entry));
}

void PointToPoint::record_message(
    Operation& operation,
    uint64_t direction,
    int peer,
    const at::Tensor& tensor,
    uint64_t nbytes) {
  FlightRecord record;
  record.operation = direction;
  record.sequence = ++calls_;
  record.peer = peer;
  record.dtype = static_cast<uint64_t>(tensor.scalar_type());
  record.input_nbytes = record.output_nbytes = nbytes;
  record.ndim = std::min<uint64_t>(tensor.dim(), kMaxShape + 1);
  std::copy_n(tensor.sizes().begin(), std::min<int64_t>(tensor.dim(), kMaxShape), record.shape.begin());
  operation.record_in_flight(record);
}

void PointToPoint::stage(Outbox::Entry& entry) {
  entry.staged = std::make_unique<StagedBlock>(entry.nbytes);
  if (entry.nbytes > 0) {
    entry.operation->region_.read(entry.staged->data());
  }
}

uint64_t PointToPoint::Outbox::Entry::offset() const {
  if (staged != nullptr) {
    return staged->offset();
  }
  if (operation == nullptr) {
    return kNoOffset;
  }
  const std::byte* data = operation->region_.data;
  const Arena& arena = Arena::get();
  return arena.contains(data) ? arena.offset_of(data) : reinterpret_cast<uint64_t>(data) | kPrivate;
}

// Puts what fits into the ring.
void PointToPoint::push(Outbox& outbox) {
  Channel& channel = communicator_.control_.channel(outbox.from, outbox.to);
  bool pushed = false;
  for (auto& entry : outbox.entries) {
    if (entry.in_ring) {
      continue;
    }
    Message& message = channel.ring[entry.serial % kChannelDepth];
    if (message.state.load(std::memory_order_acquire) != value(MessageState::Free)) {
      break;
    }
    message.tag = entry.tag;
    message.serial = entry.serial;
    message.offset = entry.offset();
    message.awaited.store(0, std::memory_order_relaxed);
    message.nbytes = entry.nbytes;
    message.ready_ps = entry.ready_ps;
    message.state.store(value(MessageState::Ready), std::memory_order_release);
    channel.posted.store(entry.serial + 1, std::memory_order_release);
    entry.in_ring = true;
    --queued_;
    pushed = true;
  }
  if (pushed) {
    ring_doorbell(outbox.to);
  }
}

void PointToPoint::ring_doorbell(int to) {
  Member& receiver = communicator_.control_.member(to);
  receiver.doorbell.fetch_add(1);
  if (receiver.doorbell_sleepers.load() > 0) {
    futex_wake_all(&receiver.doorbell);
  }
}

// Takes back what was received, and pushes on.
void PointToPoint::collect(Outbox& outbox) {
  if (outbox.entries.empty()) {
    return;
  }
  Channel& channel = communicator_.control_.channel(outbox.from, outbox.to);
  bool freed = false;
  for (auto& entry : outbox.entries) {
    if (!entry.in_ring) {
      break;
    }
    Message& message = channel.ring[entry.serial % kChannelDepth];
    if (message.serial == entry.serial && message.state.load(std::memory_order_acquire) == value(MessageState::Done)) {
      if (entry.operation != nullptr) {
        entry.operation->complete();
        entry.operation = nullptr;
      }
      entry.staged = nullptr;
      entry.received = true;
    }
  }
  // Messages may be received out of order, by tag; slots of the ring are given back in order.
  while (!outbox.entries.empty() && outbox.entries.front().received) {
    Message& message = channel.ring[outbox.entries.front().serial % kChannelDepth];
    message.state.store(value(MessageState::Free), std::memory_order_release);
    outbox.entries.pop_front();
    freed = true;
  }
  if (outbox.entries.empty()) {
    active_.erase(std::remove(active_.begin(), active_.end(), &outbox), active_.end());
  } else if (freed) {
    push(outbox);
  }
}

bool PointToPoint::detach(Outbox::Entry& entry, const Outbox& outbox) {
  if (entry.in_ring) {
    Message& message = communicator_.control_.channel(outbox.from, outbox.to).ring[entry.serial % kChannelDepth];
    uint32_t ready = value(MessageState::Ready);
    if (!message.state.compare_exchange_strong(ready, value(MessageState::Moving))) {
      if (ready != value(MessageState::Done)) {
        return false; // being copied
      }
    } else {
      stage(entry);
      message.offset = entry.staged->offset();
      message.state.store(value(MessageState::Ready));
      ring_doorbell(outbox.to);
    }
  } else {
    stage(entry);
  }
  entry.operation->complete();
  entry.operation = nullptr;
  return true;
}

// The same number on both sides, and another for every message of the group.
uint64_t PointToPoint::trace_sequence(uint64_t serial, int from, int to) const {
  const auto pair = static_cast<uint64_t>(communicator_.group_rank(from)) * communicator_.job_ranks().size() +
      static_cast<uint64_t>(communicator_.group_rank(to));
  return (pair << 32) + serial;
}

Picoseconds PointToPoint::transfer_ps(uint64_t nbytes) const {
  return communicator_.control_.header().costs[kCollectives].time_ps(static_cast<int64_t>(nbytes));
}

// ---- PointToPoint: receiving ----------------------------------------------------------------------------------------

std::shared_ptr<Operation> PointToPoint::receive(
    const at::Tensor& tensor,
    Region region,
    int from,
    int tag,
    std::chrono::milliseconds timeout,
    Enqueued enqueued) {
  auto operation = std::make_shared<ReceiveOperation>(communicator_, tensor, region, from, tag);
  operation->timeout_ = timeout;
  operation->enqueue(enqueued, "recv", region.nbytes, {});
  if (from < 0) {
    mark_irreproducible("the program received from any source");
  }
  record_message(*operation, FlightRecord::kReceive, from, tensor, region.nbytes);
  receives_.push_back(operation);
  progress();
  return operation;
}

void PointToPoint::progress() {
  for (size_t i = active_.size(); i-- > 0;) { // backwards: collect() may take out the entry it was called for
    collect(*active_[i]);
  }
  // Receives of the same messages get them in the order of their calls. A message may come, or its sender end moving it,
  // while this goes through the receives: what an earlier one has looked for in vain is not for a later one.
  std::vector<std::pair<int, int>> awaited;
  for (auto it = receives_.begin(); it != receives_.end();) {
    const std::pair<int, int> wanted{(*it)->from_, (*it)->tag_};
    if ((*it)->done() || match(**it, awaited)) {
      it = receives_.erase(it);
    } else {
      if (std::find(awaited.begin(), awaited.end(), wanted) == awaited.end()) {
        awaited.push_back(wanted);
      }
      ++it;
    }
  }
}

bool PointToPoint::match(ReceiveOperation& receive, const std::vector<std::pair<int, int>>& awaited) {
  const auto is_awaited = [&](int from) {
    return std::find(awaited.begin(), awaited.end(), std::pair<int, int>{from, receive.tag_}) != awaited.end();
  };
  if (is_awaited(-1)) { // from any source
    return false;
  }
  if (receive.from_ >= 0) {
    return !is_awaited(receive.from_) && take(receive, receive.from_);
  }
  for (int from = 0; from < communicator_.size(); ++from) {
    if (!is_awaited(from) && take(receive, from)) {
      return true;
    }
  }
  return false;
}

bool PointToPoint::take(ReceiveOperation& receive, int from) {
  Channel& channel = communicator_.control_.channel(from, communicator_.rank());
  const uint64_t posted = channel.posted.load(std::memory_order_acquire);
  uint64_t& head = heads_[from];
  for (uint64_t serial = head; serial < posted; ++serial) {
    Message& message = channel.ring[serial % kChannelDepth];
    const uint32_t state = message.state.load(std::memory_order_acquire);
    const bool received =
        message.serial != serial || state == value(MessageState::Done) || state == value(MessageState::Free);
    if (received) {
      if (serial == head) {
        ++head;
      }
      continue;
    }
    if (message.tag != receive.tag_) {
      continue;
    }
    uint32_t ready = value(MessageState::Ready);
    if (!message.state.compare_exchange_strong(ready, value(MessageState::Taken))) {
      return false; // its sender is moving the payload, and rings again after that
    }
    const Fabric::Peer& sender = communicator_.peer(from);
    const bool has_numbers = message.offset != kNoOffset;
    const bool in_private_memory = has_numbers && (message.offset & kPrivate) != 0;
    const bool in_bounds = !has_numbers ? timing_only()
        : in_private_memory ? communicator_.private_memory_shared() // the kernel checks the address
                            : message.offset <= sender.size && message.nbytes <= sender.size - message.offset;
    const auto fail = [&](const auto&... why) {
      communicator_.fail(c10::str("neuron: ", receive.describe(), " of group ", communicator_.name(), why...));
      return false;
    };
    if (message.nbytes != receive.region_.nbytes || !in_bounds) {
      return fail(
          " got a message of ",
          message.nbytes,
          " bytes from ",
          communicator_.rank_label(from),
          ": a receive must have the size of its send. Noticed by ",
          communicator_.rank_label(communicator_.rank()),
          ".");
    }
    if (const at::Tensor& tensor = receive.tensors_[0]; timing_only() && tensor.is_privateuseone()) {
      set_known(tensor, has_numbers && may_become_known(tensor));
    } else if (!has_numbers) {
      return fail(" is into host memory, and timing mode has no numbers to put there");
    }
    if (!has_numbers) {
      // Nothing to copy.
    } else if (!in_private_memory) {
      receive.region_.write(sender.base + message.offset);
    } else if (!copy_private(receive, from, message.offset & ~kPrivate)) {
      return fail(
          " cannot read the sender's tensor (process_vm_readv: ",
          os_error(),
          "); has its process ended? Noticed by ",
          communicator_.rank_label(communicator_.rank()),
          ".");
    }
    const Picoseconds start = std::max(message.ready_ps, receive.enqueued_.ready_ps);
    message.state.store(value(MessageState::Done));
    if (message.awaited.load() != 0) {
      ring_doorbell(from);
    }
    receive.times_ = {receive.enqueued_.ready_ps, start, start + transfer_ps(receive.region_.nbytes)};
    receive.trace_sequence_ = trace_sequence(serial, from, communicator_.rank());
    receive.describe_transfer(RecordedTransfer::Receive);
    receive.source_.store(from, std::memory_order_release);
    receive.complete();
    return true;
  }
  return false;
}

bool PointToPoint::copy_private(const ReceiveOperation& receive, int from, uint64_t address) const {
  const Region& region = receive.region_;
  if (from == communicator_.rank()) {
    region.write(reinterpret_cast<const std::byte*>(address));
    return true;
  }
  const PrivateMemory& sender = communicator_.private_memory_[from];
  if (region.layout == nullptr) {
    return sender.read(region.data, address, region.nbytes);
  }
  StagedBlock contiguous(region.nbytes);
  if (!sender.read(contiguous.data(), address, region.nbytes)) {
    return false;
  }
  region.write(contiguous.data());
  return true;
}

void PointToPoint::depart() {
  for (int to = 0; to < communicator_.size(); ++to) {
    collect(outboxes_[to]);
    for (auto& entry : outboxes_[to].entries) {
      if (entry.operation != nullptr && !detach(entry, outboxes_[to])) {
        // The receiver is copying out of the tensor: give it a moment, then leave the tensor to it.
        Message& message = communicator_.control_.channel(communicator_.rank(), to).ring[entry.serial % kChannelDepth];
        for (int i = 0; i < 100 && message.state.load() == value(MessageState::Taken); ++i) {
          futex_wait(&message.state, value(MessageState::Taken), std::chrono::milliseconds(1));
        }
        if (message.state.load() != value(MessageState::Done)) {
          entry.operation->complete(
              std::make_exception_ptr(
                  C10_BUILD_ERROR(DistBackendError, "neuron: the group was destroyed in the middle of a send")));
        } else {
          entry.operation->complete();
        }
        entry.operation = nullptr;
      }
    }
  }
  for (const auto& receive : receives_) {
    if (!receive->done()) {
      receive->complete(
          std::make_exception_ptr(C10_BUILD_ERROR(
              DistBackendError,
              c10::str("neuron: ", receive->describe(), ": group ", communicator_.name(), " was destroyed before"))));
    }
  }
  receives_.clear();
}

} // namespace trn
