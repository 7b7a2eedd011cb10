// torch.autocast("neuron"): the operator lists that PyTorch keeps for all backends.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

using namespace at; // PyTorch's macros name its types without their namespace

// As on CUDA. PyTorch's own function of this kind is not exported; programs know the beginning of its sentence.
Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Give the numbers before "
      "the sigmoid to binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define TRN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(TRN_LOWER_PRECISION)
#undef TRN_LOWER_PRECISION

#define TRN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(TRN_FP32)
#undef TRN_FP32

#define TRN_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(TRN_FP32_SET_OPT_DTYPE)
#undef TRN_FP32_SET_OPT_DTYPE

  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)

#define TRN_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(TRN_PROMOTE)
#undef TRN_PROMOTE

  m.impl("binary_cross_entropy", &refuse_binary_cross_entropy);
}

} // namespace
