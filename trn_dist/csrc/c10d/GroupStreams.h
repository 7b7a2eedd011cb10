#pragma once

// What the process groups tell the device of a call: its streams, when it was made, and what its group is called.

#include "fabric/Operation.h"

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trn {

class GroupStreams {
 public:
  struct OfDevice {
    c10::Stream collectives; // holds what is in flight, for synchronize() of the device
    c10::Stream futures; // see WorkNeuron
  };
  const OfDevice& operator[](c10::DeviceIndex device);
  // Has the device of `outputs` hold the operation until it is done. Returns the stream of its future; none: on the host.
  std::optional<c10::Stream> hold(const std::shared_ptr<Operation>& operation, const std::vector<at::Tensor>& outputs);

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, OfDevice> streams_;
};

// Groups along one dimension of a device mesh are described alike, and named apart. `name` stands in for a description.
GroupName group_name_of(const c10d::Backend& backend, const std::string& name, int first_rank);

// A call that is made now. `tensor`: whose device shows it; nullptr or on the CPU: it works for the host.
Enqueued enqueue_call(GroupStreams& streams, GroupName group, const at::Tensor* tensor);

} // namespace trn
