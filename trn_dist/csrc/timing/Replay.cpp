#include "timing/Replay.h"

#include "timing/VirtualClock.h"

#include <c10/util/Exception.h>

#include <set>

namespace trn {

namespace {

// Members of one collective, and both ends of one message, have this in common: group, its ranks, sequence. A message
// queues behind the sender's earlier ones to that rank; a collective behind its group's.
using GroupKey = std::tuple<std::string, std::vector<int>, int64_t>; // the last: -1, or the pair of a message's ranks

GroupKey queue_key(const RecordedTransfer& transfer) {
  const bool message = transfer.role != RecordedTransfer::Collective;
  return {transfer.group, transfer.ranks, message ? static_cast<int64_t>(transfer.sequence >> 32) : -1};
}

} // namespace

Replay::Replay(std::vector<RankProgram> programs, bool lone) : programs_(std::move(programs)), lone_(lone) {
  std::map<GroupKey, std::map<uint64_t, size_t>> groups;
  std::set<int> ranks;
  for (const RankProgram& program : programs_) {
    ranks.insert(program.rank);
  }
  for (const RankProgram& program : programs_) {
    auto& members = members_.emplace_back();
    for (const RecordedTransfer& transfer : program.transfers) {
      Member member{};
      if (transfer.role == RecordedTransfer::Undescribed) { // the run ended before it came about
        member.shared = SIZE_MAX;
        members.push_back(member);
        continue;
      }
      auto& sequences = groups[queue_key(transfer)];
      const auto [it, fresh] = sequences.emplace(transfer.sequence, transfers_.size());
      if (fresh) {
        SharedTransfer shared;
        shared.operation = transfer.role == RecordedTransfer::Collective ? transfer.operation : "send";
        shared.description = transfer.description;
        shared.ranks = transfer.ranks;
        if (transfer.role != RecordedTransfer::Collective) {
          const auto pair = static_cast<size_t>(transfer.sequence >> 32);
          shared.source = transfer.ranks.at(pair / transfer.ranks.size());
          shared.target = transfer.ranks.at(pair % transfer.ranks.size());
        }
        transfers_.push_back(std::move(shared));
        members_of_.push_back(0);
      }
      SharedTransfer& shared = transfers_[it->second];
      shared.bytes = std::max(shared.bytes, transfer.bytes);
      member.shared = it->second;
      member.receives = transfer.role == RecordedTransfer::Receive;
      members_of_[it->second] += member.receives ? 0 : 1;
      members.push_back(member);
    }
  }
  queue_of_.resize(transfers_.size());
  for (const auto& [key, sequences] : groups) {
    Queue queue;
    for (const auto& [sequence, transfer] : sequences) {
      queue.order.push_back(transfer);
      queue_of_[transfer] = queues_.size();
    }
    queues_.push_back(std::move(queue));
  }
}

std::vector<std::vector<StepTimes>> Replay::run(const ChipRates& rates, const std::vector<Picoseconds>& durations) {
  TORCH_CHECK_VALUE(
      durations.size() == transfers_.size(),
      "replay: ",
      transfers_.size(),
      " transfers need as many durations, got ",
      durations.size());
  durations_ = &durations;
  progress_.assign(transfers_.size(), {});
  for (size_t i = 0; i < transfers_.size(); ++i) {
    const SharedTransfer& transfer = transfers_[i];
    const bool message = transfer.source >= 0;
    // A message starts with its sender; a collective with the last of its members.
    progress_[i].missing = message ? 1 : lone_ ? members_of_[i] : transfer.ranks.size();
  }
  for (Queue& queue : queues_) {
    queue.next = 0;
    queue.busy_until = 0;
  }
  states_.clear();
  states_.resize(programs_.size());
  std::vector<std::vector<OperatorCost>> costs(programs_.size());
  for (size_t i = 0; i < programs_.size(); ++i) {
    for (const RecordedWork& work : programs_[i].works) {
      costs[i].push_back(price(work.work, rates));
    }
  }
  bool moved = true;
  while (moved) {
    moved = false;
    for (size_t i = 0; i < programs_.size(); ++i) {
      moved = advance(i, rates, costs[i]) || moved;
    }
  }
  std::vector<std::vector<StepTimes>> steps;
  for (size_t i = 0; i < programs_.size(); ++i) {
    if (states_[i].next < programs_[i].actions.size()) {
      refuse_stuck();
    }
    steps.push_back(std::move(states_[i].steps));
  }
  return steps;
}

void Replay::refuse_stuck() const {
  for (size_t i = 0; i < programs_.size(); ++i) {
    const RankState& state = states_[i];
    if (state.next >= programs_[i].actions.size()) {
      continue;
    }
    // The first transfer that it enqueued and that never came about.
    for (size_t t = 0; t < state.ready.size(); ++t) {
      if (times_of(i, t).has_value()) {
        continue;
      }
      const RecordedTransfer& transfer = programs_[i].transfers[t];
      TORCH_CHECK_VALUE(
          false,
          "replay: rank ",
          programs_[i].rank,
          " waits for ",
          transfer.role == RecordedTransfer::Undescribed ? "a call that ended without a result"
                                                         : transfer.operation + " of group " + transfer.group,
          ", which other ranks did not record: did the run end with an error?");
    }
  }
  TORCH_CHECK_VALUE(false, "replay: the recorded programs do not fit together");
}

void Replay::start_what_can(size_t index) {
  Queue& queue = queues_[index];
  while (queue.next < queue.order.size()) {
    const size_t id = queue.order[queue.next];
    Progress& progress = progress_[id];
    if (progress.missing > 0) {
      return;
    }
    SharedTransfer& transfer = transfers_[id];
    transfer.start = std::max(queue.busy_until, progress.ready);
    transfer.end = transfer.start + (*durations_)[id];
    queue.busy_until = transfer.end;
    progress.timed = true;
    ++queue.next;
  }
}

void Replay::enqueued(size_t program, size_t transfer) {
  const Member& member = members_[program][transfer];
  if (member.shared == SIZE_MAX || member.receives) {
    return;
  }
  Progress& progress = progress_[member.shared];
  progress.ready = std::max(progress.ready, states_[program].ready[transfer]);
  progress.missing -= 1;
  start_what_can(queue_of_[member.shared]);
}

std::optional<Transfer> Replay::times_of(size_t program, size_t transfer) const {
  const Member& member = members_[program][transfer];
  if (member.shared == SIZE_MAX || !progress_[member.shared].timed) {
    return std::nullopt;
  }
  const SharedTransfer& shared = transfers_[member.shared];
  const Picoseconds ready = states_[program].ready.at(transfer);
  if (member.receives) {
    const Picoseconds start = std::max(shared.start, ready);
    return Transfer{ready, start, start + (*durations_)[member.shared]};
  }
  return Transfer{ready, shared.start, shared.end};
}

std::optional<Picoseconds> Replay::time_of(size_t program, const Action& action) const {
  const RankState& state = states_[program];
  const auto index = static_cast<size_t>(action.value);
  switch (action.flag) {
    case Origin::Transfer: {
      const auto times = times_of(program, index);
      return times.has_value() ? std::optional<Picoseconds>(times->end) : std::nullopt;
    }
    case Origin::Moment: {
      Picoseconds time = state.moments.at(index);
      for (const size_t transfer : state.moment_after.at(index)) {
        const auto times = times_of(program, transfer);
        if (!times.has_value()) {
          return std::nullopt;
        }
        time = std::max(time, times->end);
      }
      return time;
    }
    case Origin::Launch:
      return state.launches.at(index);
    default:
      TORCH_CHECK_VALUE(false, "replay: a wait for nothing that the program of rank ", programs_[program].rank, " did");
  }
}

bool Replay::advance(size_t index, const ChipRates& rates, const std::vector<OperatorCost>& costs) {
  const RankProgram& program = programs_[index];
  RankState& state = states_[index];
  Clocks& clocks = state.clocks;
  const size_t began = state.next;
  for (; state.next < program.actions.size(); ++state.next) {
    const Action& action = program.actions[state.next];
    const c10::DeviceIndex device = static_cast<c10::DeviceIndex>(action.device);
    switch (action.kind) {
      case Action::Launch: {
        const auto work = static_cast<size_t>(action.value);
        Record record =
            clocks.launch(device, action.stream, program.works.at(work).name, costs[work], action.flag != 0, rates);
        state.launches.push_back(record.end);
        state.account.add(std::move(record));
        break;
      }
      case Action::Enqueue:
        TORCH_CHECK_VALUE(
            state.ready.size() < program.transfers.size(),
            "replay: the record of rank ",
            program.rank,
            " has more calls than descriptions of them");
        state.ready.push_back(clocks.enqueue(device, action.stream, action.flag != 0, rates));
        enqueued(index, state.ready.size() - 1);
        break;
      case Action::StreamWait: {
        const auto time = time_of(index, action);
        if (!time.has_value()) {
          return state.next > began;
        }
        clocks.stream_wait(device, action.stream, *time);
        break;
      }
      case Action::HostWait:
      case Action::HostWaitStream:
      case Action::HostWaitDevice: {
        const auto time = action.kind == Action::HostWait ? time_of(index, action)
            : action.kind == Action::HostWaitStream       ? std::optional(clocks.device(device).tail(action.stream))
                                                          : std::optional(clocks.device_time(device));
        if (!time.has_value()) {
          return state.next > began;
        }
        if (auto record = clocks.host_wait(*time)) {
          state.account.add(std::move(*record));
        }
        break;
      }
      case Action::StreamWaitStream: {
        const auto other_device = static_cast<c10::DeviceIndex>(action.value >> 32);
        const Picoseconds time = clocks.stream_time(other_device, action.value & 0xFFFFFFFF);
        clocks.stream_wait(device, action.stream, time);
        break;
      }
      case Action::Poll:
        clocks.host += rates.host_poll_ps;
        break;
      case Action::Record:
        state.moments.push_back(clocks.stream_time(device, action.stream));
        state.moment_after.emplace_back();
        break;
      case Action::RecordAfter:
        state.moment_after.at(static_cast<size_t>(action.stream)).push_back(static_cast<size_t>(action.value));
        break;
      case Action::Enter: {
        const auto id = static_cast<size_t>(action.value);
        const auto times = times_of(index, id);
        if (!times.has_value()) {
          return state.next > began;
        }
        const RecordedTransfer& transfer = program.transfers.at(id);
        Record record;
        record.activity = Activity::Collective;
        record.ready = times->ready;
        record.start = times->start;
        record.end = times->end;
        record.bytes = transfer.bytes;
        record.sequence = transfer.sequence;
        record.name = name_id(transfer.operation);
        record.group = name_id(transfer.description);
        record.stream = transfer.stream;
        record.device = transfer.device;
        state.account.add(std::move(record));
        break;
      }
      case Action::MarkStep: {
        const Picoseconds tail = clocks.device(device).tail(action.stream);
        state.account.sum_up(std::max(clocks.host, tail), /*host_at_end=*/clocks.host >= tail);
        state.steps.push_back(state.account.next_step());
        break;
      }
    }
  }
  return state.next > began;
}

} // namespace trn
