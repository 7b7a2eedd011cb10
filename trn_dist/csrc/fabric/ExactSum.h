#pragma once

// Sums of floating-point numbers without error: the exact value is kept and rounded once, so no order and no grouping of
// the addends shows in the result.
//
// [Note: Exact sums]
// An exact value is a list of float64 numbers that do not overlap (Shewchuk 1997, "Adaptive Precision Floating-Point
// Arithmetic", grow-expansion): adding a number splits each addition into its rounded result and its error, which float64
// can hold. float32 addends of like size need one such number, the whole range of float32 needs six. The value is first
// rounded to odd in float64 (inexact results get an odd last bit), which a second rounding, to float32, turns into the
// correctly rounded result (Boldo and Melquiond 2008). An exact zero is +0. With an infinity or a NaN among the addends the
// result is that of ordinary addition.

#include "fabric/Reduce.h"

#include <cstdint>

namespace trn {

// A reduction with this bit beside its number is carried out exactly. Ranks that do not agree on it disagree on the call.
constexpr uint8_t kExact = 0x80;

inline bool is_exact(Reduction reduction) {
  return (static_cast<uint8_t>(reduction) & kExact) != 0;
}
// The same reduction without the bit.
inline Reduction plain(Reduction reduction) {
  return static_cast<Reduction>(static_cast<uint8_t>(reduction) & ~kExact);
}
// The same reduction with the bit, for the sums that can be exact: of float32 and float64.
inline Reduction exact(c10::ScalarType dtype, Reduction reduction) {
  const bool sum = reduction == Reduction::Sum || reduction == Reduction::Avg || reduction == Reduction::PremulSum;
  const bool real = dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
  return sum && real ? static_cast<Reduction>(static_cast<uint8_t>(reduction) | kExact) : reduction;
}

class ExactAccumulator {
 public:
  void add(double value);
  // Rounded to odd: to be rounded once more, to float32.
  double to_odd() const;
  // Rounded to nearest.
  double to_nearest() const;

 private:
  struct Rounded {
    double head; // the nearest float64, but for ties
    double tail; // has the sign of what is missing; 0 if nothing is
    double rest; // the sign of what is missing beyond the tail
  };
  Rounded round() const;

  static constexpr int kMaxParts = 48; // float64's whole range of 2,098 bits in parts of 53, and some to spare
  double parts_[kMaxParts];
  int count_ = 0;
  double special_ = 0; // sum of infinities and NaNs
};

// Sums `num_inputs` arrays of `numel` float32 or float64 numbers, each multiplied with its factor (null: none), divides by
// `divisor` and rounds once (twice if the divisor is no power of two) to the inputs' type.
template <typename T>
void exact_sum(T* out, const T* const* inputs, const double* factors, int num_inputs, double divisor, uint64_t numel);

// Adds `addends` to an exact value for each element: `parts` are arrays of its float64 numbers. What does not fit goes to
// `rest`; returns whether there is any.
bool exact_add(double* const* parts, int num_parts, const float* addends, double* rest, uint64_t numel);

// out = (sum of the rows of `numel` float64 numbers) / divisor, rounded once to float32.
void exact_round(float* out, const double* const* rows, int num_rows, double divisor, uint64_t numel);

// The sum of squares of float32 numbers as one integer of kSquareLimbs limbs of 32 bits, the lowest first, each in an
// int64_t so that limbs of several sums can be added as they are. Its unit is 2^-298, the square of float32's smallest
// number. Behind them come a count of infinities and one of NaNs.
constexpr int kSquareLimbs = 22;
constexpr int kSquareWords = kSquareLimbs + 2;
void add_squares(int64_t* words, const float* values, uint64_t numel);

} // namespace trn
