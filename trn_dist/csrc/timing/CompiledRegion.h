#pragma once

// Compiled code on the virtual clock: what the calling thread launches while one of these lives belongs to one program for
// the device, which the host launches once. Used by the compile backend (trn_dist/neuron/compile.py).

namespace trn {

class CompiledRegion {
 public:
  CompiledRegion();
  ~CompiledRegion();
  CompiledRegion(const CompiledRegion&) = delete;
  CompiledRegion& operator=(const CompiledRegion&) = delete;

  // Whether what is launched now is a part of a program that was launched before.
  static bool continues();
};

} // namespace trn
