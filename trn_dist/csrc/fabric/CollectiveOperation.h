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

 private:
  bool advance(Wait& wait, bool thorough) override;
  std::vector<int> missing() const override;
  void attend(bool waiting) override;

  void take_result();
  void take_from_slot();
  uint64_t input_nbytes() const;
  uint64_t output_nbytes() const;
  uint64_t agreement() const;
  bool travels_in_slot() const;

  CollectiveCall call_;
  bool in_slot_;
  // Where the inputs and outputs lie in the arena, when they do not travel in the slot.
  c10::SmallVector<Span, 4> spans_;
  std::vector<StagedBlock> staged_;
  std::vector<std::pair<Region, const std::byte*>> copies_out_;
  std::vector<StagedBlock> span_table_;
};

} // namespace trn
