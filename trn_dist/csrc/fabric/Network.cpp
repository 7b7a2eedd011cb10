#include "fabric/Network.h"

#include "fabric/Communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace trn {

namespace {

using std::chrono::milliseconds;

constexpr uint64_t kMagic = 0x74726e2d6e657431; // "trn-net1", changes with the frame
constexpr int kGlooTag = 0;
constexpr uint64_t kMaxParts = 1 << 20;
// Gloo needs a limit for each transfer, and closes all connections when it is over. Deadlines are kept by whoever waits for
// a collective, who knows which rank is late.
constexpr milliseconds kNoLimit{std::chrono::hours(24 * 365)};
constexpr milliseconds kBacklogInterval{2};
constexpr milliseconds kAgentInterval{500};

NetworkLoader& loader() {
  static auto* function = new NetworkLoader();
  return *function;
}

at::Tensor byte_tensor(uint64_t nbytes) {
  return at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte));
}

} // namespace

// The frames of one rank, and the thread that reads them.
struct Network::Stream {
  int from;
  c10::intrusive_ptr<c10d::Work> current; // with the network's mutex held
  std::thread thread;
};

void set_network_loader(NetworkLoader function) {
  loader() = std::move(function);
}

std::shared_ptr<Network>
Network::create(const c10::intrusive_ptr<c10d::Store>& store, int rank, const HostMap& hosts, milliseconds timeout) {
  TORCH_CHECK(loader() != nullptr, "neuron: hosts have no connection: trn_dist.neuron has not been imported");
  std::array<unsigned char, 16> token{};
  const std::string key = "trn/network";
  if (rank == 0) {
    fill_random(token.data(), token.size());
    store->set(key, std::vector<uint8_t>(token.begin(), token.end()));
  } else {
    store->wait({key}, timeout);
    const std::vector<uint8_t> raw = store->get(key);
    TORCH_CHECK_WITH(
        DistBackendError,
        raw.size() == token.size(),
        "neuron: the store's entry '",
        key,
        "' is not what rank 0 writes there");
    std::copy(raw.begin(), raw.end(), token.begin());
  }
  // A connection of its own to the store: waiting for it must not keep the program from using the store.
  auto gloo = loader()(
      c10::make_intrusive<c10d::PrefixStore>("trn/gloo", store->clone()),
      rank,
      static_cast<int>(hosts.host_of.size()),
      hosts.address,
      timeout);
  std::shared_ptr<Network> network(new Network(std::move(gloo), token, timeout));
  network->reaper_ = std::thread([raw = network.get()] { raw->reap(); });
  network->watcher_ = std::thread([raw = network.get()] { raw->watch(); });
  return network;
}

Network::Network(c10::intrusive_ptr<c10d::Backend> gloo, std::array<unsigned char, 16> token, milliseconds timeout)
    : gloo_(std::move(gloo)), token_(token), timeout_(timeout) {}

Network::~Network() {
  close(milliseconds(0));
}

void Network::close(milliseconds patience) {
  if (Arena::in_bad_fork()) {
    // The threads are the parent's.
    for (auto& [rank, stream] : streams_) {
      stream.release();
    }
    new std::thread(std::move(reaper_));
    new std::thread(std::move(watcher_));
    return;
  }
  HostLockRelease released;
  flush(patience);
  {
    std::unique_lock<std::mutex> guard(mutex_);
    if (closing_) {
      return;
    }
    closing_ = true;
    for (auto& [rank, stream] : streams_) {
      if (stream->current != nullptr) {
        stream->current->abort();
      }
    }
    if (!sent_.empty()) {
      sent_.front().work->abort();
    }
  }
  changed_.notify_all();
  for (auto& [rank, stream] : streams_) {
    stream->thread.join();
  }
  reaper_.join();
  watcher_.join();
}

// ---- Sending --------------------------------------------------------------------------------------------------------

