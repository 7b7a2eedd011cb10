#pragma once

// The shared memory of one communicator on one host: how its ranks find each other's calls. It lies in the arena of the
// first of the group's ranks there. Only Communicator, Exchange and PointToPoint look at it.
//
// [Note: Slots]
// Collective number s of a group uses slot s % kSlots. All counters only grow, so nothing is ever reset:
//   1. Each rank writes its Post, then adds one to `arrived`.
//   2. The last to arrive compares the posts. A small collective it completes at once; for a large one it opens the
//      work: state becomes ready(use).
//   3. Whoever waits takes segments by ticket and counts `remaining` down; the last segment makes the state done(use).
//   4. A rank that has seen `done` and taken its result retires s. The slot is used again when all ranks have.
// A rank touches a slot only between its post and its retirement, so no reader can meet the slot's next use.

#include "fabric/Reduce.h"
#include "timing/CollectiveCost.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trn {

enum class Collective : uint8_t {
  Barrier,
  AllReduce,
  Reduce,
  ReduceScatter,
  Broadcast,
  AllGather,
  Gather,
  Scatter,
  AllToAll,
};

constexpr size_t kCollectives = 9;
constexpr uint64_t kSlots = 32; // collectives a rank may run ahead of the slowest
constexpr size_t kInlineBytes = 512; // payload that travels inside a slot
constexpr size_t kInlineSpans = 4;
constexpr uint64_t kChannelDepth = 64; // messages on their way from one rank to another before the sender queues them
constexpr size_t kErrorBytes = 8192;
constexpr int kMaxShape = 6;
constexpr uint64_t kNoOffset = UINT64_MAX;

// A run of bytes of the rank that wrote it: in its arena, or with kPrivate set at an address of its process. Of a message,
// kNoOffset: it has no numbers (timing mode).
struct Span {
  uint64_t offset;
  uint64_t nbytes;
};
constexpr uint64_t kPrivate = 1ULL << 63;

// One rank's call of one collective.
struct alignas(64) Post {
  Collective operation;
  c10::ScalarType dtype;
  Reduction reduction;
  bool away; // of a rank on another host, whose outputs are written there. See [Note: Ranks on other hosts]
  bool in_blocks; // without data here: BlockReduction moves it
  bool in_slot; // the inputs are in `payload`, and each rank takes its own result
  bool has_numbers; // see CollectiveCall
  int32_t root;
  uint64_t agreement; // derived from the sizes that every rank must see alike
  double factor; // for PremulSum
  uint64_t output_nbytes; // all outputs together
  uint64_t message_nbytes; // all inputs together, or all outputs if they are more
  Picoseconds ready_ps; // virtual time at which this rank can begin
  uint32_t num_inputs;
  uint32_t num_outputs;
  bool chunked_inputs; // each input is cut in equal parts, one a rank
  bool chunked_outputs;
  uint8_t ndim; // of the first tensor, for messages
  uint64_t site; // offset of the text of the program's line in the rank's arena, or kNoOffset
  uint64_t spans_offset; // inputs then outputs, in the rank's arena; kNoOffset: in `spans`
  alignas(64) std::byte payload[kInlineBytes];
  Span spans[kInlineSpans];
  int64_t shape[kMaxShape];
};

struct alignas(64) Slot {
  std::atomic<uint32_t> arrived; // modulo 2^32
  alignas(64) std::atomic<uint32_t> state; // futex
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> remaining; // segments not yet finished
  uint64_t segment_bytes;
  Picoseconds start_ps; // virtual time, known once the state is ready
  Picoseconds end_ps;
  alignas(64) std::byte result[kInlineBytes]; // of a small all-reduce

  static uint32_t ready(uint64_t sequence) {
    return static_cast<uint32_t>(2 * (sequence / kSlots) + 1);
  }
  static uint32_t done(uint64_t sequence) {
    return static_cast<uint32_t>(2 * (sequence / kSlots) + 2);
  }
  static bool reached(uint32_t state, uint32_t goal) {
    return static_cast<int32_t>(state - goal) >= 0;
  }
};

struct alignas(64) Ticket {
  std::atomic<uint32_t> next; // segment of one rank's range
};

