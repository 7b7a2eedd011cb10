// The rendezvous of the ranks of a host: the first of them, the leader, listens on a private unix socket, whose name and
// token go over the job's store; every other rank sends its arena's descriptor and gets everybody's. After that nothing but
// shared memory is used between them.

#include "fabric/Fabric.h"

#include "OsError.h"
#include "device/Arena.h"
#include "fabric/Host.h"
#include "fabric/Incarnation.h"
#include "fabric/Network.h"
#include "fabric/RankStatus.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint64_t kMagic = 0x74726e2d66616232; // "trn-fab2", changes with the wire format
constexpr size_t kTokenBytes = 16;
constexpr int kFdsPerMessage = 250; // the kernel's limit is 253
const char* const kStoreKey = "trn/fabric";

using Token = std::array<unsigned char, kTokenBytes>;

// What a rank says when it joins; its arena's descriptor travels with it.
struct Hello {
  uint64_t magic;
  Token token;
  int32_t rank;
  int32_t size;
  int32_t pid;
  int32_t reserved;
  uint64_t start_time;
  uint64_t arena_bytes;
  uint64_t status_offset;
};

// What the leader answers, once for each batch of the host's ranks, with their descriptors, or once with a reason to stop.
struct Answer {
  uint64_t magic;
  int32_t first; // of the host's ranks, by place in their list
  int32_t count; // 0: the rendezvous failed, and `reason` says why
  char reason[1024];
};

struct PeerRecord {
  int32_t pid;
  int32_t reserved;
  uint64_t start_time;
  uint64_t arena_bytes;
  uint64_t status_offset;
};

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() {
    reset();
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  int get() const {
    return fd_;
  }
  void reset() {
    if (fd_ >= 0) {
      ::close(fd_);
      fd_ = -1;
    }
  }

 private:
  int fd_;
};

struct ProcessState {
  char state = 0; // as in ps; 0 when there is no such process
  uint64_t start_time = 0;
};

ProcessState process_state(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(pid));
  Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
  ProcessState result;
  if (file.get() < 0) {
    // Out of descriptors or the like says nothing about the peer.
    result.state = errno == ENOENT || errno == ESRCH ? 0 : '?';
    return result;
  }
  char buffer[1024];
  const ssize_t n = read(file.get(), buffer, sizeof(buffer) - 1);
  if (n <= 0) {
    return result; // ESRCH: it went away between open and read
  }
  buffer[n] = 0;
  // The command in parentheses may hold anything, also blanks and parentheses: fields are counted from its end.
  const char* field = std::strrchr(buffer, ')');
  if (field == nullptr || field[1] == 0) {
    return result;
  }
  result.state = field[2];
  field += 1;
  for (int blanks = 0; *field != 0; ++field) {
    if (*field == ' ' && ++blanks == 20) { // field 22, counting from the state, field 3
      result.start_time = std::strtoull(field + 1, nullptr, 10);
      break;
    }
  }
  return result;
}

int poll_limit_ms(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1000));
}

bool wait_readable(int fd, Clock::time_point deadline) {
  while (Clock::now() < deadline) {
    check_interrupt();
    pollfd entry{fd, POLLIN, 0};
    const int n = poll(&entry, 1, poll_limit_ms(deadline));
    if (n > 0) {
      return true;
    }
    if (n < 0 && errno != EINTR) {
      return false;
    }
  }
  return false;
}

// Sends all of data, with descriptors attached to its first byte. False when the other side is gone.
bool send_message(int socket, const void* data, size_t nbytes, const std::vector<int>& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsPerMessage)];
  iovec part{const_cast<void*>(data), nbytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  while (true) {
    const ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (n >= 0) {
      return static_cast<size_t>(n) == nbytes; // SOCK_SEQPACKET: a message is sent whole
    }
    if (errno != EINTR) {
      return false;
    }
  }
}

