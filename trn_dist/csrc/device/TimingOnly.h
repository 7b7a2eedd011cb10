#pragma once

// Timing mode: operators are priced and their results have shapes and memory on the chip, but nothing is computed.
//
// [Note: Known numbers]
// TRN_TIMING_ONLY=1 switches it on for the whole process. An operator then runs PyTorch's Meta kernel, its outputs get
// addresses in the arena that nobody touches, and the ledger and virtual time see what they would see otherwise. Small
// tensors whose numbers come from the program alone (counters, seeds, constants from the host) are computed all the same:
// they are "known". What is made from anything else is not, and a program that asks for such a number gets NaN if it is a
// floating-point number, which it can only log, and an error if it is an integer, a truth value or a size.

#include <ATen/core/Tensor.h>

#include <string>

namespace trn {

bool timing_only();

// Larger tensors are never known.
inline constexpr size_t kKnownBytes = 4096;

// Whether the memory of `tensor`, on neuron, holds its numbers.
bool known(const at::Tensor& tensor);
// Whether an operator that overwrites `tensor` with known numbers makes its memory known.
bool may_become_known(const at::Tensor& tensor);
void set_known(const at::Tensor& tensor, bool is_known);
// The memory at an address is freed.
void forget_known(const void* address);
// `what` needs numbers that were not computed.
[[noreturn]] void refuse_unknown(const std::string& what);

} // namespace trn
