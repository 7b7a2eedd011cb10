#include "timing/CollectiveCost.h"

#include "fabric/Futex.h"
#include "fabric/Host.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;

// A table takes tens of milliseconds; whoever makes it may have died over it.
constexpr std::chrono::seconds kPatience{5};

CostTableLoader& loader() {
  static auto* function = new CostTableLoader();
  return *function;
}

} // namespace

void SharedCostTable::prepare(const std::vector<int>& ranks, const char* operation) {
  if (C10_LIKELY(state.load(std::memory_order_acquire) == Made)) {
    return;
  }
  uint32_t found = Empty;
  if (!state.compare_exchange_strong(found, BeingMade)) {
    HostLockRelease released;
    const auto deadline = Clock::now() + kPatience;
    while (state.load(std::memory_order_acquire) != Made && Clock::now() < deadline) {
      futex_wait(&state, BeingMade, std::chrono::milliseconds(50));
    }
  }
  if (state.load(std::memory_order_acquire) == Made) {
    return;
  }
  TORCH_CHECK(loader() != nullptr, "neuron: collectives have no cost: trn_dist.neuron has not been imported");
  std::vector<CostPiece> made;
  try {
    made = loader()(ranks, operation);
    TORCH_CHECK(
        !made.empty() && made.front().from_bytes == 0 && made.size() <= kPieces,
        "neuron: the cost table of ",
        operation,
        " must have 1 to ",
        kPieces,
        " pieces, the first from 0 bytes; it has ",
        made.size());
  } catch (...) {
    state.store(Empty); // the next rank finds the same error, and says so
    futex_wake_all(&state);
    throw;
  }
  // Two ranks may get here, if the first was slow; they write the same.
  std::copy(made.begin(), made.end(), pieces);
  size = static_cast<uint32_t>(made.size());
  state.store(Made, std::memory_order_release);
  futex_wake_all(&state);
}

Picoseconds SharedCostTable::time_ps(int64_t nbytes) const {
  const CostPiece* piece = std::upper_bound(
      pieces, pieces + size, nbytes, [](int64_t n, const CostPiece& candidate) { return n < candidate.from_bytes; });
  --piece;
  // In two parts, so that no product overflows below 2^44 bytes.
  const Picoseconds beta = piece->beta_ps_per_mib;
  return piece->alpha_ps + (nbytes >> 20) * beta + (((nbytes & 0xFFFFF) * beta) >> 20);
}

void set_cost_table_loader(CostTableLoader function) {
  loader() = std::move(function);
}

} // namespace trn
