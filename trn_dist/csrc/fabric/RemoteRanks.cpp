// The part of Communicator that deals with ranks on other hosts: what goes out to their proxies and what comes in for those
// that this rank is the proxy of. See [Note: Ranks on other hosts].

#include "fabric/CollectiveOperation.h"
#include "fabric/Communicator.h"
#include "fabric/PointToPoint.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace trn {

namespace {

// Of one input or output, as it travels with a post. Bytes [begin, end) of it follow as a part of their own.
struct WireSpan {
  uint64_t nbytes;
  uint64_t begin;
  uint64_t end;
};

at::Tensor copy_of(const void* data, uint64_t nbytes) {
  at::Tensor copy = at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte));
  if (nbytes > 0) {
    std::memcpy(copy.data_ptr(), data, nbytes);
  }
  return copy;
}

Frame frame_of(FrameKind kind, uint64_t group, int from) {
  Frame frame{};
  frame.kind = kind;
  frame.group = group;
  frame.from = from;
  return frame;
}

} // namespace

void Communicator::ship(const CollectiveOperation& operation, const Post& post) {
  for (const RemoteHost& host : remote_hosts_) {
    Frame frame = frame_of(FrameKind::Post, group_id_, rank_);
    frame.sequence = operation.sequence();
    frame.post = post;
    frame.post.site = kNoOffset; // its text lies in an arena that they do not map
    std::vector<at::Tensor> parts;
    const auto& spans = operation.spans();
    if (!spans.empty()) {
      std::vector<WireSpan> table;
      parts.emplace_back();
      for (size_t i = 0; i < spans.size(); ++i) {
        WireSpan span{spans[i].nbytes, 0, 0};
        if (i < post.num_inputs && spans[i].nbytes > 0) {
          std::tie(span.begin, span.end) = operation.needed_by(i, host.ranks);
          if (span.begin < span.end) {
            parts.push_back(copy_of(Arena::get().base() + spans[i].offset + span.begin, span.end - span.begin));
          }
        }
        table.push_back(span);
      }
      parts[0] = copy_of(table.data(), table.size() * sizeof(WireSpan));
    }
    fabric_->network()->send(fabric_ranks_[host.proxy], frame, std::move(parts));
  }
}

void Communicator::ship(FrameKind kind, const std::string& text) {
  for (const RemoteHost& host : remote_hosts_) {
    std::vector<at::Tensor> parts;
    if (!text.empty()) {
      parts.push_back(copy_of(text.data(), text.size()));
    }
    fabric_->network()->send(fabric_ranks_[host.proxy], frame_of(kind, group_id_, rank_), std::move(parts));
  }
}

void Communicator::ship_message(int to, int tag, uint64_t serial, Picoseconds ready_ps, const Region& region) {
  const int host = fabric_->hosts().host_of[fabric_ranks_[to]];
  for (const RemoteHost& remote : remote_hosts_) {
    if (fabric_->hosts().host_of[fabric_ranks_[remote.proxy]] != host) {
      continue;
    }
    Frame frame = frame_of(FrameKind::Message, group_id_, rank_);
    frame.to = to;
    frame.tag = tag;
    frame.sequence = serial;
    frame.ready_ps = ready_ps;
    at::Tensor payload = at::empty({static_cast<int64_t>(region.nbytes)}, at::TensorOptions().dtype(at::kByte));
    region.read(static_cast<std::byte*>(payload.data_ptr()));
    fabric_->network()->send(fabric_ranks_[remote.proxy], frame, {std::move(payload)});
  }
}

