#include "fabric/Reduce.h"

#include "fabric/Copy.h"
#include "fabric/ExactSum.h"

#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e4m3fnuz.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Float8_e5m2fnuz.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace trn {

namespace {

// streaming: as in reduce(), for an `out` that is aligned to kCacheLine.
using CombineFn = void (*)(void* out, const void* left, const void* right, size_t n, bool streaming);
using ConvertFn = void (*)(void* out, const void* in, size_t n);
using ScaleFn = void (*)(void* out, const void* in, double factor, size_t n);
using DivideFn = void (*)(void* out, const void* in, int64_t divisor, size_t n);

// What one dtype and one reduction need. load and store are null where elements are accumulated in their own dtype.
struct Kernels {
  size_t element_bytes = 0;
  size_t accumulator_bytes = 0;
  ConvertFn load = nullptr;
  ConvertFn store = nullptr;
  CombineFn combine = nullptr;
  ScaleFn scale = nullptr;
  DivideFn divide = nullptr;
};

struct FloatSum {
  template <typename T>
  static inline T apply(T a, T b) {
    return a + b;
  }
};
struct FloatProduct {
  template <typename T>
  static inline T apply(T a, T b) {
    return a * b;
  }
};
struct FloatMin {
  template <typename T>
  static inline T apply(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
};
struct FloatMax {
  template <typename T>
  static inline T apply(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
};
struct IntegerMin {
  template <typename T>
  static inline T apply(T a, T b) {
    return a < b ? a : b;
  }
};
struct IntegerMax {
  template <typename T>
  static inline T apply(T a, T b) {
    return a > b ? a : b;
  }
};
template <typename U>
struct WrapSum {
  static inline U apply(U a, U b) {
    return static_cast<U>(a + b);
  }
};
template <typename U>
struct WrapProduct {
  static inline U apply(U a, U b) {
    // uint16_t would be promoted to int, whose overflow is undefined.
    return static_cast<U>(1u * a * b);
  }
};
template <typename U>
struct BitAnd {
  static inline U apply(U a, U b) {
    return static_cast<U>(a & b);
  }
};
template <typename U>
struct BitOr {
  static inline U apply(U a, U b) {
    return static_cast<U>(a | b);
  }
};
template <typename U>
struct BitXor {
  static inline U apply(U a, U b) {
    return static_cast<U>(a ^ b);
  }
};

// Conversions written without branches, so that loops over them become vector code. Same results as c10::Half and
// c10::BFloat16, with NaNs made quiet.
struct HalfFormat {
  static inline float decode(uint16_t half) {
    const uint32_t w = static_cast<uint32_t>(half) << 16;
    const uint32_t sign = w & 0x80000000u;
    const uint32_t two_w = w + w;
    const float normal = std::bit_cast<float>((two_w >> 4) + (0xE0u << 23)) * std::bit_cast<float>(0x07800000u);
    const float denormal = std::bit_cast<float>((two_w >> 17) | (126u << 23)) - 0.5f;
    const uint32_t bits = two_w < (1u << 27) ? std::bit_cast<uint32_t>(denormal) : std::bit_cast<uint32_t>(normal);
    return std::bit_cast<float>(sign | bits);
  }
  static inline uint16_t encode(float value) {
    const uint32_t w = std::bit_cast<uint32_t>(value);
    const uint32_t two_w = w + w;
    const uint32_t sign = w & 0x80000000u;
    const float magnitude = std::bit_cast<float>(w & 0x7FFFFFFFu);
    float base = (magnitude * std::bit_cast<float>(0x77800000u)) * std::bit_cast<float>(0x08800000u);
    uint32_t bias = two_w & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    base = std::bit_cast<float>((bias >> 1) + 0x07800000u) + base;
    const uint32_t bits = std::bit_cast<uint32_t>(base);
    const uint32_t nonsign = ((bits >> 13) & 0x00007C00u) + (bits & 0x00000FFFu);
    return static_cast<uint16_t>((sign >> 16) | (two_w > 0xFF000000u ? 0x7E00u : nonsign));
  }
};
struct BFloat16Format {
  static inline float decode(uint16_t value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
  }
  static inline uint16_t encode(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
  }
};
template <typename Float8>
struct Float8Format {
  static inline float decode(uint8_t value) {
    return static_cast<float>(Float8(value, Float8::from_bits()));
  }
  static inline uint8_t encode(float value) {
    return Float8(value).x;
  }
};

#define TRN_ISA baseline
#define TRN_TARGET
#include "fabric/ReduceKernels.h"
#undef TRN_ISA
#undef TRN_TARGET

#if defined(__x86_64__)
#define TRN_ISA avx2
#define TRN_TARGET __attribute__((target("avx2")))
#include "fabric/ReduceKernels.h"
#undef TRN_ISA
#undef TRN_TARGET

#define TRN_ISA avx512
#define TRN_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#include "fabric/ReduceKernels.h"
#undef TRN_ISA
#undef TRN_TARGET
#endif

Kernels select_kernels(c10::ScalarType dtype, Reduction reduction) {
#if defined(__x86_64__)
  static const int level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      return 2;
    }
    return __builtin_cpu_supports("avx2") ? 1 : 0;
  }();
  if (level == 2) {
    return avx512::kernels(dtype, reduction);
  }
  if (level == 1) {
    return avx2::kernels(dtype, reduction);
  }
#endif
  return baseline::kernels(dtype, reduction);
}

constexpr size_t kBlockBytes = 8192; // of accumulators: a few blocks fit the first-level cache
constexpr int kMaxDepth = 20; // of the binary counter: more inputs than any group has

template <typename T>
void reduce_exactly(
    Reduction reduction,
    const std::byte* const* inputs,
    const double* factors,
    int num_inputs,
    std::byte* const* outputs,
    int num_outputs,
    uint64_t numel) {
  exact_sum(
      reinterpret_cast<T*>(outputs[0]),
      reinterpret_cast<const T* const*>(inputs),
      plain(reduction) == Reduction::PremulSum ? factors : nullptr,
      num_inputs,
      plain(reduction) == Reduction::Avg ? num_inputs : 1,
      numel);
  for (int o = 1; o < num_outputs; ++o) {
    if (outputs[o] != outputs[0]) {
      std::memcpy(outputs[o], outputs[0], numel * sizeof(T));
    }
  }
}

} // namespace

