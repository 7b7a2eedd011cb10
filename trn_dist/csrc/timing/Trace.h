#pragma once

// The trace of one rank in Chrome's JSON array format, which Perfetto reads: a process per rank, a track per stream and one
// for the host's waits, a counter of allocated HBM, and an arrow between the members of each collective. Fed from the
// journal; the file is readable at any moment, for the format does not need its closing bracket.

#include <string>

namespace trn {

// Records from now on go to `path`, which is written anew.
void start_trace(const std::string& path, int rank);
// Writes out what was recorded since the last call. Does nothing without a trace.
void flush_trace();

} // namespace trn
