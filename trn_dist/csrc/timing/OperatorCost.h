#pragma once

// What an operator takes on a logical core: the time of its engine or of its HBM traffic, whichever is longer.
//
// [Note: Pricing]
// An operator's model (which engine, how many passes over the elements, which arguments make the matrix product) is looked
// up by its name once and kept beside what the fallback knows of it. During a call the fallback feeds every tensor it
// touches into a Traffic, whose sums work_of() turns into an OperatorWork and price() into picoseconds.
// docs/virtual-time.md has the formulas and where they come from.

#include "timing/OperatorWork.h"
#include "timing/VirtualClock.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace trn {

struct OperatorModel {
  OperatorClass kind = OperatorClass::Elementwise;
  // Passes over the elements; a negative number on VectorE means: by the number of tensors read.
  float vector_passes = -1;
  float scalar_passes = 0;
  float gpsimd_passes = 0;
  // Arguments of a matrix product, by position among the arguments: [.., M, K] and [.., K, N] (or [N, K]).
  int8_t left = -1;
  int8_t right = -1;
  bool right_transposed = false;
  int8_t causal = -1; // argument that says so
  int8_t read_only = -1; // argument that the schema calls written and that is only read
  bool host_reads = false; // the host waits for a result, or for a size that depends on the data
  uint32_t name = 0; // see name_id
};

// The model of an operator by its full name, "aten::mm". One that nobody has described is elementwise.
OperatorModel operator_model(const std::string& name);

// The tensors of one call.
class Traffic {
 public:
  // An argument is read; `index`: its position among the arguments (the tensors of a list have the same one).
  // `again`: it is an earlier argument, too, so its bytes are on their way already.
  void read(const c10::TensorImpl& tensor, int index, bool again);
  // An argument was written, with the sizes it has now.
  void wrote(const c10::TensorImpl& tensor);
  // A tensor was made.
  void made(const c10::TensorImpl& tensor);

  // Nothing was written or made: a view, or a question.
  bool moved_nothing() const {
    return !wrote_;
  }

 private:
  friend OperatorWork work_of(const OperatorModel& model, const Traffic& traffic, bool causal);
  struct Argument {
    int index = -1;
    int64_t numel = 0; // of all tensors of a list
    int64_t bytes = 0;
    const c10::TensorImpl* tensor = nullptr; // the first
  };
  const Argument* argument(int index) const;
  void meet(c10::ScalarType type);

  c10::SmallVector<Argument, 6> arguments_;
  int64_t written_bytes_ = 0;
  int64_t made_bytes_ = 0;
  int64_t written_numel_ = 0;
  const c10::TensorImpl* result_ = nullptr; // the first made or written
  bool wrote_ = false;
  bool complex_ = false;
  c10::ScalarType slowest_ = c10::ScalarType::Undefined; // of 4 bytes, if there is one
};

OperatorWork work_of(const OperatorModel& model, const Traffic& traffic, bool causal);
inline OperatorCost price(const OperatorModel& model, const Traffic& traffic, bool causal) {
  return price(work_of(model, traffic, causal), chip_rates());
}

// Copies between tensors, and between device and host.
OperatorCost price_copy(int64_t bytes_read, int64_t bytes_written);
OperatorCost price_host_copy(int64_t nbytes);
// Copies from or to memory of another rank, at `address` in this process.
OperatorCost price_peer_copy(const void* address, int64_t bytes_read, int64_t bytes_written);
// How long bytes take on the link to the rank whose memory lies at an address; 0 where that is unknown. Set by the symmetric
// memory (c10d/SymmetricMemoryNeuron.h).
using LinkTime = Picoseconds (*)(const void* address, int64_t nbytes);
void set_link_time(LinkTime function);

// Time of the matrix engines of a logical core for `batch` products [m, k] x [k, n]: the systolic array takes the
// stationary operand in tiles of rows x columns and streams at least 64 rows of the other past each; the better of both
// orientations, the work split over the physical cores by products and tiles, or by the streamed rows.
double matmul_ps(int64_t batch, int64_t m, int64_t k, int64_t n, c10::ScalarType type);

// Bytes in memory that an access to all elements touches: a dimension of stride 0 counts once.
int64_t touched_bytes(const c10::TensorImpl& tensor);

} // namespace trn
