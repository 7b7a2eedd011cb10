#pragma once

// What PyTorch's profiler and execution traces are told of the process group's calls, under the names that they use for
// every backend: an event "neuron:all_reduce" from the call until its Work is done, and inside of the call an event
// "record_param_comms" that carries group, ranks, sequence number, sizes and dtype. Nothing is built when nobody listens.

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trn {

// Begins the event of a call, to be ended on any thread by dropping it; null when nobody listens.
std::unique_ptr<at::RecordFunction> begin_event(const char* title, at::ArrayRef<at::Tensor> inputs);

struct CommsRecord {
  const char* collective;
  int64_t sequence;
  bool message; // send or recv
  std::string group{};
  std::string description{};
  int rank; // in the group
  std::vector<int> ranks{}; // of the job
  at::ArrayRef<at::Tensor> inputs{};
  at::ArrayRef<at::Tensor> outputs{};
  bool async = true;
};

bool comms_are_recorded();
// Runs `call` inside of the event that `record` describes.
void record_comms(const CommsRecord& record, c10::function_ref<void()> call);

} // namespace trn
