#pragma once

// Copies between large pieces of memory, for Exchange and messages.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace trn {

// From this size on a result is written past the caches: it would not stay in them, and a plain store first reads the line
// that it overwrites, a third of a copy's traffic. About twice a core's second-level cache.
constexpr uint64_t kStreamBytes = 4 << 20;

// memcpy with stores that bypass the caches, where the processor has them.
void copy_streaming(std::byte* destination, const std::byte* source, size_t nbytes);
// In pieces: all of them, then the fence, since the atomics that announce the data do not order these stores.
void copy_streaming_unfenced(std::byte* destination, const std::byte* source, size_t nbytes);
void fence_streaming();

constexpr size_t kCacheLine = 64;

// Writes one line past the caches. Both must be aligned to it.
inline void stream_line(void* destination, const void* line) {
#if defined(__x86_64__)
  const auto* from = static_cast<const __m128i*>(line);
  auto* to = static_cast<__m128i*>(destination);
  for (int i = 0; i < 4; ++i) {
    _mm_stream_si128(to + i, _mm_load_si128(from + i));
  }
#else
  std::memcpy(destination, line, kCacheLine);
#endif
}

} // namespace trn
