#pragma once

// Finds ranks that wait for each other so that none can go on, in one group or across several, collectives and messages
// mixed. All that it needs lies in shared memory; called by a rank that has been blocked for a while.
//
// [Note: Deadlocks]
// A wait is hopeless when a rank that it needs (for a receive from any source: every rank that could send) is itself in
// hopeless waits only. The greatest such set is found by starting from all blocked ranks and taking out, until nothing
// changes, whoever waits for something that may still come: a rank outside of the set, a message that is there already, a
// thread that is not blocked. Whether a rank stayed blocked while the others were looked at shows in its status's version:
// the same before and after means that all the waits existed at one moment, and a set of hopeless waits cannot dissolve.

#include "fabric/ControlBlock.h"
#include "fabric/Fabric.h"

#include <optional>
#include <string>
#include <vector>

namespace trn {

struct Deadlock {
  std::string text; // the cycle, and a line for each rank
  std::vector<ControlBlock> groups; // in which ranks wait
};

std::optional<Deadlock> find_deadlock(const Fabric& fabric);

} // namespace trn
