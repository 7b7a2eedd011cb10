#include "timing/ChipRates.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace trn {

namespace {

std::atomic<const ChipRates*> current{nullptr};
std::function<void()>& loader() {
  static auto* function = new std::function<void()>();
  return *function;
}

} // namespace

const ChipRates& chip_rates() {
  const ChipRates* rates = current.load(std::memory_order_acquire);
  if (C10_UNLIKELY(rates == nullptr)) {
    TORCH_CHECK(loader() != nullptr, "neuron: virtual time has no chip: trn_dist.neuron has not been imported");
    // Takes the interpreter lock before it looks whether another thread was first, so that no lock is held meanwhile.
    loader()();
    rates = current.load(std::memory_order_acquire);
    TORCH_CHECK(rates != nullptr, "neuron: the loader of the chip's rates has set none");
  }
  return *rates;
}

void set_chip_rates(ChipRates rates) {
  // The former ones are never freed: another thread may be reading them.
  current.store(new ChipRates(std::move(rates)), std::memory_order_release);
}

void set_chip_rates_loader(std::function<void()> function) {
  loader() = std::move(function);
}

} // namespace trn
