#include "fabric/ExactSum.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace trn {

namespace {

// a + b exactly, as the rounded sum and its error.
inline double two_sum(double a, double b, double& error) {
  const double sum = a + b;
  const double shadow = sum - a;
  error = (a - (sum - shadow)) + (b - shadow);
  return sum;
}

constexpr uint64_t kBlock = 512;

template <typename T>
T rounded(const ExactAccumulator& sum, double divisor) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return sum.to_nearest() / divisor;
  } else {
    return static_cast<T>(sum.to_odd() / divisor);
  }
}

} // namespace

void ExactAccumulator::add(double value) {
  if (!std::isfinite(value)) {
    special_ += value;
    return;
  }
  int kept = 0;
  for (int i = 0; i < count_; ++i) {
    double error = 0;
    value = two_sum(value, parts_[i], error);
    if (error != 0) {
      parts_[kept++] = error;
    }
  }
  if (!std::isfinite(value)) { // beyond float64
    special_ += value;
    value = 0;
  }
  parts_[kept++] = value;
  count_ = kept;
}

ExactAccumulator::Rounded ExactAccumulator::round() const {
  if (special_ != 0) { // also true of NaN
    return {special_, 0, 0};
  }
  int i = count_;
  double head = i > 0 ? parts_[--i] : 0;
  double tail = 0;
  while (i > 0 && tail == 0) {
    const double high = head;
    const double low = parts_[--i];
    head = high + low;
    tail = low - (head - high);
  }
  return {head == 0 ? 0 : head, tail, i > 0 ? parts_[i - 1] : 0};
}

double ExactAccumulator::to_odd() const {
  const Rounded value = round();
  const auto bits = std::bit_cast<uint64_t>(value.head);
  if (value.tail == 0 || (bits & 1) != 0) {
    return value.head;
  }
  return std::bit_cast<double>((value.tail > 0) == (value.head > 0) ? bits + 1 : bits - 1);
}

double ExactAccumulator::to_nearest() const {
  const Rounded value = round();
  if (value.tail * value.rest <= 0) {
    return value.head;
  }
  // A tie of head and tail that the rest breaks.
  const double twice = value.tail * 2;
  const double other = value.head + twice;
  return other - value.head == twice ? other : value.head;
}

template <typename T>
void exact_sum(T* out, const T* const* inputs, const double* factors, int num_inputs, double divisor, uint64_t numel) {
  double sums[kBlock];
  T results[kBlock]; // the output may be an input
  for (uint64_t begin = 0; begin < numel; begin += kBlock) {
    const uint64_t n = std::min(kBlock, numel - begin);
    // Nearly always one float64 holds the sum of float32 numbers.
    bool exact = sizeof(T) < sizeof(double);
    std::fill_n(sums, n, 0.0);
    for (int r = 0; r < num_inputs && exact; ++r) {
      const T* values = inputs[r] + begin;
      const double factor = factors == nullptr ? 1 : static_cast<float>(factors[r]);
      double errors = 0;
      for (uint64_t i = 0; i < n; ++i) {
        double error = 0;
        sums[i] = two_sum(sums[i], values[i] * factor, error);
        errors += std::abs(error);
      }
      exact = errors == 0; // not so with an infinity or a NaN either
    }
    for (uint64_t i = 0; i < n; ++i) {
      if (exact) {
        results[i] = static_cast<T>(sums[i] / divisor);
        continue;
      }
      ExactAccumulator sum;
      for (int r = 0; r < num_inputs; ++r) {
        sum.add(inputs[r][begin + i] * (factors == nullptr ? 1 : static_cast<float>(factors[r])));
      }
      results[i] = rounded<T>(sum, divisor);
    }
    std::copy_n(results, n, out + begin);
  }
}

template void exact_sum(float*, const float* const*, const double*, int, double, uint64_t);
template void exact_sum(double*, const double* const*, const double*, int, double, uint64_t);

bool exact_add(double* const* parts, int num_parts, const float* addends, double* rest, uint64_t numel) {
  bool any = false;
  for (uint64_t i = 0; i < numel; ++i) {
    double value = addends[i];
    for (int p = 0; p < num_parts && value != 0; ++p) {
      double error = 0;
      parts[p][i] = two_sum(parts[p][i], value, error);
      value = std::isfinite(parts[p][i]) ? error : 0;
    }
    rest[i] = value;
    any |= value != 0;
  }
  return any;
}

void exact_round(float* out, const double* const* rows, int num_rows, double divisor, uint64_t numel) {
  for (uint64_t i = 0; i < numel; ++i) {
    ExactAccumulator sum;
    for (int r = 0; r < num_rows; ++r) {
      sum.add(rows[r][i]);
    }
    out[i] = rounded<float>(sum, divisor);
  }
}

void add_squares(int64_t* words, const float* values, uint64_t numel) {
  constexpr uint64_t kCarryEvery = uint64_t{1} << 28; // a square adds less than 2^32 to a limb
  const auto carry = [&] {
    for (int limb = 0; limb + 1 < kSquareLimbs; ++limb) {
      words[limb + 1] += words[limb] >> 32;
      words[limb] &= 0xFFFFFFFF;
    }
  };
  for (uint64_t i = 0; i < numel; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    const auto exponent = static_cast<int>(bits >> 23 & 0xFF);
    uint64_t mantissa = bits & 0x7FFFFF;
    if (exponent == 0xFF) {
      ++words[kSquareLimbs + (mantissa != 0 ? 1 : 0)];
      continue;
    }
    if (exponent != 0) {
      mantissa |= 0x800000;
    }
    // The number is mantissa * 2^(max(exponent, 1) - 150), its square in units of 2^-298 thus shifted by twice that less 1.
    const int shift = 2 * (std::max(exponent, 1) - 1);
    const int limb = shift / 32;
    const auto square = static_cast<unsigned __int128>(mantissa * mantissa) << (shift % 32);
    words[limb] += static_cast<int64_t>(square & 0xFFFFFFFF);
    words[limb + 1] += static_cast<int64_t>(square >> 32 & 0xFFFFFFFF);
    words[limb + 2] += static_cast<int64_t>(square >> 64);
    if ((i + 1) % kCarryEvery == 0) {
      carry();
    }
  }
  carry();
}

} // namespace trn