void Network::send(int to, Frame frame, std::vector<at::Tensor> parts) {
  frame.magic = kMagic;
  frame.token = token_;
  frame.num_parts = parts.size();
  std::vector<at::Tensor> transfers;
  if (parts.size() <= kInlineParts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      frame.part_nbytes[i] = parts[i].nbytes();
    }
  } else {
    at::Tensor sizes = byte_tensor(parts.size() * sizeof(uint64_t));
    for (size_t i = 0; i < parts.size(); ++i) {
      static_cast<uint64_t*>(sizes.data_ptr())[i] = parts[i].nbytes();
    }
    transfers.push_back(std::move(sizes));
  }
  at::Tensor head = byte_tensor(sizeof(frame));
  std::memcpy(head.data_ptr(), &frame, sizeof(frame));
  transfers.insert(transfers.begin(), std::move(head));
  for (auto& part : parts) {
    if (part.nbytes() > 0) {
      transfers.push_back(std::move(part));
    }
  }

  std::mutex* order = nullptr;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_ || std::find(lost_.begin(), lost_.end(), to) != lost_.end()) {
      return;
    }
    auto& entry = sending_[to];
    if (entry == nullptr) {
      entry = std::make_unique<std::mutex>();
    }
    order = entry.get();
  }
  std::lock_guard<std::mutex> in_order(*order);
  for (auto& transfer : transfers) {
    c10::intrusive_ptr<c10d::Work> work;
    try {
      std::vector<at::Tensor> tensors{transfer};
      work = gloo_->send(tensors, to, kGlooTag);
    } catch (const std::exception&) {
      return; // it has gone, which whoever waits for it notices
    }
    std::lock_guard<std::mutex> guard(mutex_);
    sent_.push_back({std::move(work), std::move(transfer)});
  }
  changed_.notify_all();
}

void Network::flush(milliseconds patience) {
  HostLockRelease released;
  std::unique_lock<std::mutex> guard(mutex_);
  changed_.wait_for(guard, patience, [&] { return closing_ || (sent_.empty() && !reaping_); });
}

// Gloo's transfers want somebody to wait for them, or they are cancelled.
void Network::reap() {
  pthread_setname_np(pthread_self(), "trn_net_send");
  std::unique_lock<std::mutex> guard(mutex_);
  while (true) {
    changed_.wait(guard, [&] { return closing_ || !sent_.empty(); });
    if (closing_) {
      return;
    }
    const c10::intrusive_ptr<c10d::Work> work = sent_.front().work;
    reaping_ = true;
    guard.unlock();
    try {
      work->wait(kNoLimit);
    } catch (const std::exception&) {
      // The receiver has gone.
    }
    guard.lock();
    reaping_ = false;
    sent_.pop_front();
    changed_.notify_all();
  }
}

// ---- Receiving ------------------------------------------------------------------------------------------------------

void Network::listen(int from) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (closing_ || streams_.count(from) > 0) {
    return;
  }
  auto stream = std::make_unique<Stream>();
  stream->from = from;
  Stream* raw = stream.get();
  streams_[from] = std::move(stream);
  raw->thread = std::thread([this, raw] { read(*raw); });
}

void Network::receive(Stream& stream, std::byte* destination, uint64_t nbytes) {
  if (nbytes == 0) {
    return;
  }
  std::vector<at::Tensor> tensors{
      at::from_blob(destination, {static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte))};
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    TORCH_CHECK(!closing_, "closing");
    work = gloo_->recv(tensors, stream.from, kGlooTag);
    stream.current = work;
  }
  const bool received = work->wait(kNoLimit);
  std::lock_guard<std::mutex> guard(mutex_);
  stream.current = nullptr;
  TORCH_CHECK(received, "closing");
}

