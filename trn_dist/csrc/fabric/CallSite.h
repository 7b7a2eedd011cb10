#pragma once

// Where in the user's program a call was made. The text of each line is written once into the rank's arena, so that a post
// can name it by its offset and every rank can read it.

#include "fabric/Fabric.h"

#include <cstdint>
#include <string>

namespace trn {

// Keeps "train.py:41 (step)" in the arena until the process ends; its offset.
uint64_t intern_call_site(const std::string& text);

// " at train.py:41 (step)", or nothing when the rank did not say or what it says makes no sense.
std::string call_site_text(const Fabric::Peer& peer, uint64_t site);

} // namespace trn
