#include "fabric/PrivateMemory.h"

#include <sys/uio.h>

#include <cerrno>

namespace trn {

bool PrivateMemory::accessible() const {
  uint64_t found = 0;
  if (!read(reinterpret_cast<std::byte*>(&found), mark_address_, sizeof(found))) {
    return false;
  }
  errno = ESRCH;
  return found == mark_;
}

bool PrivateMemory::read(std::byte* destination, uint64_t address, uint64_t nbytes) const {
  return transfer(destination, address, nbytes, /*write=*/false);
}

bool PrivateMemory::write(uint64_t address, const std::byte* source, uint64_t nbytes) const {
  // The pid might meanwhile be another process's, into which nothing must be written.
  return accessible() && transfer(const_cast<std::byte*>(source), address, nbytes, /*write=*/true);
}

bool PrivateMemory::transfer(std::byte* local, uint64_t address, uint64_t nbytes, bool write) const {
  while (nbytes > 0) {
    const iovec here{local, nbytes};
    const iovec there{reinterpret_cast<void*>(address), nbytes};
    const ssize_t n =
        write ? process_vm_writev(pid_, &here, 1, &there, 1, 0) : process_vm_readv(pid_, &here, 1, &there, 1, 0);
    if (n <= 0) {
      if (n == 0) {
        errno = EFAULT;
      }
      return false;
    }
    local += n;
    address += n;
    nbytes -= n;
  }
  return true;
}

} // namespace trn
