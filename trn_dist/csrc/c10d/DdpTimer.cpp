// The times that DistributedDataParallel logs of its forward pass, backward pass and communication
// (`_get_ddp_logging_data`), in virtual time.

#include "device/Stream.h"
#include "timing/VirtualClock.h"

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace trn {

namespace {

class DdpTimer final : public c10d::Timer {
 public:
  explicit DdpTimer(c10::Device device) : device_(device) {}

  void record(Event event) override {
    getTimeRef(event) = stream_time(current_stream(device_.index())) / 1000;
  }

  // In nanoseconds; none where one was not recorded in this iteration.
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start);
    const auto to = getTimestamp(end);
    if (!from.has_value() || !to.has_value() || *to < *from) {
      return std::nullopt;
    }
    return *to - *from;
  }

 private:
  c10::Device device_;
};

} // namespace

} // namespace trn

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::DeviceType::PrivateUse1, trn::DdpTimer)

} // namespace c10d
