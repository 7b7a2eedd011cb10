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
    uint64_t numel);

} // namespace trn
