#pragma once

// A collective that this rank has posted: its staging, and how it moves on. Made by Communicator::post.

#include "fabric/Communicator.h"

namespace trn {

class CollectiveOperation final : public Operation {
 public:
  CollectiveOperation(Communicator& communicator, CollectiveCall&& call);

  std::string describe() const override;
  // Whether one of the two writes what the other reads or writes.
  bool overlaps(const CollectiveOperation& other) const;
  // Copies what lies outside the arena into it. Before the sequence number is taken, since memory may be short.
  void stage();
  // Fills this rank's post of the slot.
  void publish(Post& post);
  // The inputs and outputs in this process's arena, once staged; empty when they travel in the slot.
  const c10::SmallVector<Span, 4>& spans() const {
    return spans_;
  }
  // Whether a BlockReduction carries it out, which it does by calling `reduce` once all ranks have posted.
  bool in_blocks() const {
    return in_blocks_;
  }
  void carry_out(const std::function<void(const CollectiveCall&)>& reduce);
  // The bytes [first, second) of an input that these ranks of the group need.
  std::pair<uint64_t, uint64_t> needed_by(size_t input, const std::vector<int>& ranks) const;

 private:
  bool advance(Wait& wait, bool thorough) override;
  std::vector<int> missing() const override;
  void describe_wait(WaitRecord& record) const override;
  void attend(bool waiting) override;

  void take_result();
  void take_from_slot();
  uint64_t input_nbytes() const;
  uint64_t output_nbytes() const;
  uint64_t agreement() const;
  bool travels_in_slot() const;

  CollectiveCall call_;
  bool in_blocks_;
  bool in_slot_;
  std::atomic<uint32_t> carried_out_{0}; // futex
  std::atomic<uint32_t> sleepers_{0};
  // Where the inputs and outputs lie in the arena, when they do not travel in the slot.
  c10::SmallVector<Span, 4> spans_;
  std::vector<StagedBlock> staged_;
  std::vector<std::pair<Region, const std::byte*>> copies_out_;
  std::vector<StagedBlock> span_table_;
};

} // namespace trn
