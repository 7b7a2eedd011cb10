#include "timing/Journal.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <numeric>

namespace trn {

namespace {

struct Names {
  std::mutex mutex;
  ska::flat_hash_map<std::string, uint32_t> ids;
  std::deque<std::string> names;
};

Names& names() {
  static auto* table = new Names();
  return *table;
}

// A stretch in which no operator ran.
struct Gap {
  Picoseconds start;
  Picoseconds end;
  bool host_bound; // what ended it was launched just then
};

// An entry or exit of something that explains gaps.
struct Change {
  Picoseconds time;
  const Record* record;
  int transferring; // +1, -1 or 0
  int waiting;
};

template <typename Entry>
Entry& entry_of(std::vector<Entry>& entries, uint32_t name) {
  auto it = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) { return entry.name == name; });
  if (it == entries.end()) {
    entries.emplace_back();
    entries.back().name = name;
    return entries.back();
  }
  return *it;
}

// Operators, and the gaps between them.
std::vector<Gap> account_operators(
    const std::vector<Record>& records,
    Picoseconds start,
    Picoseconds end,
    bool host_at_end,
    StepTimes& step) {
  std::vector<const Record*> operators;
  operators.reserve(records.size());
  for (const Record& record : records) {
    if (record.activity == Activity::Operator && record.end > start && record.start < end) {
      operators.push_back(&record);
    }
  }
  std::stable_sort(
      operators.begin(), operators.end(), [](const Record* a, const Record* b) { return a->start < b->start; });
  std::vector<Gap> gaps;
  ska::flat_hash_map<uint32_t, size_t> index_of;
  Picoseconds frontier = start;
  for (const Record* record : operators) {
    // Counted in the step in which it begins.
    if (record->start >= start) {
      const auto [it, fresh] = index_of.emplace(record->name, step.operators.size());
      if (fresh) {
        step.operators.emplace_back();
        step.operators.back().name = record->name;
      }
      auto& sum = step.operators[it->second];
      const Picoseconds busy = record->end - record->start;
      sum.count += 1;
      sum.busy += busy;
      sum.hbm_bound += record->hbm_bound ? busy : 0;
      sum.bytes += record->bytes;
      sum.flops += record->flops;
      step.flops += record->flops;
      step.hbm_bytes += record->bytes;
    }
    const Picoseconds from = std::max(record->start, frontier);
    const Picoseconds to = std::min(record->end, end);
    if (to <= from) {
      continue;
    }
    if (from > frontier) {
      gaps.push_back({frontier, from, record->host_bound});
    }
    const Picoseconds launched = std::clamp(record->ready, from, to);
    step.launch += launched - from;
    step.engines[static_cast<size_t>(record->engine)] += to - launched;
    step.hbm_bound += record->hbm_bound ? to - launched : 0;
    frontier = to;
  }
  if (frontier < end) {
    gaps.push_back({frontier, end, host_at_end});
  }
  return gaps;
}

} // namespace

const char* engine_name(Engine engine) {
  static constexpr std::array<const char*, kEngines> kNames = {"tensor", "vector", "scalar", "gpsimd", "dma"};
  return kNames[static_cast<size_t>(engine)];
}

uint32_t name_id(const std::string& name) {
  Names& table = names();
  std::lock_guard<std::mutex> guard(table.mutex);
  if (const auto known = table.ids.find(name); known != table.ids.end()) {
    return known->second;
  }
  const auto id = static_cast<uint32_t>(table.names.size());
  table.ids.emplace(name, id);
  table.names.push_back(name);
  return id;
}

std::string name_of(uint32_t id) {
  Names& table = names();
  std::lock_guard<std::mutex> guard(table.mutex);
  return table.names.at(id);
}

