#pragma once

// What a call of the process group gives back: a c10d::Work over one operation of the fabric, or over several that were
// coalesced.
//
// [Note: Completion]
// Operators on a neuron device run at once on the host, so wait() returns with the data in place: it carries out what is
// left of the collective. Futures are waited for by code that cannot be overridden (DDP, fut.then()), therefore they are
// marked complete right away and carry, for neuron tensors, an event of a stream on which the operation is pending: whoever
// synchronises with the event finishes the operation. There are no events for CPU tensors: get_future() finishes the
// operation before it returns.

#include "fabric/Communicator.h"

#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace trn {

class WorkNeuron final : public c10d::Work {
 public:
  // `future_stream`: of the neuron device of the outputs, if they have one. `event`: of the call, for the profiler, or null.
  WorkNeuron(
      int rank,
      c10d::OpType type,
      std::vector<std::shared_ptr<Operation>> operations,
      std::vector<at::Tensor> outputs,
      std::optional<c10::Stream> future_stream,
      std::unique_ptr<at::RecordFunction> event = nullptr);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override;

  // Carries the operations out without ordering anything after them in virtual time; returns when the first began and the
  // last ended there.
  std::pair<Picoseconds, Picoseconds> finish();

 private:
  std::vector<std::shared_ptr<Operation>> operations_;
  std::vector<at::Tensor> outputs_;
  std::optional<c10::Stream> future_stream_;
  std::unique_ptr<at::RecordFunction> event_; // until it is done
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace trn
