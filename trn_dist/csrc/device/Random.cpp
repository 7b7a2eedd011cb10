// Operators that draw random numbers element by element, on the device's counter-based generator (Generator.h). Draws of
// other kinds (multinomial, poisson, randperm, ...) reach PyTorch's CPU kernels with a generator lent to them (Fallback.cpp).

#include "device/TimingOnly.h"
#include "device/Alias.h"
#include "device/Generator.h"
#include "device/Inspection.h"
#include "timing/OperatorCost.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/bernoulli_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <numbers>

namespace trn {

namespace {

using at::Tensor;
using OptionalGenerator = std::optional<at::Generator>;

// Random bits of one element, as the numbers that distributions are made of.
struct Draw {
  std::array<uint32_t, 4> bits;

  uint64_t integer(int which) const {
    return (static_cast<uint64_t>(bits[2 * which + 1]) << 32) | bits[2 * which];
  }
  // Uniform on [0, 1) with 53 bits.
  double uniform(int which = 0) const {
    return static_cast<double>(integer(which) >> 11) * 0x1p-53;
  }
  // Uniform on (0, 1], for a logarithm.
  double uniform_open(int which = 0) const {
    return static_cast<double>((integer(which) >> 11) + 1) * 0x1p-53;
  }
  // Standard normal (Box and Muller).
  double normal() const {
    return std::sqrt(-2.0 * std::log(uniform_open(0))) * std::cos(2.0 * std::numbers::pi * uniform(1));
  }
};

// Launches a draw in virtual time.
void charge(const Tensor& self) {
  static const OperatorModel model = operator_model("aten::random_");
  Traffic traffic;
  traffic.wrote(*self.unsafeGetTensorImpl());
  launch(self.device().index(), model.name, price(model, traffic, /*causal=*/false));
  if (inspecting()) {
    inspect(self.device().index(), model.name, Touched{self, /*written=*/true});
  }
}

// Fills self with make(draw of element i), i in row-major order.
template <typename scalar_t, typename F>
void fill(const Tensor& self, const OptionalGenerator& generator, F make) {
  charge(self);
  if (C10_UNLIKELY(timing_only())) {
    set_known(self, false);
    return;
  }
  const Tensor alias = cpu_alias(self);
  const bool direct = alias.is_contiguous();
  Tensor target = direct ? alias : at::empty_like(alias, at::MemoryFormat::Contiguous);
  auto* impl = at::get_generator_or_default<NeuronGeneratorImpl>(generator, default_generator(self.device().index()));
  uint64_t seed = 0;
  uint64_t offset = 0;
  {
    std::lock_guard<std::mutex> guard(impl->mutex_);
    seed = impl->current_seed();
    offset = impl->advance(static_cast<uint64_t>(self.numel()));
  }
  auto* data = target.mutable_data_ptr<scalar_t>();
  const int64_t numel = target.numel();
  for (int64_t i = 0; i < numel; ++i) {
    data[i] = make(Draw{philox(seed, offset + static_cast<uint64_t>(i))});
  }
  if (!direct) {
    alias.copy_(target);
  }
}

// With TRN_CPU_RNG=1: the CPU operator over the same memory, on PyTorch's CPU generator. Returns whether it did.
template <typename F>
bool drawn_on_cpu(const Tensor& self, F draw) {
  if (!cpu_rng()) {
    return false;
  }
  charge(self);
  if (C10_UNLIKELY(timing_only())) {
    set_known(self, false);
    return true;
  }
  draw(cpu_alias(self), OptionalGenerator());
  return true;
}

Tensor& uniform_(Tensor& self, double from, double to, OptionalGenerator generator) {
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.uniform_(from, to, cpu); })) {
    return self;
  }
  if (self.is_complex()) {
    Tensor parts = at::view_as_real(self);
    uniform_(parts, from, to, std::move(generator));
    return self;
  }
  TORCH_CHECK(from <= to, "uniform_ expects to return a [from, to) range, but found from=", from, " > to=", to);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "uniform_neuron", [&] {
    // As many random bits as the type holds, so that `to` is never rounded up to.
    constexpr int digits = std::numeric_limits<scalar_t>::digits;
    using math_t = at::opmath_type<scalar_t>;
    const auto low = static_cast<math_t>(from);
    const auto width = static_cast<math_t>(to) - low;
    fill<scalar_t>(self, generator, [=](const Draw& draw) {
      const auto unit =
          static_cast<math_t>(draw.integer(0) >> (64 - digits)) * static_cast<math_t>(std::ldexp(1.0, -digits));
      return static_cast<scalar_t>(unit * width + low);
    });
  });
  return self;
}