// Receives one message of at most nbytes; its length, or -1. Descriptors that came with it are appended to fds.
ssize_t receive_message(int socket, void* data, size_t nbytes, std::vector<Descriptor>& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsPerMessage)];
  iovec part{data, nbytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t n;
  do {
    n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    return -1;
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      std::vector<int> received(count);
      std::memcpy(received.data(), CMSG_DATA(header), count * sizeof(int));
      for (int fd : received) {
        fds.emplace_back(fd);
      }
    }
  }
  return message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) ? -1 : n;
}

uint64_t fabric_id(const Token& token) {
  uint64_t id;
  std::memcpy(&id, token.data(), sizeof(id));
  return id;
}

std::string hex(const unsigned char* bytes, size_t n) {
  std::string text;
  char digits[3];
  for (size_t i = 0; i < n; ++i) {
    std::snprintf(digits, sizeof(digits), "%02x", bytes[i]);
    text += digits;
  }
  return text;
}

Token random_token() {
  Token token;
  fill_random(token.data(), token.size());
  return token;
}

// An abstract address: no file is left behind, whatever happens to the process.
socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::ostringstream text;
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size() && i < 32; ++i) {
    text << (i ? ", " : "") << ranks[i];
  }
  if (ranks.size() > 32) {
    text << " and " << ranks.size() - 32 << " more";
  }
  return text.str();
}

double seconds(milliseconds value) {
  return static_cast<double>(value.count()) / 1000;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return 1;
  }
  return CPU_COUNT(&set);
}

c10::intrusive_ptr<c10d::Store> part_of(const c10::intrusive_ptr<c10d::Store>& store, const std::string& incarnation) {
  if (incarnation.empty()) {
    return store;
  }
  return c10::make_intrusive<c10d::PrefixStore>("trn/" + incarnation, store);
}

} // namespace

void fill_random(void* data, size_t nbytes) {
  TORCH_CHECK_WITH(
      DistBackendError,
      getrandom(data, nbytes, 0) == static_cast<ssize_t>(nbytes),
      "neuron: no random numbers (getrandom: ",
      os_error(),
      ")");
}

std::string random_name() {
  const Token token = random_token();
  return hex(token.data(), token.size());
}

Fabric::Fabric(int rank, HostMap hosts) : rank_(rank), hosts_(std::move(hosts)), peers_(hosts_.host_of.size()) {
  Arena& arena = Arena::get();
  peers_[rank] = {arena.base(), arena.size(), getpid(), &own_status(), process_state(getpid()).start_time};
  has_core_per_rank_ = static_cast<int>(members().size()) <= usable_cores();
}

Fabric::~Fabric() {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_ && peers_[r].base != nullptr) {
      munmap(peers_[r].base, peers_[r].size);
    }
  }
}

bool Fabric::alive(int rank) const {
  const ProcessState state = process_state(peers_[rank].pid);
  if (state.state == '?') {
    return true;
  }
  return state.state != 0 && state.state != 'Z' && state.state != 'X' && state.start_time == peers_[rank].start_time;
}

bool Fabric::paused() const {
  for (int r = 0; r < size(); ++r) {
    const Peer& peer = peers_[r];
    const bool marked = peer.status != nullptr && peer.status->paused.load(std::memory_order_acquire) != 0;
    if (r != rank_ && marked && alive(r)) {
      return true;
    }
  }
  return false;
}

