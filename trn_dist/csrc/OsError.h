#pragma once

#include <cerrno>
#include <cstring>
#include <string>

namespace trn {

// What errno means, with the limit to raise where it is one.
inline std::string os_error() {
  switch (errno) {
    case EMFILE:
      return "this process is out of file descriptors (ulimit -n)";
    case ENFILE:
      return "this machine is out of file descriptors (fs.file-max)";
    default:
      return std::strerror(errno);
  }
}

} // namespace trn
