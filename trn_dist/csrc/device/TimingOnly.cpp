#include "device/TimingOnly.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <cstdlib>
#include <mutex>
#include <string_view>

namespace trn {

namespace {

struct KnownMemory {
  std::mutex mutex;
  ska::flat_hash_set<const void*> addresses; // of storages
};

KnownMemory& known_memory() {
  static auto* memory = new KnownMemory(); // never destroyed: tensors may outlive static destructors
  return *memory;
}

} // namespace

bool timing_only() {
  static const bool on = [] {
    const char* value = std::getenv("TRN_TIMING_ONLY");
    return value != nullptr && *value != '\0' && std::string_view(value) != "0";
  }();
  return on;
}

bool known(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return false;
  }
  const auto& storage = tensor.storage();
  if (storage.nbytes() == 0) {
    return true;
  }
  std::lock_guard<std::mutex> guard(known_memory().mutex);
  return known_memory().addresses.count(storage.data()) > 0;
}

bool may_become_known(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.storage().nbytes() > kKnownBytes) {
    return false;
  }
  return tensor.nbytes() == tensor.storage().nbytes() ? tensor.is_non_overlapping_and_dense() : known(tensor);
}

void set_known(const at::Tensor& tensor, bool is_known) {
  if (!tensor.has_storage() || tensor.storage().data() == nullptr) {
    return;
  }
  std::lock_guard<std::mutex> guard(known_memory().mutex);
  if (is_known) {
    known_memory().addresses.insert(tensor.storage().data());
  } else {
    known_memory().addresses.erase(tensor.storage().data());
  }
}

void forget_known(const void* address) {
  std::lock_guard<std::mutex> guard(known_memory().mutex);
  known_memory().addresses.erase(address);
}

void refuse_unknown(const std::string& what) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "neuron: timing mode (TRN_TIMING_ONLY) computes no numbers, and ",
      what,
      " needs them: what the program does next depends on data. Run it with numbers, or without this step.");
}

} // namespace trn
