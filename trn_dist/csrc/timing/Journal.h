#pragma once

// What happened in virtual time: one record for each operator, collective and wait of the host, in the order of the
// program. The records of a step are what StepTimes is summed from; with tracing on they also go to a file. Written by
// VirtualClock under its lock.

#include "timing/ChipRates.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace trn {

// What an operator keeps busy.
enum class Engine : uint8_t { Tensor, Vector, Scalar, GpSimd, Dma };
inline constexpr size_t kEngines = 5;
const char* engine_name(Engine engine);

enum class Activity : uint8_t { Operator, Collective, HostWait };

struct Record {
  Picoseconds start = 0;
  Picoseconds end = 0;
  // Of a collective: when this rank was ready for it. Of an operator: when the engine began, after the launch.
  Picoseconds ready = 0;
  int64_t bytes = 0; // of HBM traffic, or of a collective's message
  double flops = 0; // of the matrix engine, as the shapes say, without padding
  uint64_t sequence = 0; // of a collective in its group
  int64_t memory_bytes = -1; // allocated on the device at launch; -1: not asked for
  uint32_t name = 0; // see name_id
  uint32_t group = 0; // see name_id; of a collective
  int32_t first_rank = 0; // of a collective's group, in the job: tells apart groups of one name
  int32_t stream = 0;
  int16_t device = 0;
  Activity activity = Activity::Operator;
  Engine engine = Engine::Vector;
  bool host_bound = false; // of an operator: it started as soon as the host had launched it
  bool hbm_bound = false; // of an operator: HBM took longer than the engine
};

// A small number for a name, the same for equal names; and back.
uint32_t name_id(const std::string& name);
std::string name_of(uint32_t id);

// How one step's time was spent. The parts from `engines` to `idle` add up to end - start exactly.
struct StepTimes {
  struct Group {
    uint32_t name = 0;
    Picoseconds exposed = 0; // transfers that no operator of this rank covers
    Picoseconds waiting = 0; // for a later member of the group, not covered either
    Picoseconds busy = 0; // all transfers, covered or not; not a part of the sum
    int64_t collectives = 0;
    int64_t bytes = 0;
  };
  struct Operator {
    uint32_t name = 0;
    int64_t count = 0;
    Picoseconds busy = 0;
    Picoseconds hbm_bound = 0; // of busy
    int64_t bytes = 0;
    double flops = 0;
  };

  Picoseconds start = 0;
  Picoseconds end = 0;
  std::array<Picoseconds, kEngines> engines{};
  Picoseconds launch = 0; // between an operator's launch and its engine's start
  Picoseconds host_bound = 0; // the device had nothing to do because the host had not launched it yet
  Picoseconds idle = 0; // nothing on the device, the host waiting
  std::vector<Group> groups; // exposed and waiting are parts of the sum
  std::vector<Operator> operators;
  Picoseconds hbm_bound = 0; // of engines
  double flops = 0;
  int64_t hbm_bytes = 0;
};

// The sum of two stretches of one step, of which `later` begins where `step` ends.
void append(StepTimes& step, const StepTimes& later);

// Attributes every picosecond of [start, end) once. At each moment, in this order: an operator that runs (the first that
// started, if several do) counts for its launch or its engine; before an operator that the host launched late, time in
// which the host was at work counts as host_bound; a transfer counts as exposed; a wait for peers as waiting; else the host
// was at work (host_bound) or not (idle). `host_at_end`: the step ended with the host at work and the device done.
StepTimes account(const std::vector<Record>& records, Picoseconds start, Picoseconds end, bool host_at_end);

// The records of the step that goes on, and of what reaches into it.
class StepAccount {
 public:
  void add(Record&& record) {
    records_.push_back(std::move(record));
  }
  size_t size() const {
    return records_.size();
  }
  // Accounts for what lies before `end` and drops the records that are over by then.
  void sum_up(Picoseconds end, bool host_at_end);
  // Ends the step where it was summed up to.
  StepTimes next_step();
  // From time 0 to `end`, or to where it was summed up if that is later. Changes nothing.
  StepTimes so_far(Picoseconds end) const;

 private:
  std::vector<Record> records_;
  StepTimes step_; // of the part that is summed up already
  StepTimes ended_; // the steps before
};

} // namespace trn
