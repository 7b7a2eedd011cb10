#include "c10d/GroupStreams.h"

#include "c10d/Arguments.h"
#include "device/Device.h"
#include "device/Stream.h"
#include "fabric/Host.h"

namespace trn {

const GroupStreams::OfDevice& GroupStreams::operator[](c10::DeviceIndex device) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto it = streams_.find(device);
  if (it == streams_.end()) {
    it = streams_.emplace(device, OfDevice{new_stream(device), new_stream(device)}).first;
  }
  return it->second;
}

std::optional<c10::Stream> GroupStreams::hold(
    const std::shared_ptr<Operation>& operation,
    const std::vector<at::Tensor>& outputs) {
  if (outputs.empty() || !is_neuron(outputs[0])) {
    return std::nullopt;
  }
  const OfDevice& device = (*this)[outputs[0].device().index()];
  add_pending_or_join(device.collectives, operation, operation->done());
  return device.futures;
}

GroupName group_name_of(const c10d::Backend& backend, const std::string& name, int first_rank) {
  const std::string& description = backend.getGroupDesc();
  return {name_id(description.empty() || description == "undefined" ? name : description), first_rank};
}

Enqueued enqueue_call(GroupStreams& streams, GroupName group, const at::Tensor* tensor) {
  Enqueued enqueued;
  if (host_hooks.call_site != nullptr) {
    enqueued.call_site = host_hooks.call_site();
  }
  enqueued.launch_site = launch_site();
  enqueued.group = group;
  const bool for_device = tensor != nullptr && is_neuron(*tensor);
  const c10::DeviceIndex device = for_device ? tensor->device().index() : current_device();
  if (for_device) {
    enqueued.stream = streams[device].collectives;
  }
  const EnqueuedTransfer transfer = trn::enqueue(current_stream(device));
  enqueued.ready_ps = transfer.ready;
  enqueued.transfer = transfer.transfer;
  return enqueued;
}

} // namespace trn
