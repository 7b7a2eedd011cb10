#pragma once

// The simulated interconnect of one machine: every rank of a job maps every other rank's HBM arena. Made once, when the
// job's default process group is built; communicators (Communicator.h) live on top of it.

#include <c10/util/intrusive_ptr.h>

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace trn {

class Fabric {
 public:
  struct Peer {
    std::byte* base = nullptr; // its arena, mapped here; this process's own arena for the own rank
    uint64_t size = 0; // bytes of its arena
    pid_t pid = 0;
    uint64_t start_time = 0; // of the process, in clock ticks since boot: a reused pid shows a different one
  };

  // Exchanges arenas among `size` ranks that share `store`. Collective. Throws when a rank does not come within
  // `timeout` (the error names it), runs on another machine, or may not be trusted.
  static std::shared_ptr<Fabric>
  rendezvous(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);

  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  int rank() const {
    return rank_;
  }
  int size() const {
    return static_cast<int>(peers_.size());
  }
  const Peer& peer(int rank) const {
    return peers_[rank];
  }
  // Whether the process of that rank still runs. Costs up to 20 us: reads /proc.
  bool alive(int rank) const;
  // Whether every rank of the job can have a core to itself, so that spinning for a peer is not at its expense.
  bool has_core_per_rank() const {
    return has_core_per_rank_;
  }

 private:
  Fabric(int rank, int size);
  void lead(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  void join(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  void map_peer(int rank, int fd, uint64_t size);

  int rank_;
  std::vector<Peer> peers_;
  bool has_core_per_rank_ = false;
};

} // namespace trn
