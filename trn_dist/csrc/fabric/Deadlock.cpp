#include "fabric/Deadlock.h"

#include "fabric/RankStatus.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <sstream>

namespace trn {

namespace {

struct Need {
  std::vector<int> ranks; // in the fabric
  bool any = false; // one of them is enough to go on, otherwise all are needed
  ControlBlock control;
  std::string text;
};

struct BlockedRank {
  uint64_t version = 0;
  std::vector<Need> needs; // one a thread
};

// The group that a peer says it waits in, checked like everything that a peer writes.
std::optional<ControlBlock> control_of(const Fabric& fabric, const WaitRecord& wait) {
  if (wait.fabric != fabric.id() || wait.leader < 0 || wait.leader >= fabric.size() || wait.size < 1 ||
      wait.size > fabric.size() || wait.rank < 0 || wait.rank >= wait.size) {
    return std::nullopt;
  }
  const Fabric::Peer& leader = fabric.peer(wait.leader);
  const uint64_t nbytes = ControlBlock::nbytes(wait.size);
  if (leader.base == nullptr || wait.control_offset % 64 != 0 || wait.control_offset > leader.size ||
      nbytes > leader.size - wait.control_offset) {
    return std::nullopt;
  }
  const ControlBlock control(leader.base + wait.control_offset, wait.size);
  const ControlHeader& header = control.header();
  if (header.magic != kControlMagic || header.nonce != wait.nonce || header.size != static_cast<uint64_t>(wait.size) ||
      header.failure.load(std::memory_order_acquire) != 0) {
    return std::nullopt;
  }
  return control;
}

// Whether a message that the receive would take is there, or may be on its way.
bool may_receive(const ControlBlock& control, const WaitRecord& wait, int from) {
  const Channel& channel = control.channel(from, wait.rank);
  const uint64_t posted = channel.posted.load(std::memory_order_acquire);
  if (channel.sent.load(std::memory_order_acquire) != posted) {
    return true;
  }
  for (uint64_t serial = posted > kChannelDepth ? posted - kChannelDepth : 0; serial < posted; ++serial) {
    const Message& message = channel.ring[serial % kChannelDepth];
    const auto state = static_cast<MessageState>(message.state.load(std::memory_order_acquire));
    const bool there = state == MessageState::Ready || state == MessageState::Moving || state == MessageState::Taken;
    if (there && message.serial == serial && message.tag == wait.tag) {
      return true;
    }
  }
  return false;
}

// Whom a wait needs; nullopt when it may still end by itself, or cannot be judged.
std::optional<Need> need_of(const Fabric& fabric, const WaitRecord& wait) {
  const auto control = control_of(fabric, wait);
  if (!control) {
    return std::nullopt;
  }
  std::vector<int> missing;
  for (int r = 0; r < wait.size; ++r) {
    const Member& member = control->member(r);
    const bool departed = member.departed.load(std::memory_order_acquire) != 0;
    switch (wait.kind) {
      case WaitKind::Collective:
        if (r != wait.rank && member.posted.load(std::memory_order_acquire) <= wait.sequence) {
          missing.push_back(r);
        }
        break;
      case WaitKind::Slot: {
        const uint64_t retired = member.retired.load(std::memory_order_acquire);
        if (r != wait.rank && !departed && retired + kSlots <= wait.sequence) {
          const uint32_t state = control->slot(retired).state.load(std::memory_order_acquire);
          if (Slot::reached(state, Slot::done(retired))) {
            return std::nullopt;
          }
          missing.push_back(r);
        }
        break;
      }
      case WaitKind::Receive:
        if (wait.from == r || (wait.from < 0 && r != wait.rank && !departed)) {
          if (may_receive(*control, wait, r)) {
            return std::nullopt;
          }
          missing.push_back(r);
        }
        break;
      default:
        return std::nullopt;
    }
  }
  if (missing.empty()) {
    return std::nullopt;
  }
  Need need;
  need.any = wait.kind == WaitKind::Receive && wait.from < 0;
  need.control = *control;
  need.text = wait.text;
  for (const int r : missing) {
    const int place = control->member(r).fabric_rank.load(std::memory_order_relaxed);
    if (place < 0 || place >= fabric.size() || control->member(r).departed.load() != 0) {
      return std::nullopt; // one that has left is another error
    }
    need.ranks.push_back(place);
  }
  return need;
}

std::optional<BlockedRank> blocked_rank(const Fabric& fabric, int rank) {
  const RankStatus* status = fabric.peer(rank).status;
  if (status == nullptr) {
    return std::nullopt;
  }
  BlockedRank result;
  result.version = status->version.load(std::memory_order_seq_cst);
  const uint32_t waiting = status->waiting.load(std::memory_order_acquire);
  if (result.version % 2 != 0 || waiting == 0 || waiting < status->threads.load(std::memory_order_acquire) ||
      status->paused.load(std::memory_order_acquire) != 0) {
    return std::nullopt;
  }
  for (const SharedWait& wait : status->waits) {
    if (wait.active()) {
      auto need = need_of(fabric, wait.load());
      if (!need) {
        return std::nullopt;
      }
      result.needs.push_back(std::move(*need));
    }
  }
  if (result.needs.size() != waiting) {
    return std::nullopt;
  }
  return result;
}

std::string join_ranks(const Fabric& fabric, const std::vector<int>& ranks, const char* separator) {
  std::ostringstream text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text << (i ? separator : "") << "rank " << fabric.job_rank(ranks[i]);
  }
  return text.str();
}

} // namespace

