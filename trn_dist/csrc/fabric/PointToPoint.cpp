#include "fabric/PointToPoint.h"

#include "fabric/Futex.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace trn {

namespace {

// Payloads up to this are copied when they are sent: cheaper than to come back for them.
constexpr uint64_t kEagerBytes = 16 << 10;

uint32_t value(MessageState state) {
  return static_cast<uint32_t>(state);
}

void set_state(Message& message, MessageState state) {
  message.state.store(value(state));
  if (message.sleepers.load() > 0) {
    futex_wake_all(&message.state);
  }
}

} // namespace

// ---- Operations -----------------------------------------------------------------------------------------------------

SendOperation::SendOperation(Communicator& communicator, const at::Tensor& tensor, Region region, int to, int tag)
    : Operation(communicator), region_(region), to_(to), tag_(tag) {
  tensors_.push_back(tensor);
}

std::string SendOperation::describe() const {
  return c10::str("send to ", communicator_->rank_label(to_), " (tag ", tag_, ", ", region_.nbytes, " bytes)");
}

bool SendOperation::advance(Wait& wait, bool thorough) {
  PointToPoint& messages = *communicator_->messages_;
  messages.collect(to_);
  if (done() || !waiting_) {
    return done();
  }
  for (auto& entry : messages.outboxes_[to_].entries) {
    if (entry.operation.get() != this) {
      continue;
    }
    Message& message = communicator_->control_.channel(communicator_->rank(), to_).ring[entry.serial % kChannelDepth];
    wait.word = &message.state;
    wait.sleepers = &message.sleepers;
    // A receiver that is about to take it saves a copy: worth a short wait, but only a short one.
    const bool expected =
        communicator_->control_.member(to_).receiving.load(std::memory_order_relaxed) != 0 && entry.in_ring;
    if (expected && !thorough) {
      wait.seen = value(MessageState::Ready);
      wait.patience = std::chrono::milliseconds(1);
      return false;
    }
    if (messages.detach(entry, to_)) {
      return true;
    }
    wait.seen = value(MessageState::Taken);
    return false;
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

void ReceiveOperation::attend(bool waiting) {
  communicator_->control_.member(communicator_->rank()).receiving.store(waiting ? 1 : 0, std::memory_order_relaxed);
}

// ---- PointToPoint: sending ------------------------------------------------------------------------------------------

PointToPoint::PointToPoint(Communicator& communicator)
    : communicator_(communicator), outboxes_(communicator.size()), heads_(communicator.size(), 0) {}

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
  collect(to);
  if (outbox.entries.empty()) {
    active_.push_back(to);
  }
  Outbox::Entry entry;
  entry.operation = operation;
  entry.nbytes = region.nbytes;
  entry.tag = tag;
  entry.serial = outbox.next_serial++;
  entry.ready_ps = start;
  operation->sequence_ = entry.serial;
  if (region.nbytes <= kEagerBytes || region.layout != nullptr || !Arena::get().contains(region.data)) {
    stage(entry);
    operation->complete();
    entry.operation = nullptr;
  }
  outbox.entries.push_back(std::move(entry));
  ++queued_;
  push(to);
  return operation;
}

void PointToPoint::stage(Outbox::Entry& entry) {
  entry.staged = std::make_unique<StagedBlock>(entry.nbytes);
  if (entry.nbytes > 0) {
    entry.operation->region_.read(entry.staged->data());
  }
}

// Puts what fits into the ring.
void PointToPoint::push(int to) {
  Outbox& outbox = outboxes_[to];
  Channel& channel = communicator_.control_.channel(communicator_.rank(), to);
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
    message.offset =
        entry.staged != nullptr ? entry.staged->offset() : Arena::get().offset_of(entry.operation->region_.data);
    message.nbytes = entry.nbytes;
    message.ready_ps = entry.ready_ps;
    message.state.store(value(MessageState::Ready), std::memory_order_release);
    channel.posted.store(entry.serial + 1, std::memory_order_release);
    entry.in_ring = true;
    --queued_;
    pushed = true;
  }
  if (pushed) {
    ring_doorbell(to);
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
void PointToPoint::collect(int to) {
  Outbox& outbox = outboxes_[to];
  if (outbox.entries.empty()) {
    return;
  }
  Channel& channel = communicator_.control_.channel(communicator_.rank(), to);
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
    active_.erase(std::remove(active_.begin(), active_.end(), to), active_.end());
  } else if (freed) {
    push(to);
  }
}

bool PointToPoint::detach(Outbox::Entry& entry, int to) {
  if (entry.in_ring) {
    Message& message = communicator_.control_.channel(communicator_.rank(), to).ring[entry.serial % kChannelDepth];
    uint32_t ready = value(MessageState::Ready);
    if (!message.state.compare_exchange_strong(ready, value(MessageState::Moving))) {
      if (ready != value(MessageState::Done)) {
        return false; // being copied
      }
    } else {
      stage(entry);
      message.offset = entry.staged->offset();
      set_state(message, MessageState::Ready);
      ring_doorbell(to);
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
  const auto pair =
      static_cast<uint64_t>(from) * static_cast<uint64_t>(communicator_.size()) + static_cast<uint64_t>(to);
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
  receives_.push_back(operation);
  progress();
  return operation;
}

void PointToPoint::progress() {
  for (size_t i = active_.size(); i-- > 0;) { // backwards: collect() may take out the entry it was called for
    collect(active_[i]);
  }
  // In the order of the calls, so that two receives that match the same messages get them in that order.
  for (auto it = receives_.begin(); it != receives_.end();) {
    if ((*it)->done() || match(**it)) {
      it = receives_.erase(it);
    } else {
      ++it;
    }
  }
}

bool PointToPoint::match(ReceiveOperation& receive) {
  if (receive.from_ >= 0) {
    return take(receive, receive.from_);
  }
  for (int from = 0; from < communicator_.size(); ++from) {
    if (take(receive, from)) {
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
    if (message.nbytes != receive.region_.nbytes || message.offset > sender.size ||
        message.nbytes > sender.size - message.offset) {
      const std::string reason = c10::str(
          "neuron: ",
          receive.describe(),
          " of group ",
          communicator_.name(),
          " got a message of ",
          message.nbytes,
          " bytes from ",
          communicator_.rank_label(from),
          ": a receive must have the size of its send. Noticed by ",
          communicator_.rank_label(communicator_.rank()),
          ".");
      communicator_.fail(reason);
      return false;
    }
    receive.region_.write(sender.base + message.offset);
    const Picoseconds start = std::max(message.ready_ps, receive.enqueued_.ready_ps);
    set_state(message, MessageState::Done);
    receive.times_ = {receive.enqueued_.ready_ps, start, start + transfer_ps(receive.region_.nbytes)};
    receive.trace_sequence_ = trace_sequence(serial, from, communicator_.rank());
    receive.source_.store(from, std::memory_order_release);
    receive.complete();
    return true;
  }
  return false;
}

void PointToPoint::depart() {
  for (int to = 0; to < communicator_.size(); ++to) {
    collect(to);
    for (auto& entry : outboxes_[to].entries) {
      if (entry.operation != nullptr && !detach(entry, to)) {
        // The receiver is copying out of the tensor: give it a moment, then leave the tensor to it.
        Message& message = communicator_.control_.channel(communicator_.rank(), to).ring[entry.serial % kChannelDepth];
        futex_wait(&message.state, value(MessageState::Taken), std::chrono::milliseconds(100));
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
