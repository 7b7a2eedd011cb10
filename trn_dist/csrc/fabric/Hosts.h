#pragma once

// Which ranks of a job share a machine. Ranks of one host meet in shared memory (Fabric.h); hosts are connected by
// Network.h.
//
// Two ranks are on one host when they share a running kernel, a network namespace (unix sockets do not leave it) and a PID
// namespace (they look after each other's processes): two containers of one machine are two hosts.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace trn {

struct HostMap {
  struct Host {
    std::string label; // for messages: "node-7 (10.0.0.7)", or what TRN_HOST_ID says
    std::vector<int> ranks; // in the job, ascending
  };
  std::vector<Host> hosts; // in the order of their lowest ranks
  std::vector<int> host_of; // by rank in the job
  std::string address; // of this rank: the numeric address of the interface over which it reaches the others

  const Host& host(int rank) const {
    return hosts[host_of[rank]];
  }
};

// Collective over the ranks of a job that share `store`. Throws when a rank does not come within `timeout` (the error names
// it), and on a job of several hosts where a rank would be reached at a loopback address.
//
// The address is that of GLOO_SOCKET_IFNAME's interface, or else of the one that leads to the store.
HostMap
exchange_hosts(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout);

} // namespace trn
