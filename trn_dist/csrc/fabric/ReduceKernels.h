// Vector kernels of Reduce.cpp, which includes this file once for each instruction set, with TRN_ISA naming the
// namespace and TRN_TARGET the function attribute. Everything here is elementwise: a loop may read and write the same
// address, hence the ivdep. No std:: templates, which would be compiled for whatever set came first.

namespace TRN_ISA {

template <typename T, typename F>
TRN_TARGET void combine(void* out, const void* left, const void* right, size_t n, bool streaming) {
  auto* o = static_cast<T*>(out);
  const auto* a = static_cast<const T*>(left);
  const auto* b = static_cast<const T*>(right);
  size_t i = 0;
  constexpr size_t kLine = kCacheLine / sizeof(T);
  for (; streaming && i + kLine <= n; i += kLine) {
    alignas(kCacheLine) T line[kLine];
#pragma GCC ivdep
    for (size_t j = 0; j < kLine; ++j) {
      line[j] = F::apply(a[i + j], b[i + j]);
    }
    stream_line(o + i, line);
  }
#pragma GCC ivdep
  for (; i < n; ++i) {
    o[i] = F::apply(a[i], b[i]);
  }
}

template <typename S, typename A, typename F>
TRN_TARGET void load(void* out, const void* in, size_t n) {
  auto* o = static_cast<A*>(out);
  const auto* a = static_cast<const S*>(in);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    o[i] = F::decode(a[i]);
  }
}

template <typename S, typename A, typename F>
TRN_TARGET void store(void* out, const void* in, size_t n) {
  auto* o = static_cast<S*>(out);
  const auto* a = static_cast<const A*>(in);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    o[i] = F::encode(a[i]);
  }
}

template <typename A>
TRN_TARGET void scale(void* out, const void* in, double factor, size_t n) {
  auto* o = static_cast<A*>(out);
  const auto* a = static_cast<const A*>(in);
  const A f = static_cast<A>(factor);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    o[i] = static_cast<A>(a[i] * f);
  }
}

template <typename A>
TRN_TARGET void divide(void* out, const void* in, int64_t divisor, size_t n) {
  auto* o = static_cast<A*>(out);
  const auto* a = static_cast<const A*>(in);
  const A d = static_cast<A>(divisor);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    o[i] = static_cast<A>(a[i] / d);
  }
}

// Integer averages of narrow types: the divisor may not fit them, the quotient does.
template <typename A>
TRN_TARGET void divide_integer(void* out, const void* in, int64_t divisor, size_t n) {
  auto* o = static_cast<A*>(out);
  const auto* a = static_cast<const A*>(in);
  for (size_t i = 0; i < n; ++i) {
    if constexpr (static_cast<A>(-1) < 0) {
      o[i] = static_cast<A>(static_cast<int64_t>(a[i]) / divisor);
    } else {
      o[i] = static_cast<A>(static_cast<uint64_t>(a[i]) / static_cast<uint64_t>(divisor));
    }
  }
}

template <typename A>
CombineFn float_combine(Reduction reduction) {
  switch (reduction) {
    case Reduction::Sum:
    case Reduction::Avg:
    case Reduction::PremulSum:
      return combine<A, FloatSum>;
    case Reduction::Product:
      return combine<A, FloatProduct>;
    case Reduction::Min:
      return combine<A, FloatMin>;
    case Reduction::Max:
      return combine<A, FloatMax>;
    default:
      return nullptr;
  }
}

// U is the unsigned type of the width of A: sums and products wrap.
template <typename A, typename U>
CombineFn integer_combine(Reduction reduction) {
  switch (reduction) {
    case Reduction::Sum:
    case Reduction::Avg:
    case Reduction::PremulSum:
      return combine<U, WrapSum<U>>;
    case Reduction::Product:
      return combine<U, WrapProduct<U>>;
    case Reduction::Min:
      return combine<A, IntegerMin>;
    case Reduction::Max:
      return combine<A, IntegerMax>;
    case Reduction::BitAnd:
      return combine<U, BitAnd<U>>;
    case Reduction::BitOr:
      return combine<U, BitOr<U>>;
    case Reduction::BitXor:
      return combine<U, BitXor<U>>;
  }
  return nullptr;
}

template <typename A, typename U>
Kernels integer_kernels(Reduction reduction) {
  return {sizeof(A), sizeof(A), nullptr, nullptr, integer_combine<A, U>(reduction), scale<A>, divide_integer<A>};
}

template <typename S, typename A, typename F>
Kernels float_kernels(Reduction reduction) {
  return {sizeof(S), sizeof(A), load<S, A, F>, store<S, A, F>, float_combine<A>(reduction), scale<A>, divide<A>};
}

inline Kernels kernels(c10::ScalarType dtype, Reduction reduction) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Bool: {
      CombineFn combine_fn = nullptr;
      switch (reduction) {
        case Reduction::Sum:
        case Reduction::Max:
        case Reduction::BitOr:
          combine_fn = combine<uint8_t, BitOr<uint8_t>>;
          break;
        case Reduction::Product:
        case Reduction::Min:
        case Reduction::BitAnd:
          combine_fn = combine<uint8_t, BitAnd<uint8_t>>;
          break;
        case Reduction::BitXor:
          combine_fn = combine<uint8_t, BitXor<uint8_t>>;
          break;
        default:
          break;
      }
      return {1, 1, nullptr, nullptr, combine_fn, nullptr, nullptr};
    }
    case ScalarType::Byte:
      return integer_kernels<uint8_t, uint8_t>(reduction);
    case ScalarType::Char:
      return integer_kernels<int8_t, uint8_t>(reduction);
    case ScalarType::Short:
      return integer_kernels<int16_t, uint16_t>(reduction);
    case ScalarType::UInt16:
      return integer_kernels<uint16_t, uint16_t>(reduction);
    case ScalarType::Int:
      return integer_kernels<int32_t, uint32_t>(reduction);
    case ScalarType::UInt32:
      return integer_kernels<uint32_t, uint32_t>(reduction);
    case ScalarType::Long:
      return integer_kernels<int64_t, uint64_t>(reduction);
    case ScalarType::UInt64:
      return integer_kernels<uint64_t, uint64_t>(reduction);
    case ScalarType::Float:
      return {4, 4, nullptr, nullptr, float_combine<float>(reduction), scale<float>, divide<float>};
    case ScalarType::Double:
      return {8, 8, nullptr, nullptr, float_combine<double>(reduction), scale<double>, divide<double>};
    case ScalarType::Half:
      return float_kernels<uint16_t, float, HalfFormat>(reduction);
    case ScalarType::BFloat16:
      return float_kernels<uint16_t, float, BFloat16Format>(reduction);
    case ScalarType::Float8_e4m3fn:
      return float_kernels<uint8_t, float, Float8Format<c10::Float8_e4m3fn>>(reduction);
    case ScalarType::Float8_e4m3fnuz:
      return float_kernels<uint8_t, float, Float8Format<c10::Float8_e4m3fnuz>>(reduction);
    case ScalarType::Float8_e5m2:
      return float_kernels<uint8_t, float, Float8Format<c10::Float8_e5m2>>(reduction);
    case ScalarType::Float8_e5m2fnuz:
      return float_kernels<uint8_t, float, Float8Format<c10::Float8_e5m2fnuz>>(reduction);
    default:
      return {};
  }
}

} // namespace TRN_ISA
