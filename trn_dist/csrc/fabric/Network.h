#pragma once

// What connects the hosts of a job: frames between two ranks over torch's own Gloo, whose send and recv carry plain bytes.
//
// [Note: Ranks on other hosts]
// A communicator over several hosts has a control block on each. On every host each remote rank is stood in for by one local
// rank, its proxy: the remote rank sends what it posts there, and the proxy enters it into the slot of the collective, with
// the data in its own arena. All else (comparing the calls, the tree of a reduction, virtual time, matching of messages)
// then happens as if the remote rank were local, and has the same result on every host.
//
// Each stream of frames, from a rank to its proxy, is ordered and is read by a thread of its own in the proxy's process.
// Payloads are copied when they are sent, so a sender never waits for its receiver.
//
// What listens are Gloo's sockets, on the address in HostMap alone. Each frame bears a token that rank 0 draws and passes
// through the job's store; a stream whose frame does not is closed. Nothing is encrypted.

#include "fabric/ControlBlock.h"
#include "fabric/Hosts.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace trn {

class Communicator;

enum class FrameKind : uint32_t { Post, Message, Failure, Departure };

constexpr size_t kInlineParts = 6;

// What goes ahead of each transfer.
struct Frame {
  uint64_t magic;
  std::array<unsigned char, 16> token;
  FrameKind kind;
  int32_t from; // rank in the group
  int32_t to; // of a message
  int32_t tag;
  uint64_t group; // see Communicator::group_id
  uint64_t sequence; // of a collective; of a message in its channel
  Picoseconds ready_ps; // of a message
  uint64_t num_parts; // payloads that follow
  uint64_t part_nbytes[kInlineParts]; // if they are more, the sizes are a transfer of their own
  Post post;
};

class Network {
 public:
  // Receives the next part of a frame into `destination`, which has the part's size.
  using ReceivePart = std::function<void(std::byte* destination, uint64_t nbytes)>;

  // Collective over the job.
  static std::shared_ptr<Network> create(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      const HostMap& hosts,
      std::chrono::milliseconds timeout);
  ~Network();

  // Puts a frame and its parts (byte tensors) on their way to rank `to` of the job; returns at once. Once `to` has gone, does
  // nothing.
  void send(int to, Frame frame, std::vector<at::Tensor> parts);
  // Frames of this group are handed to the communicator for as long as it lives.
  void enter(uint64_t group, const std::shared_ptr<Communicator>& communicator);
  // Reads what rank `from` of the job sends, from now on.
  void listen(int from);
  // The communicator has frames that must wait, and wants Communicator::work_off() to be called until it has none.
  void attend(const std::shared_ptr<Communicator>& communicator);
  // Waits until all that was sent has been taken, at most `patience`.
  void flush(std::chrono::milliseconds patience);
  // The same; then stops reading.
  void close(std::chrono::milliseconds patience);

 private:
  struct Stream;
  Network(
      c10::intrusive_ptr<c10d::Backend> gloo,
      std::array<unsigned char, 16> token,
      std::chrono::milliseconds timeout);
  void read(Stream& stream);
  void receive(Stream& stream, std::byte* destination, uint64_t nbytes);
  void reap();
  void watch();
  std::shared_ptr<Communicator> find(uint64_t group);
  // All communicators that frames are handed to.
  std::vector<std::shared_ptr<Communicator>> communicators();
  void lose(int rank);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::array<unsigned char, 16> token_;
  std::chrono::milliseconds timeout_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false;
  std::map<uint64_t, std::weak_ptr<Communicator>> groups_;
  std::map<int, std::unique_ptr<Stream>> streams_; // by rank in the job
  std::vector<int> lost_;
  std::vector<std::weak_ptr<Communicator>> backlog_;
  struct Sent {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor bytes;
  };
  std::deque<Sent> sent_; // oldest first
  bool reaping_ = false; // one more is in the reaper's hands
  std::map<int, std::unique_ptr<std::mutex>> sending_; // a frame and its parts go out together
  std::thread reaper_;
  std::thread watcher_;
};

// Makes the Gloo group of a job that listens on `address`; set by trn_dist.neuron.
using NetworkLoader = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const std::string& address,
    std::chrono::milliseconds timeout)>;
void set_network_loader(NetworkLoader loader);

} // namespace trn
