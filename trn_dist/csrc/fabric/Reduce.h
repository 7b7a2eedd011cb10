#pragma once

// The arithmetic of reductions across ranks: each element is reduced along one fixed tree, whoever does the work.
//
// [Note: The tree]
// Inputs are paired as a binary counter pairs them: ((0+1)+(2+3))+((4+5)+6) for seven ranks. The sum over an aligned
// block of 2^k ranks is then a subtree, so a hierarchical reduction over such blocks has the bits of the flat one, and
// the order never depends on timing. float16, bfloat16 and float8 are accumulated in float32 and rounded once.

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace trn {

enum class Reduction : uint8_t { Sum, Avg, Product, Min, Max, BitAnd, BitOr, BitXor, PremulSum };

const char* reduction_name(Reduction reduction);

// nullptr, or why this reduction of this dtype does not exist.
const char* why_unsupported(c10::ScalarType dtype, Reduction reduction);

// Reduces `num_inputs` arrays of `numel` elements into each of `num_outputs` arrays.
//   factors: for PremulSum, what each input is multiplied with first; unused otherwise.
//   streaming: results are written past the caches (Copy.h). Only where no output is an input.
// An output may be one of the inputs, at the same address; other overlaps are not allowed.
// Semantics: Sum of integers wraps; Avg divides the sum by num_inputs once, integers truncate towards zero as in NCCL;
// Min and Max propagate NaN as torch.minimum does; for bool Sum is "or" and Product is "and". Complex dtypes are reduced as
// pairs of reals by the caller.
void reduce(
    c10::ScalarType dtype,
    Reduction reduction,
    const std::byte* const* inputs,
    const double* factors,
    int num_inputs,
    std::byte* const* outputs,
    int num_outputs,
    uint64_t numel,
    bool streaming = false);

// What reduce() accumulates a dtype in: float32 for narrower floating point, else the dtype itself.
c10::ScalarType accumulator_type(c10::ScalarType dtype);
// From elements to accumulators, and back as reduce() ends: divided by `num_inputs` for Avg, rounded once.
void widen(c10::ScalarType dtype, std::byte* accumulators, const std::byte* elements, uint64_t numel);
void narrow(
    c10::ScalarType dtype,
    Reduction reduction,
    int num_inputs,
    std::byte* elements,
    const std::byte* accumulators,
    uint64_t numel);

} // namespace trn