void Network::read(Stream& stream) {
  pthread_setname_np(pthread_self(), "trn_net_receive");
  try {
    Frame frame;
    std::vector<uint64_t> sizes;
    std::vector<std::byte> scratch;
    while (true) {
      receive(stream, reinterpret_cast<std::byte*>(&frame), sizeof(frame));
      if (frame.magic != kMagic || frame.token != token_ || frame.num_parts > kMaxParts) {
        break; // a stranger
      }
      sizes.assign(frame.part_nbytes, frame.part_nbytes + std::min<uint64_t>(frame.num_parts, kInlineParts));
      if (frame.num_parts > kInlineParts) {
        sizes.resize(frame.num_parts);
        receive(stream, reinterpret_cast<std::byte*>(sizes.data()), sizes.size() * sizeof(uint64_t));
      }
      size_t taken = 0;
      if (const auto communicator = find(frame.group)) {
        communicator->deliver(stream.from, frame, sizes, [&](std::byte* destination, uint64_t nbytes) {
          ++taken;
          receive(stream, destination, nbytes);
        });
      }
      for (; taken < sizes.size(); ++taken) { // of a group that has gone
        scratch.resize(sizes[taken]);
        receive(stream, scratch.data(), scratch.size());
      }
    }
  } catch (const std::exception&) {
    // The other side has gone, or this one is closing.
  }
  lose(stream.from);
}

std::shared_ptr<Communicator> Network::find(uint64_t group) {
  std::unique_lock<std::mutex> guard(mutex_);
  // A rank may use a group before this one has finished making it.
  changed_.wait_for(guard, timeout_, [&] { return closing_ || groups_.count(group) > 0; });
  const auto entry = groups_.find(group);
  return entry != groups_.end() ? entry->second.lock() : nullptr;
}

void Network::enter(uint64_t group, const std::shared_ptr<Communicator>& communicator) {
  std::vector<int> lost;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    groups_[group] = communicator;
    lost = lost_;
  }
  changed_.notify_all();
  for (const int rank : lost) {
    communicator->lose(rank);
  }
}

std::vector<std::shared_ptr<Communicator>> Network::communicators() {
  std::vector<std::shared_ptr<Communicator>> all;
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [group, entry] : groups_) {
    if (auto communicator = entry.lock()) {
      all.push_back(std::move(communicator));
    }
  }
  return all;
}

void Network::lose(int rank) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_) {
      return;
    }
    lost_.push_back(rank);
  }
  for (const auto& communicator : communicators()) {
    communicator->lose(rank);
  }
}

// ---- Looking after ---------------------------------------------------------------------------------------------------

void Network::attend(const std::shared_ptr<Communicator>& communicator) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    backlog_.push_back(communicator);
  }
  changed_.notify_all();
}

// Works off backlogs, and ends the job's groups when this rank's torchrun agent is killed: nobody would stop the ranks
// otherwise.
void Network::watch() {
  pthread_setname_np(pthread_self(), "trn_net_watch");
  const bool has_agent = std::getenv("TORCHELASTIC_RUN_ID") != nullptr;
  const pid_t agent = getppid();
  bool orphaned = false;
  std::unique_lock<std::mutex> guard(mutex_);
  while (!closing_) {
    changed_.wait_for(guard, backlog_.empty() ? kAgentInterval : kBacklogInterval);
    std::vector<std::weak_ptr<Communicator>> backlog;
    backlog.swap(backlog_);
    guard.unlock();
    for (auto& entry : backlog) {
      const auto communicator = entry.lock();
      if (communicator != nullptr && !communicator->work_off()) {
        attend(communicator);
      }
    }
    if (has_agent && !orphaned && getppid() != agent) {
      orphaned = true;
      for (const auto& communicator : communicators()) {
        communicator->fail(
            c10::str(
                "neuron: group ",
                communicator->name(),
                " has ended: the torchrun agent of ",
                communicator->rank_label(communicator->rank()),
                " (process ",
                agent,
                ") is gone."));
      }
    }
    guard.lock();
  }
}

} // namespace trn
