// Exact sums of tensors, for trn_dist.neuron.exact_sums: accumulated gradients and global norms. As operators, whose
// tensors are read and written where they lie, in the memory of this host.

#include "c10d/ExactSums.h"

#include "fabric/ExactSum.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <vector>

namespace trn {

namespace {

std::atomic<bool> enabled{false};

void check(const at::Tensor& tensor, at::ScalarType dtype, const char* name) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype && tensor.is_contiguous(), name, ": expected a contiguous tensor of ", dtype);
}

// Adds `addend` (float32, n elements, on any device of this host) to the exact value that is the sum of `parts` (float64
// on the CPU, n elements each). Returns what they cannot hold as one more part, or an empty tensor.
at::Tensor add(at::TensorList parts, const at::Tensor& addend) {
  check(addend, at::kFloat, "addend");
  std::vector<double*> pointers;
  for (const at::Tensor& part : parts) {
    check(part, at::kDouble, "parts");
    TORCH_CHECK_VALUE(part.numel() == addend.numel(), "parts: expected as many elements as the addend");
    pointers.push_back(part.data_ptr<double>());
  }
  at::Tensor rest = at::empty({addend.numel()}, at::TensorOptions(at::kDouble));
  const bool any = exact_add(
      pointers.data(),
      static_cast<int>(pointers.size()),
      static_cast<const float*>(addend.const_data_ptr()),
      rest.data_ptr<double>(),
      addend.numel());
  return any ? rest : at::empty({0}, at::TensorOptions(at::kDouble));
}

// Writes to `out` (float32, n elements) the sum of the rows (float64 on the CPU, n elements each) over the divisor.
void round(const at::Tensor& out, at::TensorList rows, double divisor) {
  check(out, at::kFloat, "out");
  std::vector<const double*> pointers;
  for (const at::Tensor& row : rows) {
    check(row, at::kDouble, "rows");
    TORCH_CHECK_VALUE(row.numel() == out.numel(), "rows: expected as many elements as in out");
    pointers.push_back(row.const_data_ptr<double>());
  }
  exact_round(
      static_cast<float*>(out.data_ptr()), pointers.data(), static_cast<int>(pointers.size()), divisor, out.numel());
}

// Adds the squares of `values` (float32) to `words` (int64 of kSquareWords elements on the CPU).
void squares(const at::Tensor& words, const at::Tensor& values) {
  check(words, at::kLong, "words");
  check(values, at::kFloat, "values");
  TORCH_CHECK_VALUE(words.numel() == kSquareWords, "words: expected ", kSquareWords, " elements");
  add_squares(words.data_ptr<int64_t>(), static_cast<const float*>(values.const_data_ptr()), values.numel());
}

} // namespace

void set_exact_sums(bool on) {
  enabled.store(on, std::memory_order_relaxed);
}

bool exact_sums() {
  return enabled.load(std::memory_order_relaxed);
}

TORCH_LIBRARY(trn_dist, m) {
  m.def("set_exact_sums(bool on) -> ()", &set_exact_sums);
  m.def("exact_sums() -> bool", &exact_sums);
  m.def(
      "exact_add(Tensor[] parts, Tensor addend) -> Tensor",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(add)));
  m.def(
      "exact_round(Tensor(a!) out, Tensor[] rows, float divisor) -> ()",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(round)));
  m.def(
      "add_squares(Tensor(a!) words, Tensor values) -> ()",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(squares)));
  m.def("square_words() -> int", [] { return int64_t{kSquareWords}; });
}

} // namespace trn
