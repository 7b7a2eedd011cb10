#pragma once

// Vector norms of float32 tensors with sums in float64 (linalg.vector_norm and torch._foreach_norm): see Norm.cpp.

namespace trn {

void set_float64_norm(bool on);
bool float64_norm();

} // namespace trn
