#pragma once

// Messages between two ranks of a communicator. See [Note: Messages] in ControlBlock.h for a message's states.
//
// A receiver copies straight out of the sender's tensor. A sender never depends on its receiver: if the message is still
// there a little after the sender has to go on, it moves the payload into a block of its arena. So schedules that rely on sends
// being buffered (pipeline parallelism, or a ring in which everybody sends first) cannot deadlock.

#include "fabric/Communicator.h"

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

namespace trn {

class SendOperation final : public Operation {
 public:
  SendOperation(Communicator& communicator, const at::Tensor& tensor, Region region, int to, int tag);
  std::string describe() const override;

 private:
  friend class PointToPoint;
  bool advance(Wait& wait, bool thorough) override;
  std::vector<int> missing() const override;
  void describe_wait(WaitRecord&) const override {} // ends by itself: the receiver is in the middle of a copy
  void attend(bool waiting) override {
    waiting_ = waiting;
    waiting_since_ = std::chrono::steady_clock::now();
  }

  Region region_;
  int to_;
  int tag_;
  bool waiting_ = false; // in finish(): this rank has to go on
  std::chrono::steady_clock::time_point waiting_since_;
};

class ReceiveOperation final : public Operation {
 public:
  ReceiveOperation(Communicator& communicator, const at::Tensor& tensor, Region region, int from, int tag);
  std::string describe() const override;

 private:
  friend class PointToPoint;
  bool advance(Wait& wait, bool thorough) override;
  std::vector<int> missing() const override;
  void describe_wait(WaitRecord& record) const override;

  Region region_;
  int from_; // or -1
  int tag_;
};

// All with the communicator's mutex held.
class PointToPoint {
 public:
  explicit PointToPoint(Communicator& communicator);

  std::shared_ptr<Operation>
  send(const at::Tensor& tensor, Region region, int to, int tag, std::chrono::milliseconds timeout, Enqueued enqueued);
  std::shared_ptr<Operation> receive(
      const at::Tensor& tensor,
      Region region,
      int from,
      int tag,
      std::chrono::milliseconds timeout,
      Enqueued enqueued);
  // A message from a rank of another host, which this rank is the proxy of, to one of this host.
  void deliver(
      int from,
      int to,
      int tag,
      uint64_t serial,
      Picoseconds ready_ps,
      std::unique_ptr<StagedBlock> payload,
      uint64_t nbytes);
  void progress();
  bool idle() const {
    return active_.empty() && receives_.empty();
  }
  // Whether messages wait for room in the ring of their receiver.
  bool queued() const {
    return queued_ > 0;
  }
  // Moves all that was not taken into the arena, where it stays for the receivers.
  void depart();

 private:
  friend class SendOperation;
  friend class ReceiveOperation;

  // What this rank, or one that it is the proxy of, has sent to one other and not yet got back.
  struct Outbox {
    struct Entry {
      std::shared_ptr<SendOperation> operation; // nullptr once the sender has gone on
      std::unique_ptr<StagedBlock> staged;
      uint64_t nbytes = 0;
      int tag = 0;
      uint64_t serial = 0;
      Picoseconds ready_ps = 0;
      bool in_ring = false;
      bool received = false;
      uint64_t offset() const; // as in Span
    };
    int from = 0;
    int to = 0;
    std::deque<Entry> entries; // oldest first; those beyond the ring's depth wait their turn
    uint64_t next_serial = 0;
    Picoseconds busy_until_ps = 0; // virtual time
  };

  void record_message(Operation& operation, uint64_t direction, int peer, const at::Tensor& tensor, uint64_t nbytes);
  void add(Outbox& outbox, Outbox::Entry entry);
  void push(Outbox& outbox);
  void ring_doorbell(int to);
  void collect(Outbox& outbox);
  // Ends the sender's part of a message that nobody has taken yet. False while the receiver is copying it.
  bool detach(Outbox::Entry& entry, const Outbox& outbox);
  void stage(Outbox::Entry& entry);
  uint64_t trace_sequence(uint64_t serial, int from, int to) const;
  Picoseconds transfer_ps(uint64_t nbytes) const;
  // `awaited`: source (or -1) and tag of the earlier receives that are still open.
  bool match(ReceiveOperation& receive, const std::vector<std::pair<int, int>>& awaited);
  bool take(ReceiveOperation& receive, int from);
  bool copy_private(const ReceiveOperation& receive, int from, uint64_t address) const;

  Communicator& communicator_;
  std::vector<Outbox> outboxes_; // by destination
  std::map<std::pair<int, int>, Outbox> proxied_; // by source and destination
  std::vector<Outbox*> active_; // those with entries
  uint64_t calls_ = 0;
  size_t queued_ = 0; // entries that are not in their ring
  std::vector<uint64_t> heads_; // by source: the first serial that may not have been received
  std::list<std::shared_ptr<ReceiveOperation>> receives_; // in the order of their calls
};

} // namespace trn
