#pragma once

// The modelled logical core in the units of virtual time: picoseconds for a byte, a floating-point operation, an element.
// Python derives the figures from configs/chips/*.toml (trn_dist/timing/chip_rates.py), efficiencies included, and sets
// them at the first use of virtual time. Read by OperatorCost and VirtualClock.

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>

namespace trn {

using Picoseconds = int64_t;

inline constexpr size_t kScalarTypes = static_cast<size_t>(c10::ScalarType::NumOptions);
using ByDtype = std::array<double, kScalarTypes>;

// VectorE, ScalarE or GpSimdE of a logical core.
struct ElementRates {
  ByDtype ps_per_element{}; // for one pass with one input
  double instruction_ps = 0; // static cost of an instruction
};

struct ChipRates {
  std::string chip;
  Picoseconds host_operator_ps = 0; // of the host, to launch an operator
  Picoseconds host_poll_ps = 0; // of the host, to ask whether something is done
  Picoseconds device_operator_ps = 0; // from launch to start on the device
  Picoseconds dma_start_ps = 0;
  int64_t cores = 1; // physical cores in a logical one; each has its own engines
  int64_t tensor_rows = 128; // of the systolic array
  int64_t tensor_columns = 128;
  ByDtype tensor_ps_per_flop{}; // of one physical core
  ElementRates vector;
  ElementRates scalar;
  ElementRates gpsimd;
  double hbm_ps_per_byte = 0;
  double dma_ps_per_byte = 0;
  double host_ps_per_byte = 0; // between the host's memory and HBM
};

// The rates of this process; loaded at the first call, which may run Python.
const ChipRates& chip_rates();
// From now on; times that were told before stand.
void set_chip_rates(ChipRates rates);
// What chip_rates() calls when nobody has set the rates; it must call set_chip_rates.
void set_chip_rates_loader(std::function<void()> loader);

} // namespace trn
