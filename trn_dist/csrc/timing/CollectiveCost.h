#pragma once

// What the collectives of one group cost in virtual time: for each operation the straight pieces that
// trn_dist/collectives works out from the topology. A table lies in the group's shared memory, is made by one of its ranks
// before the first call of the operation and read by whichever rank arrives last. Held in ControlBlock.

#include "timing/ChipRates.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace trn {

// From `from_bytes` on, alpha_ps + bytes * beta_ps_per_mib / 2^20, rounded down.
struct CostPiece {
  int64_t from_bytes;
  Picoseconds alpha_ps;
  Picoseconds beta_ps_per_mib;
};

// All zero at first.
struct SharedCostTable {
  static constexpr uint32_t kPieces = 32;
  enum State : uint32_t { Empty, BeingMade, Made };

  std::atomic<uint32_t> state; // futex
  uint32_t size;
  CostPiece pieces[kPieces]; // by size; the first from 0

  // Returns once the table is made, by this rank or another; if the other takes too long, by this one. `ranks`: of the
  // group, in the job; `operation`: one of trn_dist.collectives.OPERATIONS. May run Python, so no lock may be held that
  // Python code could wait for.
  void prepare(const std::vector<int>& ranks, const char* operation);
  // Of a table that is made.
  Picoseconds time_ps(int64_t nbytes) const;
};

// Makes the pieces of a table; set by trn_dist.neuron.
using CostTableLoader =
    std::function<std::vector<CostPiece>(const std::vector<int>& ranks, const std::string& operation)>;
void set_cost_table_loader(CostTableLoader loader);

} // namespace trn
