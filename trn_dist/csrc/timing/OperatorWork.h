#pragma once

// What an operator has to do, in numbers that no chip's rates are in yet: sizes of matrix products, elements, bytes. It is
// worked out from a call's tensors once; OperatorCost prices it by the present chip's rates, and a recorded program keeps
// it, so that Replay can price it by another's.

#include "timing/ChipRates.h"
#include "timing/Journal.h"

#include <array>
#include <cstdint>

namespace trn {

enum class OperatorClass : uint8_t {
  Elementwise, // passes on VectorE and ScalarE, which work on tiles one after the other and so at the same time
  Matmul,
  Attention,
  AttentionBackward,
  Convolution,
  ConvolutionBackward,
  Gather, // reads rows of a table
  Scatter, // writes, or adds to, rows of a table
  Sort,
  Copy, // by DMA
  Fill, // writes only
  HostCopy, // between the host's memory and HBM
  Stated, // by the program: a product and passes, at the same time
};

struct OperatorWork {
  OperatorClass kind = OperatorClass::Elementwise;
  bool causal = false;
  c10::ScalarType type = c10::ScalarType::Float; // of elements
  c10::ScalarType operand = c10::ScalarType::Float; // of a matrix product
  float vector_passes = 0;
  float scalar_passes = 0;
  float gpsimd_passes = 0;
  float products = 1; // a complex matrix product is four real ones
  // A product's batch, m, k, n; attention's heads, rows, columns, width of queries, width of values.
  std::array<int64_t, 5> sizes{};
  int64_t elements = 0; // of one pass
  int64_t bytes = 0; // of HBM traffic, or to and from the host
  int64_t longer_bytes = 0; // of a copy: of what is read and what is written the more
};

// What an operator takes, as OperatorCost.cpp tells it.
struct OperatorCost {
  Engine engine = Engine::Vector;
  Picoseconds time = 0; // on the device, without the launch
  bool hbm_bound = false;
  int64_t bytes = 0; // of HBM traffic
  double flops = 0; // of the matrix engine
  OperatorWork work{};
};

OperatorCost price(const OperatorWork& work, const ChipRates& rates);

} // namespace trn
