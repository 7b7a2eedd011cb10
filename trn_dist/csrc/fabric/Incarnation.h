#pragma once

// Keeps the ranks that torchrun has restarted apart from those before them.
//
// torchrun's agents restart ranks with a store that outlives them, and c10d hands it to the process group as it is: with all
// that the former ranks wrote. A rank that came early would take their sockets, ids and tokens for those of its peers.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace trn {

// A name for `size` ranks that have been started together, which nobody before them had; empty if the store is theirs alone.
// Collective. Throws when a rank does not come within `timeout` (the error names it).
std::string agree_on_incarnation(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout);

// What each of `size` ranks has written under `prefix`/<rank>. Throws when one does not come within `timeout` (the error
// names it).
std::vector<std::string> read_from_all(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& prefix,
    int size,
    std::chrono::milliseconds timeout);

} // namespace trn
