#pragma once

// What one collective moves: the posts of all ranks read together. Says how the work is cut into ranges (one a rank) and
// carries out any part of it. No waiting and no state here; Communicator decides who calls it and when.

#include "fabric/ControlBlock.h"
#include "fabric/Fabric.h"
#include "fabric/PrivateMemory.h"

#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <vector>

namespace trn {

const char* collective_name(Collective collective);
const char* dtype_name(c10::ScalarType dtype);
bool is_reduction(Collective collective);
bool has_root(Collective collective);
// "all_reduce(SUM) of float32 [3, 4]"
std::string describe(const Post& post);

class Exchange {
 public:
  // arena_ranks[r] is the place in the fabric of the rank in whose arena the group's rank r has its memory: its own, or its
  // proxy's. `private_memory` is that of the group's ranks, where it may be used.
  Exchange(
      const ControlBlock& control,
      uint64_t sequence,
      int rank,
      const Fabric& fabric,
      const std::vector<int>& arena_ranks,
      const std::vector<PrivateMemory>& private_memory);

  // nullopt, or a table of who called what when the ranks do not agree. `group_ranks`: what they are called there; empty: as
  // they are numbered here.
  std::optional<std::string> disagreement(const std::vector<int>& group_ranks) const;

  // Bytes of work in the range of rank `range`, whose results it would rather write itself.
  uint64_t range_nbytes(int range) const;
  // Carries out bytes [begin, end) of a range: multiples of 64, or the range's end.
  void execute(int range, uint64_t begin, uint64_t end) const;

  // For collectives that travel in the slot:
  // reduces all payloads into slot.result (all_reduce);
  void reduce_payloads(std::byte* result, uint64_t offset, uint64_t nbytes) const;
  const std::byte* payload(int rank) const {
    return views_[rank].post->payload;
  }
  const Post& post(int rank) const {
    return *views_[rank].post;
  }

 private:
  struct View {
    const Post* post;
    const Fabric::Peer* peer;
    std::byte* base;
    uint64_t arena_bytes;
    const Span* spans; // inputs, then outputs
  };
  // Where bytes are: mapped here, or in the private memory of another rank.
  struct Place {
    std::byte* data; // nullptr: private
    uint64_t address;
    int rank;
  };
  Place place(int rank, const Span& span, uint64_t offset) const;
  void read(const Place& from, std::byte* to, uint64_t nbytes) const;
  void write(const Place& to, const std::byte* from, uint64_t nbytes) const;
  void copy(const Place& to, const Place& from, uint64_t nbytes, bool streaming) const;
  void reduce_places(
      const c10::SmallVector<Place, 64>& inputs,
      const c10::SmallVector<Place, 64>& outputs,
      const double* factors,
      uint64_t nbytes,
      bool streaming) const;
  uint64_t total_inputs(int rank) const;
  // Part `part` of tensor `tensor`; tensors of a list are numbered tensor * size + part.
  Span input(int rank, uint32_t tensor, int part) const;
  Span output(int rank, uint32_t tensor, int part) const;
  uint32_t tensors() const;
  std::optional<std::string> out_of_bounds() const;
  std::optional<std::string> unequal_splits() const;
  void reduce_interval(int range, uint64_t begin, uint64_t end) const;
  template <typename Visit>
  void for_each_piece(int range, Visit visit) const;

  int size_;
  int rank_;
  const std::vector<PrivateMemory>* private_memory_;
  c10::SmallVector<View, 16> views_;
};

} // namespace trn
