#pragma once

// Sleeping and waking on a word of shared memory. Used by everything in fabric/ that waits for another process.

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace trn {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

// Sleeps until woken, until `limit` is over, or not at all when *word is no longer `seen`.
inline void futex_wait(const std::atomic<uint32_t>* word, uint32_t seen, std::chrono::microseconds limit) {
  timespec ts;
  ts.tv_sec = static_cast<time_t>(limit.count() / 1000000);
  ts.tv_nsec = static_cast<long>(limit.count() % 1000000 * 1000);
  // Not FUTEX_PRIVATE: the word is seen by several processes.
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), FUTEX_WAIT, seen, &ts, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

} // namespace trn
