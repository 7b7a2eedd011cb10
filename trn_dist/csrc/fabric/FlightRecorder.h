#pragma once

// The last calls of this rank, with what became of them, in its arena: any rank can read them, also when this one is dead or
// stuck. What PyTorch's flight recorder keeps for NCCL; trn_dist/neuron/flight_record.py writes it in the same form.

#include "fabric/ControlBlock.h"
#include "fabric/Fabric.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace trn {

struct FlightRecord {
  uint64_t id = 0; // from 1 on, over all groups of the rank
  uint64_t sequence = 0; // in its group: of collectives, or of messages
  int64_t created_ns = 0; // since 1970
  int64_t completed_ns = 0; // 0: not completed
  uint64_t failed = 0;
  int64_t timeout_ms = 0;
  uint64_t group = kNoOffset; // interned, see CallSite.h
  uint64_t site = kNoOffset; // likewise
  uint64_t operation = 0; // Collective, or kSend, kReceive
  uint64_t chunked = 0; // the form of the call that takes one tensor in place of a list
  int64_t rank = 0; // of the caller in the group
  int64_t peer = -1; // of a message
  uint64_t dtype = 0;
  uint64_t input_nbytes = 0;
  uint64_t output_nbytes = 0;
  uint64_t ndim = 0;
  std::array<int64_t, kMaxShape> shape{}; // of the first tensor

  static constexpr uint64_t kSend = 100;
  static constexpr uint64_t kReceive = 101;
};

// How many calls are kept: TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE, 2000 by default; 0 turns it off.
uint64_t flight_capacity();

// Where the ring of this rank lies.
uint64_t flight_offset();

// Enters a call; the id that finishes it. `created` is of the steady clock.
uint64_t record_call(FlightRecord record, int64_t created_steady_ns);
void record_end(uint64_t id, bool failed);

// Oldest first. Empty when the rank records nothing, or what it says of its ring makes no sense.
std::vector<FlightRecord> flight_records(const Fabric::Peer& peer);

} // namespace trn