void Fabric::map_peer(int rank, int fd, uint64_t size, uint64_t status_offset) {
  struct stat status{};
  TORCH_CHECK_WITH(
      DistBackendError,
      fstat(fd, &status) == 0 && size > 0 && static_cast<uint64_t>(status.st_size) >= size,
      "neuron: rank ",
      rank,
      " sent a descriptor that is not an arena of ",
      size,
      " bytes");
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK_WITH(
      DistBackendError,
      address != MAP_FAILED,
      "neuron: cannot map the ",
      size >> 30,
      " GiB arena of rank ",
      rank,
      " (mmap: ",
      os_error(),
      "); is the address space limited (ulimit -v)?");
  // A forked child (a DataLoader worker, say) has no use for the peers' memory.
  madvise(address, size, MADV_DONTFORK);
  peers_[rank].base = static_cast<std::byte*>(address);
  peers_[rank].size = size;
  const bool fits =
      status_offset % alignof(RankStatus) == 0 && status_offset <= size && sizeof(RankStatus) <= size - status_offset;
  const auto* rank_status = reinterpret_cast<const RankStatus*>(peers_[rank].base + (fits ? status_offset : 0));
  TORCH_CHECK_WITH(
      DistBackendError,
      fits && rank_status->magic == kStatusMagic,
      "neuron: rank ",
      rank,
      " sent no status block with its arena");
  peers_[rank].status = rank_status;
}

c10::intrusive_ptr<c10d::Store> Fabric::own_part(const c10::intrusive_ptr<c10d::Store>& store) const {
  return part_of(store, incarnation_);
}

std::shared_ptr<Fabric> Fabric::rendezvous(
    const c10::intrusive_ptr<c10d::Store>& whole_store,
    int rank,
    int size,
    std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(size > 0 && rank >= 0 && rank < size, "neuron: rank ", rank, " in a group of ", size);
  const std::string incarnation = agree_on_incarnation(whole_store, rank, size, timeout);
  const auto store = part_of(whole_store, incarnation);
  std::shared_ptr<Fabric> fabric(new Fabric(rank, exchange_hosts(store, rank, size, timeout)));
  fabric->incarnation_ = incarnation;
  if (fabric->members().size() > 1) {
    if (rank == fabric->members().front()) {
      fabric->lead(store, timeout);
    } else {
      fabric->join(store, timeout);
    }
  }
  if (fabric->hosts().hosts.size() > 1) {
    fabric->network_ = Network::create(store, rank, fabric->hosts(), timeout);
  }
  return fabric;
}

std::string Fabric::store_key() const {
  return c10::str(kStoreKey, "/", hosts_.host_of[rank_]);
}

