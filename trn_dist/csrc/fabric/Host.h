#pragma once

// What waiting code needs of the interpreter it runs under: to let other threads run Python meanwhile, and to notice
// Ctrl-C. The fabric itself knows nothing of Python; c10d/bindings.cpp fills the hooks in.

#include <cstdint>

namespace trn {

struct HostHooks {
  // Gives up the interpreter lock if this thread holds it; what comes back goes to `retake`. nullptr: not held.
  void* (*release)() = nullptr;
  void (*retake)(void* released) = nullptr;
  // Throws when the user has interrupted the program. Must be called without any lock of ours.
  void (*check_interrupt)() = nullptr;
  // Offset in the arena of the text of the program's line that makes the present call; see CallSite.h. Cheap.
  uint64_t (*call_site)() = nullptr;
  // How many threads of the program there are that could call something. Without any lock of ours.
  uint32_t (*count_threads)() = nullptr;
  // A call is about to raise because its group has failed. Without any lock of ours.
  void (*on_failure)() = nullptr;
};

inline HostHooks host_hooks;

// Lets other threads run Python while this object lives.
class HostLockRelease {
 public:
  HostLockRelease() : released_(host_hooks.release != nullptr ? host_hooks.release() : nullptr) {}
  ~HostLockRelease() {
    if (released_ != nullptr) {
      host_hooks.retake(released_);
    }
  }
  HostLockRelease(const HostLockRelease&) = delete;
  HostLockRelease& operator=(const HostLockRelease&) = delete;

 private:
  void* released_;
};

inline void check_interrupt() {
  if (host_hooks.check_interrupt != nullptr) {
    host_hooks.check_interrupt();
  }
}

} // namespace trn
