#include "device/Inspection.h"

#include "device/Alias.h"
#include "device/Sanitizer.h"
#include "device/Stream.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace trn {

std::atomic<int> inspections{0};

namespace {

struct Flight {
  const PendingWork* id;
  std::weak_ptr<const PendingWork> work;
  MemoryUses outputs;
};

struct Inspectors {
  std::mutex mutex;
  std::vector<Flight> flights;
  std::shared_ptr<const OperatorObserver> observer;
  std::function<std::string()> user_line;
};

Inspectors& inspectors() {
  static auto* instance = new Inspectors();
  return *instance;
}

thread_local bool tls_observing = false;

void refuse_memory_in_flight(uint32_t name, c10::ArrayRef<Touched> touched) {
  Inspectors& all = inspectors();
  std::shared_ptr<const PendingWork> work; // dropped without the lock, which its end takes
  {
    std::lock_guard<std::mutex> guard(all.mutex);
    for (const Touched& one : touched) {
      const MemoryUse use = use_of(one.tensor, one.written);
      for (const Flight& flight : all.flights) {
        for (const MemoryUse& output : flight.outputs) {
          if (work == nullptr && output.overlaps(use)) {
            work = flight.work.lock();
          }
        }
      }
    }
  }
  TORCH_CHECK(
      work == nullptr,
      "neuron: ",
      name_of(name),
      " uses the output of ",
      work->describe(),
      ", which is still in flight: call wait() on the Work that it returned, or let the current stream wait for it "
      "first",
      sanitizing() ? "" : "; with TRN_SANITIZE=1 the line of that call is named");
}

void call_observer(uint32_t name, c10::ArrayRef<Touched> touched) {
  std::shared_ptr<const OperatorObserver> observer;
  {
    std::lock_guard<std::mutex> guard(inspectors().mutex);
    observer = inspectors().observer;
  }
  if (observer == nullptr || tls_observing) {
    return;
  }
  TouchedTensors aliases;
  for (const Touched& one : touched) {
    if (one.tensor.has_storage()) {
      aliases.push_back({to_cpu_alias(one.tensor), one.written});
    }
  }
  tls_observing = true;
  try {
    (*observer)(name_of(name), aliases);
  } catch (...) {
    tls_observing = false;
    throw;
  }
  tls_observing = false;
}

} // namespace

MemoryUse use_of(const at::Tensor& tensor, bool written) {
  if (!tensor.has_storage() || tensor.numel() == 0) {
    return {};
  }
  const auto* begin =
      static_cast<const std::byte*>(tensor.storage().data()) + tensor.storage_offset() * tensor.element_size();
  const size_t nbytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  return {begin, begin + nbytes, written};
}

void inspect(c10::DeviceIndex device, uint32_t name, c10::ArrayRef<Touched> touched) {
  if (tls_observing) {
    return;
  }
  if (sanitizing()) { // first: it names the lines of both uses
    sanitize(current_stream(device), name, touched);
  }
  refuse_memory_in_flight(name, touched);
  call_observer(name, touched);
}

void begin_flight(const std::shared_ptr<const PendingWork>& work, MemoryUses uses) {
  uses.erase(std::remove_if(uses.begin(), uses.end(), [](const MemoryUse& use) { return !use.written; }), uses.end());
  if (uses.empty()) {
    return;
  }
  std::lock_guard<std::mutex> guard(inspectors().mutex);
  inspectors().flights.push_back({work.get(), work, std::move(uses)});
  inspections.fetch_add(1, std::memory_order_relaxed);
}

void end_flight(const PendingWork* work) noexcept {
  std::lock_guard<std::mutex> guard(inspectors().mutex);
  const size_t ended = std::erase_if(inspectors().flights, [&](const Flight& flight) { return flight.id == work; });
  inspections.fetch_sub(static_cast<int>(ended), std::memory_order_relaxed);
}

void forget_flights(const void* address, size_t nbytes) noexcept {
  const auto* begin = static_cast<const std::byte*>(address);
  const MemoryUse freed{begin, begin + nbytes, true};
  std::lock_guard<std::mutex> guard(inspectors().mutex);
  for (Flight& flight : inspectors().flights) {
    flight.outputs.erase(
        std::remove_if(
            flight.outputs.begin(),
            flight.outputs.end(),
            [&](const MemoryUse& output) { return output.overlaps(freed); }),
        flight.outputs.end());
  }
}

void set_operator_observer(OperatorObserver observer) {
  std::lock_guard<std::mutex> guard(inspectors().mutex);
  const bool had = inspectors().observer != nullptr;
  const bool has = observer != nullptr;
  inspectors().observer = has ? std::make_shared<const OperatorObserver>(std::move(observer)) : nullptr;
  inspections.fetch_add(static_cast<int>(has) - static_cast<int>(had), std::memory_order_relaxed);
}

uint32_t user_line() {
  return name_id(inspectors().user_line ? inspectors().user_line() : "");
}

void set_user_line_provider(std::function<std::string()> provider) {
  inspectors().user_line = std::move(provider);
}

} // namespace trn
