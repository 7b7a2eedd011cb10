#pragma once

// The simulated interconnect: every rank of a job maps the HBM arena of every other rank of its host, and is connected to
// the other hosts, if there are any, by a Network. Made once, when the job's default process group is built; communicators
// (Communicator.h) live on top of it.

#include "fabric/Hosts.h"

#include <c10/util/intrusive_ptr.h>

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Store;
}

namespace trn {

class Network;
struct RankStatus;

class Fabric {
 public:
  // All zero for a rank of another host.
  struct Peer {
    std::byte* base = nullptr; // its arena, mapped here; this process's own arena for the own rank
    uint64_t size = 0; // bytes of its arena
    pid_t pid = 0;
    const RankStatus* status = nullptr; // in its arena
    uint64_t start_time = 0; // of the process, in clock ticks since boot: a reused pid shows a different one
  };

  // Exchanges arenas among `size` ranks that share `store`. Collective. Throws when a rank does not come within
  // `timeout` (the error names it) or may not be trusted.
  static std::shared_ptr<Fabric>
  rendezvous(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);

  // The part of a store of the job that only its present ranks use. See Incarnation.h.
  c10::intrusive_ptr<c10d::Store> own_part(const c10::intrusive_ptr<c10d::Store>& store) const;

  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  int rank() const {
    return rank_;
  }
  // The same on all its ranks, and another for every fabric of the job.
  uint64_t id() const {
    return id_;
  }
  int size() const {
    return static_cast<int>(peers_.size());
  }
  const Peer& peer(int rank) const {
    return peers_[rank];
  }
  // In timing mode its ranks are some of the job's. See [Note: Live ranks].
  void name_ranks(std::vector<int> job_ranks) {
    job_ranks_ = std::move(job_ranks);
  }
  int job_rank(int rank) const {
    return job_ranks_.empty() ? rank : job_ranks_[rank];
  }
  const HostMap& hosts() const {
    return hosts_;
  }
  bool is_local(int rank) const {
    return hosts_.host_of[rank] == hosts_.host_of[rank_];
  }
  // nullptr when all ranks of the job are on one host.
  Network* network() const {
    return network_.get();
  }
  // Whether the process of that rank, of this host, still runs. Costs up to 20 us: reads /proc.
  bool alive(int rank) const;
  // Whether a debugger holds a rank: a deadline must not run out meanwhile.
  bool paused() const;
  // Whether every rank of this host can have a core to itself, so that spinning for a peer is not at its expense.
  bool has_core_per_rank() const {
    return has_core_per_rank_;
  }

 private:
  Fabric(int rank, HostMap hosts);
  void lead(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  void join(const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  void map_peer(int rank, int fd, uint64_t size, uint64_t status_offset);

  // The ranks of this host, ascending; the first leads its rendezvous.
  const std::vector<int>& members() const {
    return hosts_.host(rank_).ranks;
  }
  std::string store_key() const;

  int rank_;
  HostMap hosts_;
  std::string incarnation_;
  uint64_t id_ = 0;
  std::vector<Peer> peers_;
  std::vector<int> job_ranks_; // empty: the same
  bool has_core_per_rank_ = false;
  std::shared_ptr<Network> network_;
};

// Fills memory with bytes that nobody can guess.
void fill_random(void* data, size_t nbytes);
// The same as 32 hexadecimal digits.
std::string random_name();

} // namespace trn
