#pragma once

// A short text in shared memory that one rank writes and others may read at any time. A reader that comes in the middle
// sees a mixture, never anything outside.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace trn {

template <size_t kBytes>
class SharedText {
  static_assert(kBytes % 8 == 0);

 public:
  void store(std::string_view text) {
    char buffer[kBytes] = {};
    std::memcpy(buffer, text.data(), std::min(text.size(), kBytes - 1));
    for (size_t i = 0; i < words_.size(); ++i) {
      uint64_t word;
      std::memcpy(&word, buffer + 8 * i, 8);
      words_[i].store(word, std::memory_order_relaxed);
    }
  }
  std::string load() const {
    char buffer[kBytes];
    for (size_t i = 0; i < words_.size(); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(buffer + 8 * i, &word, 8);
    }
    buffer[kBytes - 1] = 0;
    std::string text(buffer);
    // Another process wrote it: nothing that a terminal would obey.
    std::replace_if(
        text.begin(), text.end(), [](unsigned char c) { return (c < 0x20 && c != '\n') || c == 0x7f; }, '?');
    return text;
  }

 private:
  std::array<std::atomic<uint64_t>, kBytes / 8> words_{};
};

} // namespace trn
