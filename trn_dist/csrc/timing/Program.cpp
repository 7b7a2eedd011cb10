#include "timing/Program.h"

#include <cstring>

namespace trn {

void Program::launch(
    c10::DeviceIndex device,
    c10::StreamId stream,
    uint32_t name,
    const OperatorWork& work,
    bool launched) {
  std::string key;
  const auto add = [&key](const auto& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof(value)); // fields, for a struct has gaps
  };
  add(name);
  add(work.kind);
  add(work.causal);
  add(work.type);
  add(work.operand);
  add(work.vector_passes);
  add(work.scalar_passes);
  add(work.gpsimd_passes);
  add(work.products);
  add(work.sizes);
  add(work.elements);
  add(work.bytes);
  add(work.longer_bytes);
  const auto [it, fresh] = work_ids_.emplace(std::move(key), static_cast<int64_t>(works_.size()));
  if (fresh) {
    works_.push_back({name, work});
  }
  actions_.push_back({Action::Launch, launched, device, static_cast<int32_t>(stream), it->second});
  ++launches_;
}

int64_t Program::enqueue(c10::DeviceIndex device, c10::StreamId stream, bool launched) {
  actions_.push_back({Action::Enqueue, launched, device, static_cast<int32_t>(stream), 0});
  transfers_.emplace_back();
  return static_cast<int64_t>(transfers_.size()) - 1;
}

void Program::wait(Action::Kind kind, c10::DeviceIndex device, c10::StreamId stream, Origin origin) {
  if (origin.kind == Origin::Unknown || origin.index < 0) {
    cannot_replay(
        "it waits for something that is not recorded: another rank's memory (symmetric memory), or work of another "
        "thread");
    return;
  }
  actions_.push_back({kind, origin.kind, device, static_cast<int32_t>(stream), origin.index});
}

void Program::act(Action::Kind kind, c10::DeviceIndex device, c10::StreamId stream, int64_t value) {
  actions_.push_back({kind, 0, device, static_cast<int32_t>(stream), value});
}

int64_t Program::moment(c10::DeviceIndex device, c10::StreamId stream) {
  actions_.push_back({Action::Record, 0, device, static_cast<int32_t>(stream), 0});
  return moments_++;
}

void Program::describe(int64_t transfer, RecordedTransfer description) {
  transfers_.at(static_cast<size_t>(transfer)) = std::move(description);
}

} // namespace trn
