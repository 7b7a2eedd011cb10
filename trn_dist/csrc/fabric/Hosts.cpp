#include "fabric/Hosts.h"

#include "OsError.h"
#include "fabric/Incarnation.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

namespace trn {

namespace {

using std::chrono::milliseconds;

const char* const kHostIdVariable = "TRN_HOST_ID"; // ranks with equal values are one host
const char* const kBootIdFile = "/proc/sys/kernel/random/boot_id";
const char* const kInterfaceVariable = "GLOO_SOCKET_IFNAME"; // as torch's Gloo has it

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string link_target(const char* path) {
  char target[128] = {};
  const ssize_t n = readlink(path, target, sizeof(target) - 1);
  return n > 0 ? std::string(target, static_cast<size_t>(n)) : "";
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = {};
  return getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

socklen_t length_of(const sockaddr* address) {
  return address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

bool is_loopback(const std::string& address) {
  return address == "::1" || address.rfind("127.", 0) == 0;
}

// Empty if there is no such interface.
std::string interface_address(const std::string& name) {
  ifaddrs* all = nullptr;
  TORCH_CHECK_WITH(
      DistBackendError, getifaddrs(&all) == 0, "neuron: cannot list the network interfaces (", os_error(), ")");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  std::string found;
  for (const ifaddrs* entry = all; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || name != entry->ifa_name) {
      continue;
    }
    if (entry->ifa_addr->sa_family == AF_INET) {
      return numeric(entry->ifa_addr, sizeof(sockaddr_in));
    }
    if (entry->ifa_addr->sa_family == AF_INET6 && found.empty()) {
      found = numeric(entry->ifa_addr, sizeof(sockaddr_in6));
    }
  }
  return found;
}

// The own address on the way to `host`: the kernel chooses the route; no packet is sent.
std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* all = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &all) != 0) {
    return "";
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(all, freeaddrinfo);
  for (const addrinfo* entry = all; entry != nullptr; entry = entry->ai_next) {
    const int fd = socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      TORCH_CHECK_WITH(
          DistBackendError,
          errno != EMFILE && errno != ENFILE,
          "neuron: cannot find this host's address on the way to ",
          host,
          " (socket: ",
          os_error(),
          ")");
      continue;
    }
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    std::string address;
    if (connect(fd, entry->ai_addr, entry->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      address = numeric(reinterpret_cast<sockaddr*>(&own), length_of(reinterpret_cast<sockaddr*>(&own)));
    }
    close(fd);
    if (!address.empty()) {
      return address;
    }
  }
  return "";
}

std::string store_host(c10::intrusive_ptr<c10d::Store> store) {
  while (auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store)) {
    store = prefixed->getUnderlyingStore();
  }
  if (const auto tcp = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(store)) {
    return tcp->getHost();
  }
  return variable("MASTER_ADDR");
}

std::string own_address(const c10::intrusive_ptr<c10d::Store>& store) {
  const std::string interface = variable(kInterfaceVariable);
  if (!interface.empty()) {
    return interface_address(interface.substr(0, interface.find(',')));
  }
  const std::string host = store_host(store);
  return host.empty() ? "" : address_towards(host);
}

std::string own_identity() {
  const std::string given = variable(kHostIdVariable);
  if (!given.empty()) {
    return "id:" + given;
  }
  // Ranks of one host must not take each other for strangers because one of them could not read this.
  std::ifstream file(kBootIdFile);
  TORCH_CHECK_WITH(DistBackendError, file, "neuron: cannot read ", kBootIdFile, " (", os_error(), ")");
  std::string boot_id;
  std::getline(file, boot_id);
  return boot_id + link_target("/proc/self/ns/net") + link_target("/proc/self/ns/pid");
}

} // namespace

HostMap exchange_hosts(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout) {
  HostMap map;
  map.host_of.assign(size, 0);
  if (size == 1) {
    map.hosts.push_back({host_name(), {0}});
    return map;
  }
  map.address = own_address(store);
  const std::string given = variable(kHostIdVariable);
  const std::string label = given.empty() ? host_name() + " (" + map.address + ")" : given;
  const std::string record = own_identity() + "\n" + label + "\n" + map.address;
  store->set(c10::str("trn/host/", rank), std::vector<uint8_t>(record.begin(), record.end()));

  const std::vector<std::string> records = read_from_all(store, "trn/host", size, timeout);
  std::map<std::string, int> known;
  std::vector<std::string> addresses;
  for (int r = 0; r < size; ++r) {
    std::istringstream lines(records[r]);
    std::string identity, name, address;
    std::getline(lines, identity);
    std::getline(lines, name);
    std::getline(lines, address);
    const auto [entry, fresh] = known.emplace(identity, static_cast<int>(map.hosts.size()));
    if (fresh) {
      map.hosts.push_back({name, {}});
    }
    map.host_of[r] = entry->second;
    map.hosts[entry->second].ranks.push_back(r);
    addresses.push_back(address);
  }
  if (map.hosts.size() > 1 && given.empty()) {
    for (int r = 0; r < size; ++r) {
      TORCH_CHECK_WITH(
          DistBackendError,
          !addresses[r].empty() && !is_loopback(addresses[r]),
          "neuron: the job runs on ",
          map.hosts.size(),
          " hosts, and rank ",
          r,
          " on ",
          map.host(r).label,
          " has no address that the others can reach",
          addresses[r].empty() ? std::string() : " (" + addresses[r] + " is loopback)",
          ": name the network interface in ",
          kInterfaceVariable,
          ", or give torchrun an --rdzv-endpoint whose address is of that network");
    }
  }
  return map;
}

} // namespace trn
