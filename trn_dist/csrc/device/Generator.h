#pragma once

// Random numbers of the device: a counter-based generator. Element i of a draw takes the number at (seed, offset + i), and
// a draw moves the offset by the number of elements, rounded up to a multiple of four. So a shard of a tensor is drawn as
// the slice of the whole that it is, when its offset is set to where it begins; this is what DTensor does for shards of
// the first dimension.

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstdint>
#include <memory>

namespace trn {

class NeuronGeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit NeuronGeneratorImpl(c10::DeviceIndex device);

  static c10::DeviceType device_type();
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  // The state is a uint8 CPU tensor of 16 bytes: seed and offset, little-endian 64-bit each.
  void set_state(const c10::TensorImpl& new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // torch.compile passes a generator's state around as a generator: two that share a state draw from one stream.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  // Takes the numbers for `count` elements: returns where they begin.
  uint64_t advance(uint64_t count);

 private:
  NeuronGeneratorImpl* clone_impl() const override;

  struct State {
    uint64_t seed = c10::default_rng_seed_val;
    uint64_t offset = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Whether draws come from PyTorch's CPU generator instead, for comparisons with device "cpu". TRN_CPU_RNG=1 says so from
// the start.
bool cpu_rng();
void set_cpu_rng(bool enabled);

// 128 random bits for the number at (seed, counter): Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011).
inline std::array<uint32_t, 4> philox(uint64_t seed, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ULL * c0;
    const uint64_t p1 = 0xCD9E8D57ULL * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {c0, c1, c2, c3};
}

} // namespace trn
