#pragma once

// Operators of the neuron device that have no kernel of their own: each is handed to PyTorch's CPU kernel over the same
// memory.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace trn {

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Registers the fallback by name for every operator that has a CPU kernel as well as a decomposition: for those the
// decomposition would win over a backend's fallback, and its bits may differ from the CPU kernel's. So it does for a few
// compositions that depend on the device.
void register_fallback_over_decompositions();

} // namespace trn
