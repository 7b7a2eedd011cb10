#pragma once

#include <cstdint>

namespace trn {

// Offset in the arena of "train.py:41 (step)", the line of the program that the calling thread is at: the innermost frame
// that belongs neither to torch nor to us, or the outermost of all. kNoOffset when it is not known.
uint64_t python_call_site();

} // namespace trn
