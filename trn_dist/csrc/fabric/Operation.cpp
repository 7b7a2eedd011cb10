#include "fabric/Operation.h"

#include "fabric/Communicator.h"

#include <c10/util/Exception.h>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHealthInterval{200};

} // namespace

Operation::Operation(Communicator& communicator)
    : communicator_(communicator.shared_from_this()), started_(Clock::now()) {}

std::exception_ptr Operation::error() const {
  return done() ? error_ : nullptr;
}

void Operation::complete(std::exception_ptr error) {
  if (done()) {
    return;
  }
  if (error != nullptr) {
    Communicator::abandon(std::move(tensors_));
  } else {
    for (auto& tensor : tensors_) {
      communicator_->retired_tensors_.push_back(std::move(tensor));
    }
  }
  tensors_.clear();
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
}

bool Operation::poll() {
  if (done()) {
    return true;
  }
  if (Arena::in_bad_fork()) {
    return true;
  }
  std::unique_lock<std::mutex> guard(communicator_->mutex_, std::try_to_lock);
  if (!guard.owns_lock()) {
    return false;
  }
  try {
    Wait wait;
    if (done() || advance(wait, /*thorough=*/true)) {
      return true;
    }
    communicator_->throw_if_failed();
    const int64_t now = std::chrono::duration_cast<milliseconds>(Clock::now() - started_).count();
    if (now >= next_check_ms_.load(std::memory_order_relaxed)) {
      next_check_ms_.store(now + kHealthInterval.count(), std::memory_order_relaxed);
      const auto what = [this] { return describe(); };
      const auto absent = [this] { return missing(); };
      communicator_->check_health(absent, what);
      if (now > timeout_.count()) {
        communicator_->time_out(absent, what, timeout_, /*fail_group=*/true);
      }
    }
  } catch (const c10::Error&) {
    complete(std::current_exception());
    return true;
  }
  return false;
}

void Operation::fail_group(const std::string& reason) {
  communicator_->fail(
      c10::str(
          "neuron: ",
          describe(),
          " of group ",
          communicator_->name(),
          " was ",
          reason,
          " by ",
          communicator_->rank_label(communicator_->rank())));
}

void Operation::finish() {
  finish(milliseconds(0));
}

void Operation::finish(milliseconds timeout) {
  if (!done()) {
    communicator_->throw_if_unusable();
    Communicator::Section section(*communicator_);
    Wait wait;
    if (!done() && !advance(wait, /*thorough=*/false)) {
      attend(true);
      try {
        communicator_->wait_until(
            section,
            [this](Wait& next, bool thorough) { return done() || advance(next, thorough); },
            [this] { return missing(); },
            [this] { return describe(); },
            timeout.count() > 0 ? timeout : timeout_,
            /*fail_on_timeout=*/timeout.count() == 0);
      } catch (const c10::Error&) {
        attend(false);
        if (!communicator_->failure().empty()) {
          complete(std::current_exception());
        }
        throw;
      } catch (...) { // interrupted by the user: the operation goes on
        attend(false);
        throw;
      }
      attend(false);
    }
    communicator_->retire();
  }
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
  record();
}

void Operation::record() {
  if (!recorded_.exchange(true) && enqueued_.stream.has_value()) {
    record_collective(
        *enqueued_.stream,
        name_id(name_),
        enqueued_.group,
        trace_sequence_,
        static_cast<int64_t>(message_nbytes_),
        times_);
  }
}

void Operation::join() const {
  if (enqueued_.stream.has_value()) {
    stream_wait(current_stream(enqueued_.stream->device_index()), times_.end);
  } else {
    host_wait(times_.end);
  }
}

} // namespace trn