void Communicator::deliver(
    int source,
    const Frame& frame,
    const std::vector<uint64_t>& part_nbytes,
    const Network::ReceivePart& receive) {
  const auto refuse = [&](bool valid) {
    TORCH_CHECK(valid, "neuron: rank ", source, " of the job sent a malformed frame to group ", name_);
  };
  refuse(
      frame.from >= 0 && frame.from < size() && !is_local(frame.from) && fabric_ranks_[frame.from] == source &&
      arena_ranks_[frame.from] == fabric_ranks_[rank_]);
  switch (frame.kind) {
    case FrameKind::Departure: {
      refuse(part_nbytes.empty());
      Section section(*this);
      control_.member(frame.from).departed.store(1, std::memory_order_release);
      control_.header().departed.fetch_add(1, std::memory_order_acq_rel);
      wake_everybody(control_);
      return;
    }
    case FrameKind::Failure: {
      refuse(part_nbytes.size() == 1 && part_nbytes[0] <= kErrorBytes);
      std::string reason(part_nbytes[0], 0);
      receive(reinterpret_cast<std::byte*>(reason.data()), reason.size());
      fail(reason);
      return;
    }
    case FrameKind::Message: {
      refuse(
          part_nbytes.size() == 1 && frame.to >= 0 && frame.to < size() && is_local(frame.to) &&
          part_nbytes[0] <= Arena::get().size());
      auto payload = std::make_unique<StagedBlock>(part_nbytes[0]);
      receive(payload->data(), part_nbytes[0]);
      bool waiting = false;
      {
        Section section(*this);
        messages_->deliver(
            frame.from, frame.to, frame.tag, frame.sequence, frame.ready_ps, std::move(payload), part_nbytes[0]);
        waiting = messages_->queued();
      }
      if (waiting) {
        fabric_->network()->attend(shared_from_this());
      }
      return;
    }
    case FrameKind::Post: {
      Arrival arrival;
      arrival.from = frame.from;
      arrival.sequence = frame.sequence;
      arrival.post = frame.post;
      Post& post = arrival.post;
      post.away = true;
      post.spans_offset = kNoOffset;
      refuse(static_cast<size_t>(post.operation) < kCollectives && post.root >= 0 && post.root < size());
      if (!post.in_slot && !post.in_blocks) {
        const uint64_t count = static_cast<uint64_t>(post.num_inputs) + post.num_outputs;
        refuse(!part_nbytes.empty() || count == 0);
        std::vector<WireSpan> table(count);
        if (count > 0) {
          refuse(part_nbytes[0] == count * sizeof(WireSpan));
          receive(reinterpret_cast<std::byte*>(table.data()), part_nbytes[0]);
        }
        size_t part = 1;
        for (const WireSpan& span : table) {
          refuse(span.nbytes <= Arena::get().size() && span.end <= span.nbytes && span.begin <= span.end);
          uint64_t offset = 0;
          if (span.begin < span.end) {
            refuse(part < part_nbytes.size() && part_nbytes[part] == span.end - span.begin);
            ++part;
            arrival.staged.emplace_back(span.nbytes);
            offset = arrival.staged.back().offset();
            receive(arrival.staged.back().data() + span.begin, span.end - span.begin);
          }
          arrival.spans.push_back({offset, span.nbytes});
        }
        refuse(part >= part_nbytes.size());
        if (count > kInlineSpans) {
          arrival.staged.emplace_back(count * sizeof(Span));
          std::memcpy(arrival.staged.back().data(), arrival.spans.data(), count * sizeof(Span));
          post.spans_offset = arrival.staged.back().offset();
        } else {
          std::copy(arrival.spans.begin(), arrival.spans.end(), post.spans);
        }
      } else {
        refuse(part_nbytes.empty());
      }
      bool waiting = false;
      {
        Section section(*this);
        arrivals_.push_back(std::move(arrival));
        enter_arrivals();
        waiting = !arrivals_.empty();
      }
      if (waiting) {
        fabric_->network()->attend(shared_from_this());
      }
      return;
    }
  }
  refuse(false);
}

void Communicator::enter_arrivals() {
  while (!entered_.empty() &&
         Slot::reached(
             control_.slot(entered_.front().sequence).state.load(std::memory_order_acquire),
             Slot::done(entered_.front().sequence))) {
    entered_.pop_front();
  }
  while (!arrivals_.empty() && slot_free(arrivals_.front().sequence)) {
    Arrival arrival = std::move(arrivals_.front());
    arrivals_.pop_front();
    const uint64_t sequence = arrival.sequence;
    Member& member = control_.member(arrival.from);
    if (member.posted.load(std::memory_order_relaxed) != sequence) {
      fail(c10::str("neuron: ", rank_label(arrival.from), " sent collectives of group ", name_, " out of order"));
      return;
    }
    control_.post(sequence, arrival.from) = arrival.post;
    entered_.push_back(std::move(arrival));
    member.posted.store(sequence + 1, std::memory_order_release);
    try {
      arrive(sequence);
    } catch (const c10::Error&) {
      return; // the group has failed, which its ranks see for themselves
    }
  }
}

bool Communicator::work_off() {
  Section section(*this);
  if (control_.header().failure.load(std::memory_order_acquire) != 0) {
    return true;
  }
  enter_arrivals();
  messages_->progress();
  return arrivals_.empty() && !messages_->queued();
}

void Communicator::lose(int job_rank) {
  bool changed = false;
  for (int r = 0; r < size(); ++r) {
    if (fabric_ranks_[r] == job_rank && !is_local(r) && arena_ranks_[r] == fabric_ranks_[rank_]) {
      control_.member(r).lost.store(1, std::memory_order_release);
      changed = true;
    }
  }
  if (changed) {
    wake_everybody(control_);
  }
}

} // namespace trn
