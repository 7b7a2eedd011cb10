#pragma once

// Access to what lies outside the arenas: CPU tensors of the ranks. The kernel copies straight between the memory of two
// processes (process_vm_readv and process_vm_writev), so that such a tensor needs no copy in an arena. It allows this
// between processes of one user unless told otherwise (Yama's ptrace_scope, a container's seccomp filter); whoever may not
// stages its tensors as before.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace trn {

// The private memory of one peer's process.
class PrivateMemory {
 public:
  // The process has the random number `mark` at `mark_address`: so it is recognised, whatever its pid is later used for.
  PrivateMemory(pid_t pid, uint64_t mark_address, uint64_t mark)
      : pid_(pid), mark_address_(mark_address), mark_(mark) {}

  // Whether this process may use it, and it is still that one.
  bool accessible() const;
  // False when the process is gone or has no such memory; errno says which.
  bool read(std::byte* destination, uint64_t address, uint64_t nbytes) const;
  bool write(uint64_t address, const std::byte* source, uint64_t nbytes) const;

 private:
  bool transfer(std::byte* local, uint64_t address, uint64_t nbytes, bool write) const;

  pid_t pid_;
  uint64_t mark_address_;
  uint64_t mark_;
};

} // namespace trn
