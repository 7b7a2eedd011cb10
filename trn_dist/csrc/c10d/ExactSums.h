#pragma once

// The mode in which sums are exact, see [Note: Exact sums] in fabric/ExactSum.h. Off, it costs one relaxed load a reduction.

namespace trn {

void set_exact_sums(bool on);
bool exact_sums();

} // namespace trn