const char* reduction_name(Reduction reduction) {
  static constexpr std::array<const char*, 9> names = {
      "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  if (is_exact(reduction)) {
    const Reduction sum = plain(reduction);
    return sum == Reduction::Sum ? "exact SUM" : sum == Reduction::Avg ? "exact AVG" : "exact PREMUL_SUM";
  }
  const auto index = static_cast<size_t>(reduction);
  return index < names.size() ? names[index] : "?";
}

const char* why_unsupported(c10::ScalarType dtype, Reduction reduction) {
  const bool bitwise =
      reduction == Reduction::BitAnd || reduction == Reduction::BitOr || reduction == Reduction::BitXor;
  if (c10::isComplexType(dtype)) {
    return reduction == Reduction::Sum || reduction == Reduction::Avg || reduction == Reduction::PremulSum
        ? nullptr
        : "complex numbers can only be summed or averaged";
  }
  if (baseline::kernels(dtype, Reduction::Sum).combine == nullptr) {
    return "there is no arithmetic for this dtype";
  }
  if (dtype == c10::ScalarType::Bool && reduction == Reduction::Avg) {
    return "a bool has no average";
  }
  if (c10::isIntegralType(dtype, /*includeBool=*/true) && reduction == Reduction::PremulSum) {
    return "a factor needs a floating-point dtype";
  }
  if (bitwise && !c10::isIntegralType(dtype, /*includeBool=*/true)) {
    return "bitwise reductions need an integer or bool dtype";
  }
  return nullptr;
}

