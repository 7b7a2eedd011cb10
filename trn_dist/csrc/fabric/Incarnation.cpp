#include "fabric/Incarnation.h"

#include "fabric/Fabric.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <thread>

namespace trn {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

const char* const kIncarnationKey = "trn/incarnation"; // what the present rank 0 calls it
constexpr milliseconds kShortestPoll{1};
constexpr milliseconds kLongestPoll{32};

// The launcher's agent holds the store, not rank 0.
bool outlives_its_ranks() {
  const char* value = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return value != nullptr && std::string(value) == "True";
}

std::string members_key(const std::string& incarnation) {
  return c10::str(kIncarnationKey, "/", incarnation);
}

std::string complete_key(const std::string& incarnation) {
  return members_key(incarnation) + "/complete";
}

// Rank 0 names the incarnation and says, once all have come, whom it has seen: a rank that finds itself there was not
// reading what a former rank 0 left.
std::string lead(const c10::intrusive_ptr<c10d::Store>& store, int size, milliseconds timeout) {
  const std::string incarnation = random_name();
  store->set(c10::str(members_key(incarnation), "/0"), "leader");
  store->set(kIncarnationKey, incarnation);
  std::string seen;
  for (const std::string& name : read_from_all(store, members_key(incarnation), size, timeout)) {
    seen += name + " ";
  }
  store->set(complete_key(incarnation), seen);
  return incarnation;
}

std::string follow(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const std::string name = random_name();
  std::string incarnation;
  for (milliseconds poll = kShortestPoll;; poll = std::min(2 * poll, kLongestPoll)) {
    if (store->check({kIncarnationKey})) {
      const std::string present = store->get_to_str(kIncarnationKey);
      if (present != incarnation) {
        incarnation = present;
        store->set(c10::str(members_key(incarnation), "/", rank), name);
      }
      if (store->check({complete_key(incarnation)}) &&
          store->get_to_str(complete_key(incarnation)).find(name) != std::string::npos) {
        return incarnation;
      }
    }
    if (Clock::now() > deadline) {
      if (!incarnation.empty()) {
        read_from_all(store, members_key(incarnation), size, kShortestPoll); // throws if others are absent too
      }
      TORCH_CHECK_WITH(
          DistBackendError,
          false,
          "neuron: rank 0 of ",
          size,
          " did not join the process group within ",
          static_cast<double>(timeout.count()) / 1000,
          " s");
    }
    std::this_thread::sleep_for(poll);
  }
}

} // namespace

std::string
agree_on_incarnation(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, milliseconds timeout) {
  if (size == 1 || !outlives_its_ranks()) {
    return "";
  }
  return rank == 0 ? lead(store, size, timeout) : follow(store, rank, size, timeout);
}

std::vector<std::string>
read_from_all(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int size, milliseconds timeout) {
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) {
    keys.push_back(c10::str(prefix, "/", r));
  }
  try {
    store->wait(keys, timeout);
  } catch (const std::exception&) {
    std::ostringstream absent;
    int count = 0;
    for (int r = 0; r < size; ++r) {
      if (!store->check({keys[r]}) && ++count <= 32) {
        absent << (count > 1 ? ", " : "") << r;
      }
    }
    if (count == 0) {
      throw;
    }
    TORCH_CHECK_WITH(
        DistBackendError,
        false,
        "neuron: ",
        count == 1 ? "rank " : "ranks ",
        absent.str(),
        count > 32 ? c10::str(" and ", count - 32, " more") : "",
        " of ",
        size,
        " did not join the process group within ",
        static_cast<double>(timeout.count()) / 1000,
        " s");
  }
  std::vector<std::string> values;
  if (store->hasExtendedApi()) {
    for (const std::vector<uint8_t>& raw : store->multiGet(keys)) {
      values.emplace_back(raw.begin(), raw.end());
    }
  } else {
    for (const std::string& key : keys) {
      values.push_back(store->get_to_str(key));
    }
  }
  return values;
}

} // namespace trn
