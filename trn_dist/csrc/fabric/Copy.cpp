#include "fabric/Copy.h"

namespace trn {

void fence_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy_streaming(std::byte* destination, const std::byte* source, size_t nbytes) {
  copy_streaming_unfenced(destination, source, nbytes);
  fence_streaming();
}

void copy_streaming_unfenced(std::byte* destination, const std::byte* source, size_t nbytes) {
#if defined(__x86_64__)
  const size_t head = (kCacheLine - reinterpret_cast<uintptr_t>(destination) % kCacheLine) % kCacheLine;
  if (nbytes > head + kCacheLine) {
    std::memcpy(destination, source, head);
    destination += head;
    source += head;
    nbytes -= head;
    for (; nbytes >= kCacheLine; nbytes -= kCacheLine, destination += kCacheLine, source += kCacheLine) {
      const auto* from = reinterpret_cast<const __m128i*>(source);
      auto* to = reinterpret_cast<__m128i*>(destination);
      const __m128i a = _mm_loadu_si128(from);
      const __m128i b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2);
      const __m128i d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
  }
#endif
  std::memcpy(destination, source, nbytes);
}

} // namespace trn
