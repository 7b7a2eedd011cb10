// Scaled dot product attention without the T×T matrix of weights: PyTorch's CPU flash kernel behind the "efficient"
// variant. It is that variant, and not "flash", because context parallelism in PyTorch can shard it and because "flash" on
// this backend would be routed to an operator that only the CPU has.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

namespace trn {

namespace {

using at::Tensor;

// There is one fused kernel here, which stands for both of CUDA's variants: sdpa_kernel(EFFICIENT_ATTENTION) must find it,
// and the CPU's choice looks at the setting for flash alone.
class EfficientMeansFlash {
 public:
  EfficientMeansFlash()
      : changes_(!at::globalContext().userEnabledFlashSDP() && at::globalContext().userEnabledMemEfficientSDP()) {
    if (changes_) {
      at::globalContext().setSDPUseFlash(true);
    }
  }
  ~EfficientMeansFlash() {
    if (changes_) {
      at::globalContext().setSDPUseFlash(false);
    }
  }
  EfficientMeansFlash(const EfficientMeansFlash&) = delete;
  EfficientMeansFlash& operator=(const EfficientMeansFlash&) = delete;

 private:
  const bool changes_;
};

// What the CPU would choose, so that the numbers are the CPU's: its flash kernel, or plain operators. One case more goes
// to the flash kernel: values of another size than queries and keys, whose numbers then differ from the CPU's by rounding.
// On a chip, too, that case (multi-head latent attention) takes no T×T matrix.
int64_t fused_sdp_choice(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& attn_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  // Equal sizes, for the question alone.
  const bool sizes_differ = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.size(3) == key.size(3) &&
      key.size(3) != value.size(3) && value.size(3) > 0;
  const EfficientMeansFlash setting;
  const auto choice = static_cast<sdp::SDPBackend>(at::native::_fused_sdp_choice_cpp(
      query, key, sizes_differ ? key : value, attn_mask, dropout_p, is_causal, scale, enable_gqa));
  return static_cast<int64_t>(
      choice == sdp::SDPBackend::flash_attention ? sdp::SDPBackend::efficient_attention : choice);
}

// Zeros behind the last dimension, up to `size`: they change no dot product.
Tensor padded(const Tensor& tensor, int64_t size) {
  return tensor.size(3) == size ? tensor : at::constant_pad_nd(tensor, {0, size - tensor.size(3)});
}

// The first `size` of the last dimension, laid out as the operator's shape function says, (batch, sequence, heads, size) in
// memory: a compiled graph takes views by it.
Tensor unpadded(const Tensor& tensor, int64_t size) {
  return tensor.narrow(3, 0, size).transpose(1, 2).contiguous().transpose(1, 2);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& attn_bias,
    bool /*compute_log_sumexp*/,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale) {
  const int64_t size = std::max(query.size(3), value.size(3));
  auto [output, log_sumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      padded(query, size),
      padded(key, size),
      padded(value, size),
      dropout_p,
      is_causal,
      attn_bias,
      scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3)))));
  // The state of the dropout that this kernel does not have.
  const Tensor seed = at::empty({}, at::TensorOptions().dtype(at::kLong).device(query.device()));
  return {unpadded(output, value.size(3)), std::move(log_sumexp), seed, seed};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& grad_out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& attn_bias,
    const Tensor& out,
    const Tensor& log_sumexp,
    const Tensor& /*philox_seed*/,
    const Tensor& /*philox_offset*/,
    double dropout_p,
    std::array<bool, 4> grad_input_mask,
    bool is_causal,
    std::optional<double> scale) {
  if (!grad_out.defined()) {
    return {};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !grad_input_mask[3], "neuron: fused attention has no gradient for its mask; use sdpa_kernel(SDPBackend.MATH)");
  const int64_t size = std::max(query.size(3), value.size(3));
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      padded(grad_out, size),
      padded(query, size),
      padded(key, size),
      padded(value, size),
      padded(out, size),
      log_sumexp,
      dropout_p,
      is_causal,
      attn_bias.defined() ? std::optional<Tensor>(attn_bias) : std::nullopt,
      scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3)))));
  return {
      unpadded(grad_query, query.size(3)),
      unpadded(grad_key, key.size(3)),
      unpadded(grad_value, value.size(3)),
      Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("_scaled_dot_product_efficient_attention", &efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &efficient_attention_backward);
}

} // namespace

} // namespace trn

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &trn::fused_sdp_choice)
} // namespace at::native