void reduce(
    c10::ScalarType dtype,
    Reduction reduction,
    const std::byte* const* inputs,
    const double* factors,
    int num_inputs,
    std::byte* const* outputs,
    int num_outputs,
    uint64_t numel,
    bool streaming) {
  if (is_exact(reduction)) {
    if (num_outputs > 0) {
      (dtype == c10::ScalarType::Double
           ? reduce_exactly<double>
           : reduce_exactly<float>)(reduction, inputs, factors, num_inputs, outputs, num_outputs, numel);
    }
    return;
  }
  const Kernels kernels = select_kernels(dtype, reduction);
  TORCH_INTERNAL_ASSERT(kernels.combine != nullptr && num_inputs > 0);
  if (num_outputs == 0) {
    return;
  }
  const bool premul = reduction == Reduction::PremulSum;
  const bool average = reduction == Reduction::Avg;
  const bool direct = kernels.load == nullptr; // elements are their own accumulators
  const uint64_t block = kBlockBytes / kernels.accumulator_bytes;

  alignas(64) std::byte buffers[kMaxDepth][kBlockBytes];
  struct Partial {
    const void* values;
    int level;
  };
  Partial stack[kMaxDepth];

  for (uint64_t begin = 0; begin < numel; begin += block) {
    const size_t n = std::min(block, numel - begin);
    const uint64_t offset = begin * kernels.element_bytes;
    // Where the root of the tree may be computed in place.
    const bool in_lines = reinterpret_cast<uintptr_t>(outputs[0] + offset) % kCacheLine == 0 && num_inputs > 1;
    const bool to_root = direct && !average && (!streaming || (num_outputs == 1 && in_lines));
    void* const root = to_root ? static_cast<void*>(outputs[0] + offset) : nullptr;
    int depth = 0;
    for (int r = 0; r < num_inputs; ++r) {
      const void* values = inputs[r] + offset;
      if (!direct) {
        kernels.load(buffers[depth], values, n);
        values = buffers[depth];
      }
      if (premul) {
        kernels.scale(buffers[depth], values, factors[r], n);
        values = buffers[depth];
      }
      stack[depth++] = {values, 0};
      const bool last = r == num_inputs - 1;
      // [Note: The tree]. After the last input the unequal blocks that remain are joined too, from the right.
      while (depth >= 2 && (last || stack[depth - 1].level == stack[depth - 2].level)) {
        Partial& left = stack[depth - 2];
        void* out = last && depth == 2 && root != nullptr ? root : static_cast<void*>(buffers[depth - 2]);
        kernels.combine(out, left.values, stack[depth - 1].values, n, streaming && out == root);
        left = {out, left.level + 1};
        --depth;
      }
    }
    const void* result = stack[0].values;
    if (average) {
      kernels.divide(buffers[0], result, num_inputs, n);
      result = buffers[0];
    }
    if (streaming) {
      if (to_root) {
        continue;
      }
      if (!direct) {
        kernels.store(buffers[1], result, n); // no wider than its accumulators
        result = buffers[1];
      }
      for (int o = 0; o < num_outputs; ++o) {
        copy_streaming_unfenced(outputs[o] + offset, static_cast<const std::byte*>(result), n * kernels.element_bytes);
      }
      continue;
    }
    if (!direct) {
      kernels.store(outputs[0] + offset, result, n);
    } else if (result != outputs[0] + offset) {
      std::memcpy(outputs[0] + offset, result, n * kernels.element_bytes);
    }
    for (int o = 1; o < num_outputs; ++o) {
      if (outputs[o] != outputs[0]) {
        std::memcpy(outputs[o] + offset, outputs[0] + offset, n * kernels.element_bytes);
      }
    }
  }
  if (streaming) {
    fence_streaming();
  }
}

c10::ScalarType accumulator_type(c10::ScalarType dtype) {
  return baseline::kernels(dtype, Reduction::Sum).load != nullptr ? c10::ScalarType::Float : dtype;
}

void widen(c10::ScalarType dtype, std::byte* accumulators, const std::byte* elements, uint64_t numel) {
  const Kernels kernels = select_kernels(dtype, Reduction::Sum);
  if (kernels.load != nullptr) {
    kernels.load(accumulators, elements, numel);
  } else {
    std::memcpy(accumulators, elements, numel * kernels.element_bytes);
  }
}

void narrow(
    c10::ScalarType dtype,
    Reduction reduction,
    int num_inputs,
    std::byte* elements,
    const std::byte* accumulators,
    uint64_t numel) {
  const Kernels kernels = select_kernels(dtype, reduction);
  const bool average = reduction == Reduction::Avg;
  const uint64_t block = kBlockBytes / kernels.accumulator_bytes;
  alignas(64) std::byte buffer[kBlockBytes];
  for (uint64_t begin = 0; begin < numel; begin += block) {
    const size_t n = std::min(block, numel - begin);
    const void* values = accumulators + begin * kernels.accumulator_bytes;
    if (average) {
      kernels.divide(buffer, values, num_inputs, n);
      values = buffer;
    }
    std::byte* out = elements + begin * kernels.element_bytes;
    if (kernels.store != nullptr) {
      kernels.store(out, values, n);
    } else {
      std::memcpy(out, values, n * kernels.element_bytes);
    }
  }
}

} // namespace trn