std::optional<Deadlock> find_deadlock(const Fabric& fabric) {
  // Most often the others are at work, which the own wait shows at little cost.
  const auto own = blocked_rank(fabric, fabric.rank());
  if (!own) {
    return std::nullopt;
  }
  for (const Need& need : own->needs) {
    const bool one_waits = std::any_of(need.ranks.begin(), need.ranks.end(), [&](int rank) {
      const RankStatus* status = fabric.peer(rank).status;
      return status != nullptr && status->waiting.load(std::memory_order_relaxed) != 0;
    });
    if (!one_waits) {
      return std::nullopt;
    }
  }
  std::map<int, BlockedRank> blocked;
  for (int r = 0; r < fabric.size(); ++r) {
    if (auto rank = blocked_rank(fabric, r)) {
      blocked.emplace(r, std::move(*rank));
    }
  }
  // [Note: Deadlocks]
  const auto within = [&](int rank) { return blocked.count(rank) != 0; };
  const auto hopeless = [&](const Need& need) {
    return need.any ? std::all_of(need.ranks.begin(), need.ranks.end(), within)
                    : std::any_of(need.ranks.begin(), need.ranks.end(), within);
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = blocked.begin(); it != blocked.end();) {
      if (std::all_of(it->second.needs.begin(), it->second.needs.end(), hopeless)) {
        ++it;
      } else {
        it = blocked.erase(it);
        changed = true;
      }
    }
  }
  if (blocked.empty()) {
    return std::nullopt;
  }
  for (const auto& [rank, state] : blocked) {
    if (fabric.peer(rank).status->version.load(std::memory_order_seq_cst) != state.version || !fabric.alive(rank)) {
      return std::nullopt;
    }
  }

  std::vector<int> path{blocked.begin()->first};
  while (true) {
    const auto& needed = blocked.at(path.back()).needs[0].ranks;
    const int next = *std::find_if(needed.begin(), needed.end(), within);
    const auto seen = std::find(path.begin(), path.end(), next);
    if (seen != path.end()) {
      path.erase(path.begin(), seen);
      path.push_back(next);
      break;
    }
    path.push_back(next);
  }
  Deadlock result;
  std::ostringstream text;
  text << "neuron: deadlock: " << join_ranks(fabric, path, " waits for ") << ", and nothing can match:";
  for (const auto& [rank, state] : blocked) {
    for (const Need& need : state.needs) {
      text << "\n  rank " << fabric.job_rank(rank) << ": " << need.text << ", waits for "
           << join_ranks(fabric, need.ranks, need.any ? " or " : ", ");
      const bool known = std::any_of(result.groups.begin(), result.groups.end(), [&](const ControlBlock& group) {
        return group.base() == need.control.base();
      });
      if (!known) {
        result.groups.push_back(need.control);
      }
    }
  }
  result.text = text.str();
  return result;
}

} // namespace trn
