#include "c10d/WorkNeuron.h"

#include "c10d/Profile.h"
#include "fabric/Host.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

namespace trn {

WorkNeuron::WorkNeuron(
    int rank,
    c10d::OpType type,
    std::vector<std::shared_ptr<Operation>> operations,
    std::vector<at::Tensor> outputs,
    std::optional<c10::Stream> future_stream,
    std::unique_ptr<at::RecordFunction> event)
    : Work(rank, type),
      operations_(std::move(operations)),
      outputs_(std::move(outputs)),
      future_stream_(future_stream),
      event_(std::move(event)) {}

bool WorkNeuron::isCompleted() {
  std::vector<std::shared_ptr<PendingWork>> unfinished;
  Picoseconds end_ps = 0;
  for (const auto& operation : operations_) {
    if (operation->finished()) {
      end_ps = std::max(end_ps, operation->end_ps());
    } else {
      unfinished.push_back(operation);
    }
  }
  const bool done = poll_all(unfinished, end_ps);
  if (!host_poll(done ? end_ps : INT64_MAX)) {
    return false;
  }
  acknowledge_all(unfinished);
  return true;
}

bool WorkNeuron::isSuccess() const {
  for (const auto& operation : operations_) {
    if (!operation->done() || operation->error() != nullptr) {
      return false;
    }
  }
  return true;
}

std::exception_ptr WorkNeuron::exception() const {
  for (const auto& operation : operations_) {
    if (auto error = operation->error()) {
      return error;
    }
  }
  return nullptr;
}

int WorkNeuron::sourceRank() const {
  return operations_.size() == 1 ? operations_[0]->source() : -1;
}

std::vector<at::Tensor> WorkNeuron::result() {
  return outputs_;
}

void WorkNeuron::synchronize() {
  wait(kNoTimeout);
}

bool WorkNeuron::wait(std::chrono::milliseconds timeout) {
  const auto finish = [&] {
    for (const auto& operation : operations_) {
      operation->finish(timeout.count() > 0 ? timeout : std::chrono::milliseconds(0));
      operation->join();
    }
  };
  if (comms_are_recorded()) {
    record_comms(
        {.collective = "wait",
         .sequence = static_cast<int64_t>(getSequencenumber()),
         .message = c10d::isP2POp(opType_),
         .rank = rank_},
        finish);
  } else {
    finish();
  }
  event_.reset();
  return true;
}

std::pair<Picoseconds, Picoseconds> WorkNeuron::finish() {
  std::pair<Picoseconds, Picoseconds> times{INT64_MAX, 0};
  for (const auto& operation : operations_) {
    operation->finish();
    times.first = std::min(times.first, operation->start_ps());
    times.second = std::max(times.second, operation->end_ps());
  }
  return times;
}

void WorkNeuron::blockCurrentStream() {
  wait(kNoTimeout);
}

void WorkNeuron::abort() {
  for (const auto& operation : operations_) {
    operation->fail_group("aborted");
  }
}

// [Note: Completion]
c10::intrusive_ptr<c10::ivalue::Future> WorkNeuron::getFuture() {
  std::unique_lock<std::mutex> guard(future_mutex_, std::try_to_lock);
  if (!guard.owns_lock()) {
    HostLockRelease released;
    guard.lock();
  }
  if (future_ != nullptr) {
    return future_;
  }
  std::vector<c10::Device> devices;
  if (future_stream_.has_value()) {
    devices.push_back(future_stream_->device());
  }
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
  if (future_stream_.has_value()) {
    for (const auto& operation : operations_) {
      add_pending_or_join(*future_stream_, operation, operation->done());
    }
    c10::StreamGuard stream(*future_stream_);
    future->markCompleted(c10::IValue(outputs_));
  } else {
    try {
      HostLockRelease released;
      wait(kNoTimeout);
      future->markCompleted(c10::IValue(outputs_));
    } catch (const c10::Error&) {
      future->setError(std::current_exception());
    }
  }
  future_ = std::move(future);
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkNeuron::getFutureResult() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  c10d::WorkResult result = c10d::WorkResult::SUCCESS;
  try {
    HostLockRelease released;
    wait(kNoTimeout);
  } catch (const c10::Error&) {
    result = c10d::WorkResult::COMM_ERROR;
  }
  future->markCompleted(c10::IValue(static_cast<int64_t>(result)));
  return future;
}

uint64_t WorkNeuron::getSequencenumber() const {
  return operations_.empty() ? 0 : operations_.back()->sequence();
}

} // namespace trn