Tensor& normal_(Tensor& self, double mean, double std, OptionalGenerator generator) {
  TORCH_CHECK(std >= 0, "normal expects std >= 0.0, but found std ", std);
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.normal_(mean, std, cpu); })) {
    return self;
  }
  if (self.is_complex()) {
    Tensor parts = at::view_as_real(self);
    normal_(parts, 0, std / std::numbers::sqrt2, std::move(generator));
    if (mean != 0) {
      self.add_(mean);
    }
    return self;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "normal_neuron", [&] {
    fill<scalar_t>(
        self, generator, [=](const Draw& draw) { return static_cast<scalar_t>(draw.normal() * std + mean); });
  });
  return self;
}

// Integers of [low, low + range); range 0 means all 2^64.
void random_range(Tensor& self, const OptionalGenerator& generator, int64_t low, uint64_t range) {
  AT_DISPATCH_V2(
      self.scalar_type(),
      "random_neuron",
      AT_WRAP([&] {
        fill<scalar_t>(self, generator, [=](const Draw& draw) {
          const uint64_t bits = draw.integer(0);
          const uint64_t value = range == 0 ? bits : bits % range;
          return static_cast<scalar_t>(static_cast<int64_t>(value + static_cast<uint64_t>(low)));
        });
      }),
      AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16);
}

// The largest integer that random_() with no bounds gives: all that the type holds exactly.
int64_t largest_integer(at::ScalarType type) {
  int64_t largest = 0;
  AT_DISPATCH_V2(
      type,
      "random_neuron",
      AT_WRAP([&] {
        if constexpr (std::is_same_v<scalar_t, bool>) {
          largest = 1;
        } else if constexpr (std::is_integral_v<scalar_t>) {
          const auto max = std::numeric_limits<scalar_t>::max();
          largest = static_cast<uint64_t>(max) > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
              ? std::numeric_limits<int64_t>::max()
              : static_cast<int64_t>(max);
        } else {
          largest = int64_t{1} << std::numeric_limits<scalar_t>::digits;
        }
      }),
      AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16);
  return largest;
}

Tensor& random_(Tensor& self, OptionalGenerator generator) {
  if (!drawn_on_cpu(self, [](Tensor alias, auto cpu) { alias.random_(cpu); })) {
    random_range(self, generator, 0, static_cast<uint64_t>(largest_integer(self.scalar_type())) + 1);
  }
  return self;
}

Tensor& random_from_to(Tensor& self, int64_t from, std::optional<int64_t> to, OptionalGenerator generator) {
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.random_(from, to, cpu); })) {
    return self;
  }
  if (to.has_value()) {
    TORCH_CHECK(from < *to, "random_ expects 'from' to be less than 'to', but got from=", from, " >= to=", *to);
    random_range(self, generator, from, static_cast<uint64_t>(*to) - static_cast<uint64_t>(from));
  } else if (from == std::numeric_limits<int64_t>::lowest()) {
    random_range(self, generator, 0, 0);
  } else {
    random_range(self, generator, from, static_cast<uint64_t>(largest_integer(self.scalar_type()) - from) + 1);
  }
  return self;
}

Tensor& random_to(Tensor& self, int64_t to, OptionalGenerator generator) {
  return random_from_to(self, 0, to, std::move(generator));
}

void check_probability(double p) {
  TORCH_CHECK(0 <= p && p <= 1, "bernoulli_ expects p to be in [0, 1], but got p=", p);
}

Tensor& bernoulli_float(Tensor& self, double p, OptionalGenerator generator) {
  check_probability(p);
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.bernoulli_(p, cpu); })) {
    return self;
  }
  AT_DISPATCH_V2(
      self.scalar_type(),
      "bernoulli_neuron",
      AT_WRAP([&] {
        fill<scalar_t>(self, generator, [=](const Draw& draw) { return static_cast<scalar_t>(draw.uniform() < p); });
      }),
      AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16);
  return self;
}

