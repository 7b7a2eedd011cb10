#pragma once

// From the arguments of c10d's calls to what the fabric takes: checks, memory regions, reductions. Errors have the types
// that ProcessGroupNCCL raises.

#include "fabric/Communicator.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

namespace trn {

bool is_neuron(const at::Tensor& tensor);
// `name` is that of the call, for messages.
void check_tensor(const at::Tensor& tensor, const char* name);
void check_contiguous(const at::Tensor& tensor, const char* name);
void check_same_dtype(const at::Tensor& tensor, const at::Tensor& other, const char* name);
void check_one(const std::vector<at::Tensor>& tensors, const char* name);

// The memory as it lies. For tensors that are contiguous, in any memory format.
Region dense_region(const at::Tensor& tensor);
// The elements in their logical order. For any tensor.
Region logical_region(const at::Tensor& tensor);
// The bytes between a region's first and last element.
MemoryUse use_of(const Region& region, bool written);
// The parts into which all_to_all_single cuts a tensor along its first dimension.
void add_splits(
    c10::SmallVector<Region, 4>& regions,
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    const char* side);

void keep(CollectiveCall& call, const at::Tensor& tensor);
// Sets the dtype, and the shape that messages show.
void describe_by(CollectiveCall& call, const at::Tensor& tensor);
// Sets the reduction, once the dtype is set.
void set_reduction(CollectiveCall& call, const c10d::ReduceOp& op, const char* name);

} // namespace trn