void Fabric::lead(const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const Token token = random_token();
  id_ = fabric_id(token);
  const std::string name = "trn_dist-" + random_name();
  Descriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  TORCH_CHECK_WITH(
      DistBackendError,
      listener.get() >= 0 && bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
          listen(listener.get(), std::max(static_cast<int>(members().size()), 128)) == 0,
      "neuron: cannot open the socket for the rendezvous of ",
      members().size(),
      " ranks (",
      os_error(),
      ")");
  store->set(store_key(), name + " " + hex(token.data(), token.size()));

  std::vector<Descriptor> sockets(size());
  std::vector<Descriptor> arenas(size());
  std::vector<uint64_t> status_offsets(size(), own_status_offset());
  std::string failure;
  auto missing = members().size() - 1;
  while (missing > 0 && failure.empty()) {
    if (!wait_readable(listener.get(), deadline)) {
      std::vector<int> absent;
      for (const int r : members()) {
        if (r != rank_ && sockets[r].get() < 0) {
          absent.push_back(r);
        }
      }
      failure = c10::str(
          "neuron: ",
          list_ranks(absent),
          " of ",
          size(),
          " did not join the process group within ",
          seconds(timeout),
          " s");
      break;
    }
    Descriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (socket.get() < 0) {
      if (errno == EINTR || errno == ECONNABORTED) {
        continue;
      }
      failure = c10::str("neuron: the rendezvous cannot accept a rank (accept: ", os_error(), ")");
      break;
    }
    ucred credentials{};
    socklen_t credentials_size = sizeof(credentials);
    Hello hello{};
    std::vector<Descriptor> fds;
    // A rank sends at once after it has connected. Whoever does not is no rank of ours.
    const auto patience = std::min(deadline, Clock::now() + std::chrono::seconds(10));
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &credentials_size) != 0 ||
        credentials.uid != geteuid() || !wait_readable(socket.get(), patience) ||
        receive_message(socket.get(), &hello, sizeof(hello), fds) != sizeof(hello) || hello.magic != kMagic ||
        hello.token != token || fds.size() != 1) {
      continue; // a stranger: refused without an answer
    }
    if (hello.size != size() || hello.rank < 0 || hello.rank >= size() || hello.rank == rank_ ||
        !is_local(hello.rank) || sockets[hello.rank].get() >= 0) {
      failure = c10::str(
          "neuron: a process joined as rank ",
          hello.rank,
          " of ",
          hello.size,
          ", which does not fit a group of ",
          size(),
          " ranks in which no rank may come twice");
      break;
    }
    if (credentials.pid != hello.pid) {
      failure = c10::str(
          "neuron: rank ",
          hello.rank,
          " runs in another PID namespace than rank ",
          rank_,
          "; ranks of one host must share it");
      break;
    }
    peers_[hello.rank].pid = hello.pid;
    peers_[hello.rank].start_time = hello.start_time;
    peers_[hello.rank].size = hello.arena_bytes;
    status_offsets[hello.rank] = hello.status_offset;
    sockets[hello.rank] = std::move(socket);
    arenas[hello.rank] = std::move(fds[0]);
    --missing;
  }

  if (!failure.empty()) {
    Answer answer{};
    answer.magic = kMagic;
    std::snprintf(answer.reason, sizeof(answer.reason), "%s", failure.c_str());
    for (const auto& socket : sockets) {
      if (socket.get() >= 0) {
        send_message(socket.get(), &answer, sizeof(answer), {});
      }
    }
    TORCH_CHECK_WITH(DistBackendError, false, failure);
  }

  std::vector<char> message(sizeof(Answer) + sizeof(PeerRecord) * kFdsPerMessage);
  const int member_count = static_cast<int>(members().size());
  for (int first = 0; first < member_count; first += kFdsPerMessage) {
    const int count = std::min(kFdsPerMessage, member_count - first);
    Answer answer{};
    answer.magic = kMagic;
    answer.first = first;
    answer.count = count;
    std::memcpy(message.data(), &answer, sizeof(answer));
    std::vector<int> fds;
    for (int i = first; i < first + count; ++i) {
      const int r = members()[i];
      const PeerRecord record{peers_[r].pid, 0, peers_[r].start_time, peers_[r].size, status_offsets[r]};
      std::memcpy(message.data() + sizeof(Answer) + sizeof(PeerRecord) * (i - first), &record, sizeof(record));
      fds.push_back(r == rank_ ? Arena::get().fd() : arenas[r].get());
    }
    for (const int r : members()) {
      TORCH_CHECK_WITH(
          DistBackendError,
          r == rank_ ||
              send_message(sockets[r].get(), message.data(), sizeof(Answer) + sizeof(PeerRecord) * count, fds),
          "neuron: rank ",
          r,
          " went away during the rendezvous");
    }
  }
  for (const int r : members()) {
    if (r != rank_) {
      map_peer(r, arenas[r].get(), peers_[r].size, status_offsets[r]);
    }
  }
}