Tensor& bernoulli_tensor(Tensor& self, const Tensor& p, OptionalGenerator generator) {
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.bernoulli_(to_cpu_alias(p), cpu); })) {
    return self;
  }
  if (C10_UNLIKELY(timing_only())) {
    charge(self);
    set_known(self, false);
    return self;
  }
  const Tensor probabilities = to_cpu_alias(p).to(at::kDouble).expand(self.sizes()).contiguous();
  const auto* probability = probabilities.const_data_ptr<double>();
  for (int64_t i = 0; i < probabilities.numel(); ++i) {
    check_probability(probability[i]);
  }
  AT_DISPATCH_V2(
      self.scalar_type(),
      "bernoulli_neuron",
      AT_WRAP([&] {
        int64_t i = 0;
        fill<scalar_t>(self, generator, [&](const Draw& draw) {
          return static_cast<scalar_t>(draw.uniform() < probability[i++]);
        });
      }),
      AT_EXPAND(AT_ALL_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16);
  return self;
}

Tensor& bernoulli_out(const Tensor& p, OptionalGenerator generator, Tensor& out) {
  out.resize_(p.sizes());
  return bernoulli_tensor(out, p, std::move(generator));
}

// A distribution of floating-point numbers given by a function of a draw.
template <typename F>
Tensor& fill_floating(Tensor& self, const OptionalGenerator& generator, F make) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "distribution_neuron", [&] {
    fill<scalar_t>(self, generator, [=](const Draw& draw) { return static_cast<scalar_t>(make(draw)); });
  });
  return self;
}

Tensor& exponential_(Tensor& self, double lambda, OptionalGenerator generator) {
  TORCH_CHECK(lambda > 0.0, "exponential_ expects lambda > 0.0, but found lambda=", lambda);
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.exponential_(lambda, cpu); })) {
    return self;
  }
  return fill_floating(self, generator, [=](const Draw& draw) { return -std::log(draw.uniform_open()) / lambda; });
}

Tensor& cauchy_(Tensor& self, double median, double sigma, OptionalGenerator generator) {
  TORCH_CHECK(sigma > 0.0, "cauchy_ expects sigma > 0.0, but found sigma=", sigma);
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.cauchy_(median, sigma, cpu); })) {
    return self;
  }
  return fill_floating(self, generator, [=](const Draw& draw) {
    return median + sigma * std::tan(std::numbers::pi * (draw.uniform() - 0.5));
  });
}

Tensor& log_normal_(Tensor& self, double mean, double std, OptionalGenerator generator) {
  TORCH_CHECK(std > 0.0, "log_normal_ expects std > 0.0, but found std=", std);
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.log_normal_(mean, std, cpu); })) {
    return self;
  }
  return fill_floating(self, generator, [=](const Draw& draw) { return std::exp(draw.normal() * std + mean); });
}

Tensor& geometric_(Tensor& self, double p, OptionalGenerator generator) {
  TORCH_CHECK(0 < p && p < 1, "geometric_ expects p to be in (0, 1), but got p=", p);
  if (drawn_on_cpu(self, [&](Tensor alias, auto cpu) { alias.geometric_(p, cpu); })) {
    return self;
  }
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "geometric_neuron", [&] {
    fill<scalar_t>(self, generator, [=](const Draw& draw) {
      return static_cast<scalar_t>(std::ceil(std::log(draw.uniform_open()) / std::log1p(-p)));
    });
  });
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("uniform_", &uniform_);
  m.impl("normal_", &normal_);
  m.impl("random_", &random_);
  m.impl("random_.from", &random_from_to);
  m.impl("random_.to", &random_to);
  m.impl("bernoulli_.float", &bernoulli_float);
  m.impl("bernoulli_.Tensor", &bernoulli_tensor);
  m.impl("bernoulli.out", &bernoulli_out);
  m.impl("exponential_", &exponential_);
  m.impl("cauchy_", &cauchy_);
  m.impl("log_normal_", &log_normal_);
  m.impl("geometric_", &geometric_);
  // PyTorch's own composition of an empty mask, bernoulli_ and mul.
  m.impl("native_dropout", &at::native::native_dropout_cpu);
}

} // namespace

} // namespace trn