struct alignas(64) Member {
  std::atomic<uint64_t> posted; // collectives called
  std::atomic<int32_t> cpu; // where it last ran
  std::atomic<int32_t> fabric_rank; // its place in the fabric
  std::atomic<uint64_t> mark_address; // of PrivateMemory, 0 before it has attached
  std::atomic<uint64_t> mark;
  std::atomic<uint32_t> reaches_all; // whether it may use every other rank's private memory
  alignas(64) std::atomic<uint64_t> retired; // collectives whose slot this rank needs no more
  std::atomic<uint64_t> attending; // 1 + the collective it waits in; 0: it is elsewhere
  std::atomic<uint32_t> departed; // it has destroyed the group
  std::atomic<uint32_t> lost; // it is on another host, and its connection has ended
  // Where the control block of the group lies that this rank leads after the group was shrunk; see Communicator::shrink.
  std::atomic<uint64_t> successor; // how many such groups there were
  std::atomic<uint64_t> successor_offset;
  std::atomic<uint64_t> successor_nonce;
  alignas(64) std::atomic<uint32_t> doorbell; // futex: messages sent to it, and the end of those that it sent
  std::atomic<uint32_t> doorbell_sleepers;
};

// [Note: Messages]
// free -> ready (sender) -> taken (receiver, copying) -> done (receiver) -> free (sender).
// A sender that has to go on moves the payload away from its tensor: ready -> moving -> ready.
enum class MessageState : uint32_t { Free, Ready, Moving, Taken, Done };

struct alignas(64) Message {
  std::atomic<uint32_t> state; // MessageState; futex
  std::atomic<uint32_t> awaited; // the sender waits for its end, by its doorbell
  int32_t tag;
  std::atomic<uint64_t> serial; // within the channel
  uint64_t offset; // of the payload, as in Span
  uint64_t nbytes;
  Picoseconds ready_ps; // virtual time at which the sender can begin
};

struct alignas(64) Channel {
  std::atomic<uint64_t> posted; // messages ever put into the ring
  std::atomic<uint64_t> sent; // messages ever sent; more than posted: some wait for room
  Message ring[kChannelDepth];
};

struct alignas(64) ControlHeader {
  uint64_t magic;
  uint64_t nonce;
  uint64_t size; // ranks
  std::atomic<uint32_t> departed; // ranks that have destroyed the group
  alignas(64) std::atomic<uint32_t> failure; // 0: none, 1: being written, 2: `error` holds the first one
  alignas(64) std::atomic<uint32_t> retire_bell; // futex: some rank has retired a collective
  std::atomic<uint32_t> retire_sleepers;
  alignas(64) char error[kErrorBytes];
  // Virtual time. Collectives of a group run one after the other; written by the last to arrive at each, who has seen all
  // that its predecessor wrote.
  Picoseconds busy_until_ps;
  SharedCostTable costs[kCollectives + 1]; // by Collective, then of a message
};

constexpr uint64_t kControlMagic = 0x74726e2d63746c31;

// Finds the parts of the block that starts at `base`.
class ControlBlock {
 public:
  ControlBlock() = default;
  ControlBlock(std::byte* base, int size) : base_(base), size_(size) {}

  static uint64_t nbytes(int size) {
    const uint64_t n = static_cast<uint64_t>(size);
    return sizeof(ControlHeader) + kSlots * sizeof(Slot) + n * sizeof(Member) +
        kSlots * n * (sizeof(Ticket) + sizeof(Post)) + n * n * sizeof(Channel);
  }
  ControlHeader& header() const {
    return *reinterpret_cast<ControlHeader*>(base_);
  }
  Slot& slot(uint64_t sequence) const {
    return *(reinterpret_cast<Slot*>(base_ + sizeof(ControlHeader)) + sequence % kSlots);
  }
  Member& member(int rank) const {
    return *(reinterpret_cast<Member*>(base_ + sizeof(ControlHeader) + kSlots * sizeof(Slot)) + rank);
  }
  Ticket& ticket(uint64_t sequence, int rank) const {
    return *(reinterpret_cast<Ticket*>(tickets()) + sequence % kSlots * size_ + rank);
  }
  Post& post(uint64_t sequence, int rank) const {
    return *(reinterpret_cast<Post*>(tickets() + kSlots * size_ * sizeof(Ticket)) + sequence % kSlots * size_ + rank);
  }
  Channel& channel(int source, int destination) const {
    std::byte* channels = tickets() + kSlots * size_ * (sizeof(Ticket) + sizeof(Post));
    return *(reinterpret_cast<Channel*>(channels) + static_cast<uint64_t>(source) * size_ + destination);
  }
  int size() const {
    return size_;
  }
  std::byte* base() const {
    return base_;
  }

 private:
  std::byte* tickets() const {
    return base_ + sizeof(ControlHeader) + kSlots * sizeof(Slot) + size_ * sizeof(Member);
  }
  std::byte* base_ = nullptr;
  int size_ = 0;
};

} // namespace trn