void append(StepTimes& step, const StepTimes& later) {
  step.end = later.end;
  for (size_t i = 0; i < kEngines; ++i) {
    step.engines[i] += later.engines[i];
  }
  step.launch += later.launch;
  step.host_bound += later.host_bound;
  step.idle += later.idle;
  for (const StepTimes::Group& group : later.groups) {
    auto& sum = entry_of(step.groups, group.name);
    sum.exposed += group.exposed;
    sum.waiting += group.waiting;
    sum.busy += group.busy;
    sum.collectives += group.collectives;
    sum.bytes += group.bytes;
  }
  for (const StepTimes::Operator& op : later.operators) {
    auto& sum = entry_of(step.operators, op.name);
    sum.count += op.count;
    sum.busy += op.busy;
    sum.hbm_bound += op.hbm_bound;
    sum.bytes += op.bytes;
    sum.flops += op.flops;
  }
  step.hbm_bound += later.hbm_bound;
  step.flops += later.flops;
  step.hbm_bytes += later.hbm_bytes;
}

StepTimes account(const std::vector<Record>& records, Picoseconds start, Picoseconds end, bool host_at_end) {
  StepTimes step;
  step.start = start;
  step.end = end;
  const std::vector<Gap> gaps = account_operators(records, start, end, host_at_end, step);

  std::vector<Change> changes;
  for (const Record& record : records) {
    if (record.end <= start) {
      continue;
    }
    if (record.activity == Activity::HostWait) {
      changes.push_back({record.start, &record, 0, 0});
      changes.push_back({record.end, &record, 0, 0});
    } else if (record.activity == Activity::Collective) {
      auto& group = entry_of(step.groups, record.group);
      group.busy += std::max<Picoseconds>(0, std::min(record.end, end) - std::max(record.start, start));
      if (record.end <= end) { // counted in the step in which it ends
        group.collectives += 1;
        group.bytes += record.bytes;
      }
      changes.push_back({record.ready, &record, 0, 1});
      changes.push_back({record.start, &record, 1, -1});
      changes.push_back({record.end, &record, -1, 0});
    }
  }
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.time < b.time; });

  std::vector<const Record*> transferring;
  std::vector<const Record*> waiting;
  bool host_waits = false;
  const auto drop = [](std::vector<const Record*>& list, const Record* record) {
    list.erase(std::find(list.begin(), list.end(), record));
  };
  size_t next = 0;
  // Brings the state up to what holds from `time` on.
  const auto advance = [&](Picoseconds time) {
    for (; next < changes.size() && changes[next].time <= time; ++next) {
      const Change& change = changes[next];
      if (change.record->activity == Activity::HostWait) {
        host_waits = change.time < change.record->end;
        continue;
      }
      if (change.waiting != 0) {
        change.waiting > 0 ? waiting.push_back(change.record) : drop(waiting, change.record);
      }
      if (change.transferring != 0) {
        change.transferring > 0 ? transferring.push_back(change.record) : drop(transferring, change.record);
      }
    }
  };
  for (const Gap& gap : gaps) {
    Picoseconds from = gap.start;
    while (from < gap.end) {
      advance(from);
      const Picoseconds to = next < changes.size() && changes[next].time < gap.end ? changes[next].time : gap.end;
      const Picoseconds length = to - from;
      if (gap.host_bound && !host_waits) {
        step.host_bound += length;
      } else if (!transferring.empty()) {
        entry_of(step.groups, transferring.front()->group).exposed += length;
      } else if (!waiting.empty()) {
        entry_of(step.groups, waiting.front()->group).waiting += length;
      } else if (!host_waits) {
        step.host_bound += length;
      } else {
        step.idle += length;
      }
      from = to;
    }
  }
  return step;
}

void StepAccount::sum_up(Picoseconds end, bool host_at_end) {
  if (end <= step_.end) {
    return;
  }
  append(step_, account(records_, step_.end, end, host_at_end));
  std::erase_if(records_, [&](const Record& record) { return record.end <= end; });
}

StepTimes StepAccount::next_step() {
  StepTimes next;
  next.start = next.end = step_.end;
  append(ended_, step_);
  return std::exchange(step_, std::move(next));
}

StepTimes StepAccount::so_far(Picoseconds end) const {
  StepTimes times = ended_;
  append(times, step_);
  if (end > step_.end) {
    append(times, account(records_, step_.end, end, /*host_at_end=*/false));
  }
  return times;
}

} // namespace trn
