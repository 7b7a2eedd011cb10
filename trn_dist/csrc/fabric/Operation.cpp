#include "fabric/Operation.h"

#include "fabric/Communicator.h"
#include "fabric/FlightRecorder.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

namespace trn {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kHealthInterval{200};

// name_id of a literal, without its lock.
uint32_t literal_id(const char* name) {
  thread_local ska::flat_hash_map<const char*, uint32_t> known;
  const auto found = known.find(name);
  return found != known.end() ? found->second : known.emplace(name, name_id(name)).first->second;
}

} // namespace

Operation::Operation(Communicator& communicator)
    : communicator_(communicator.shared_from_this()), started_(Clock::now()) {}

Operation::~Operation() {
  land();
}

void Operation::claim(MemoryUses uses) {
  if (!enqueued_.stream.has_value()) {
    return; // of the host's memory, which no operator of the device touches
  }
  in_flight_ = true;
  begin_flight(shared_from_this(), std::move(uses));
}

void Operation::land() noexcept {
  if (in_flight_.exchange(false)) {
    end_flight(this);
  }
}

std::exception_ptr Operation::error() const {
  return done() ? error_ : nullptr;
}

void Operation::complete(std::exception_ptr error) {
  if (done()) {
    return;
  }
  if (error != nullptr) {
    land();
    Communicator::abandon(std::move(tensors_));
  } else {
    for (auto& tensor : tensors_) {
      communicator_->retired_tensors_.push_back(std::move(tensor));
    }
  }
  tensors_.clear();
  record_end(flight_id_, error != nullptr);
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
}

void Operation::describe_transfer(RecordedTransfer::Role role) const {
  if (C10_LIKELY(enqueued_.transfer < 0)) {
    return;
  }
  RecordedTransfer transfer;
  transfer.role = role;
  transfer.operation = name_;
  transfer.group = communicator_->name();
  transfer.ranks = communicator_->job_ranks();
  transfer.sequence = trace_sequence_;
  transfer.bytes = static_cast<int64_t>(message_nbytes_);
  if (enqueued_.stream.has_value()) {
    transfer.description = name_of(enqueued_.group.name);
    transfer.stream = static_cast<int32_t>(enqueued_.stream->id());
    transfer.device = enqueued_.stream->device_index();
  } else {
    transfer.for_host = true;
  }
  trn::describe_transfer(enqueued_.transfer, std::move(transfer));
}

void Operation::record_in_flight(FlightRecord& record) {
  record.group = communicator_->name_text_;
  record.rank = communicator_->rank();
  record.site = enqueued_.call_site;
  record.timeout_ms = timeout_.count();
  flight_id_ =
      record_call(record, std::chrono::duration_cast<std::chrono::nanoseconds>(started_.time_since_epoch()).count());
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
      // Operations are looked at one by one, and a peer may die in between: the oldest that it blocks is named.
      if (const Operation* oldest = communicator_->oldest_before(*this)) {
        communicator_->check_health([oldest] { return oldest->missing(); }, [oldest] { return oldest->describe(); });
      }
      communicator_->check_health(absent, what);
      if (communicator_->fabric_->paused()) {
        paused_ms_ += now - last_look_ms_;
      }
      last_look_ms_ = now;
      if (now - paused_ms_ > timeout_.count()) {
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
  try {
    carry_out(timeout);
  } catch (const c10::Error&) {
    communicator_->report_failure();
    throw;
  }
}

void Operation::carry_out(milliseconds timeout) {
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
            [this](WaitRecord& record) { describe_wait(record); },
            enqueued_.call_site,
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
  land();
  if (!recorded_.exchange(true) && enqueued_.stream.has_value()) {
    record_collective(
        *enqueued_.stream,
        literal_id(name_),
        enqueued_.group,
        trace_sequence_,
        static_cast<int64_t>(message_nbytes_),
        times_,
        enqueued_.launch_site,
        enqueued_.transfer);
  }
}

void Operation::join() const {
  if (enqueued_.stream.has_value()) {
    const c10::Stream current = current_stream(enqueued_.stream->device_index());
    stream_wait(current, times_.end, origin());
    stream_learns(current, enqueued_.clock);
  } else {
    host_wait(times_.end, origin());
  }
}

} // namespace trn
