#pragma once

// Operators of the neuron device that have no kernel of their own: each is handed to PyTorch's CPU kernel over the same
// memory.

#include "timing/OperatorWork.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>

namespace trn {

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Registers the fallback by name for every operator that has a CPU kernel as well as a decomposition: for those the
// decomposition would win over a backend's fallback, and its bits may differ from the CPU kernel's. So it does for a few
// compositions that depend on the device.
void register_fallback_over_decompositions();

// What one call has to do, from its arguments in the schema's order. `bytes` below 0 stands for those of its tensors.
using StatedWork = std::function<OperatorWork(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments)>;
// From now on the operator runs by its CPU kernel, also if it has a decomposition, and costs what the function says. Throws
// ValueError if there is no such operator, or if it would not come here: it has a kernel for neuron, or is a composition.
void state_work(const c10::OperatorName& name, StatedWork work);

} // namespace trn