void Fabric::join(const c10::intrusive_ptr<c10d::Store>& store, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const int leader = members().front();
  store->wait({store_key()}, timeout);
  const auto raw = store->get(store_key());
  std::istringstream fields(std::string(raw.begin(), raw.end()));
  std::string name, token_hex;
  fields >> name >> token_hex;
  TORCH_CHECK_WITH(
      DistBackendError,
      token_hex.size() == 2 * kTokenBytes && name.size() < sizeof(sockaddr_un::sun_path) - 1,
      "neuron: the store's entry '",
      store_key(),
      "' is not what rank ",
      leader,
      " writes there");

  Hello hello{};
  hello.magic = kMagic;
  for (size_t i = 0; i < kTokenBytes; ++i) {
    hello.token[i] = static_cast<unsigned char>(std::strtoul(token_hex.substr(2 * i, 2).c_str(), nullptr, 16));
  }
  id_ = fabric_id(hello.token);
  hello.rank = rank_;
  hello.size = size();
  hello.pid = getpid();
  hello.start_time = peers_[rank_].start_time;
  hello.arena_bytes = peers_[rank_].size;
  hello.status_offset = own_status_offset();

  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  TORCH_CHECK_WITH(
      DistBackendError,
      socket.get() >= 0,
      "neuron: rank ",
      rank_,
      " cannot open a socket for the rendezvous (",
      os_error(),
      ")");
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  int connected = -1;
  do {
    connected = connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length);
  } while (connected != 0 && errno == EINTR);
  TORCH_CHECK_WITH(
      DistBackendError,
      connected == 0,
      "neuron: rank ",
      rank_,
      " cannot reach rank ",
      leader,
      " (",
      os_error(),
      "). Has it ended? If the two run on different machines, give each its own TRN_HOST_ID");
  ucred credentials{};
  socklen_t credentials_size = sizeof(credentials);
  TORCH_CHECK_WITH(
      DistBackendError,
      getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &credentials_size) == 0 &&
          credentials.uid == geteuid(),
      "neuron: the process that answers as rank ",
      leader,
      " belongs to another user; not joining");
  TORCH_CHECK_WITH(
      DistBackendError,
      send_message(socket.get(), &hello, sizeof(hello), {Arena::get().fd()}),
      "neuron: rank ",
      leader,
      " went away during the rendezvous");

  std::vector<char> message(sizeof(Answer) + sizeof(PeerRecord) * kFdsPerMessage);
  const int member_count = static_cast<int>(members().size());
  for (int done = 0; done < member_count;) {
    // A second more than the leader has, so that its error, which names the missing ranks, is the one that is seen.
    TORCH_CHECK_WITH(
        DistBackendError,
        wait_readable(socket.get(), deadline + std::chrono::seconds(1)),
        "neuron: rank ",
        leader,
        " did not complete the rendezvous of ",
        member_count,
        " ranks within ",
        seconds(timeout),
        " s");
    std::vector<Descriptor> fds;
    const ssize_t n = receive_message(socket.get(), message.data(), message.size(), fds);
    TORCH_CHECK_WITH(
        DistBackendError,
        n >= static_cast<ssize_t>(sizeof(Answer)),
        "neuron: rank ",
        leader,
        " went away during the rendezvous, or this process is out of file descriptors (ulimit -n)");
    Answer answer;
    std::memcpy(&answer, message.data(), sizeof(answer));
    answer.reason[sizeof(answer.reason) - 1] = 0;
    TORCH_CHECK_WITH(DistBackendError, answer.magic == kMagic && answer.count != 0, answer.reason);
    TORCH_CHECK_WITH(
        DistBackendError,
        answer.first == done && answer.count > 0 && answer.count <= member_count - done &&
            fds.size() == static_cast<size_t>(answer.count) &&
            n == static_cast<ssize_t>(sizeof(Answer) + sizeof(PeerRecord) * answer.count),
        "neuron: the answer of rank ",
        leader,
        " in the rendezvous is malformed");
    for (int i = 0; i < answer.count; ++i) {
      const int r = members()[answer.first + i];
      PeerRecord record;
      std::memcpy(&record, message.data() + sizeof(Answer) + sizeof(PeerRecord) * i, sizeof(record));
      if (r == rank_) {
        continue;
      }
      peers_[r].pid = record.pid;
      peers_[r].start_time = record.start_time;
      map_peer(r, fds[i].get(), record.arena_bytes, record.status_offset);
    }
    done += answer.count;
  }
}

} // namespace trn
