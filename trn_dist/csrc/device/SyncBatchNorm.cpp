// The steps of torch.nn.SyncBatchNorm, which PyTorch has for CUDA only. Statistics of float16 and bfloat16 tensors are
// float32; channels are dimension 1.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace trn {

namespace {

using at::Tensor;

bool is_low(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

Tensor wide(const Tensor& tensor) {
  return is_low(tensor) ? tensor.to(at::kFloat) : tensor;
}

// One value a channel, in the shape that broadcasts over `input`.
Tensor over(const Tensor& per_channel, const Tensor& input) {
  at::DimVector shape(input.dim(), 1);
  shape[1] = input.size(1);
  return per_channel.view(shape);
}

// All dimensions but the channels'.
at::DimVector reduced_dims(const Tensor& input) {
  at::DimVector dims;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (d != 1) {
      dims.push_back(d);
    }
  }
  return dims;
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  auto [variance, mean] = at::var_mean(wide(input), reduced_dims(input), /*correction=*/0);
  return {mean, variance.add_(eps).rsqrt_()};
}

Tensor elemt(
    const Tensor& input,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    const Tensor& mean,
    const Tensor& invstd,
    double /*eps*/) {
  Tensor output = (wide(input) - over(mean, input)) * over(invstd, input);
  if (weight.has_value() && weight->defined()) {
    output.mul_(over(wide(*weight), input));
  }
  if (bias.has_value() && bias->defined()) {
    output.add_(over(wide(*bias), input));
  }
  return output.to(input.scalar_type());
}

// `mean` and `invstd`: of each rank, a row; `counts`: elements a channel of each rank.
std::tuple<Tensor, Tensor> gather_stats_with_counts(
    const Tensor& /*input*/,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var,
    double momentum,
    double eps,
    const Tensor& counts) {
  const Tensor rows = counts.to(mean.scalar_type()).unsqueeze(1);
  const Tensor total = rows.sum();
  const Tensor whole_mean = (mean * rows).sum(0) / total;
  const Tensor square_sums = (invstd.pow(-2) - eps + (mean - whole_mean).square()) * rows;
  const Tensor square_sum = square_sums.sum(0);
  if (running_mean.has_value() && running_mean->defined()) {
    running_mean->mul_(1 - momentum).add_(whole_mean, momentum);
  }
  if (running_var.has_value() && running_var->defined()) {
    running_var->mul_(1 - momentum).add_(square_sum / (total - 1), momentum);
  }
  return {whole_mean, (square_sum / total).add_(eps).rsqrt_()};
}

std::tuple<Tensor, Tensor> gather_stats(
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& running_mean,
    const std::optional<Tensor>& running_var,
    double momentum,
    double eps,
    int64_t count) {
  const Tensor counts = at::full({mean.size(0)}, count, mean.options());
  return gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(
    const Tensor& grad_out,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    bool input_g,
    bool weight_g,
    bool bias_g) {
  const auto dims = reduced_dims(input);
  const Tensor dy = wide(grad_out);
  const Tensor sum_dy = dy.sum(dims);
  const Tensor sum_dy_xmu = (dy * (wide(input) - over(mean, input))).sum(dims);
  const at::ScalarType dtype = weight.has_value() && weight->defined() ? weight->scalar_type() : sum_dy.scalar_type();
  return {
      input_g ? sum_dy : Tensor(),
      input_g ? sum_dy_xmu : Tensor(),
      weight_g ? (sum_dy_xmu * invstd).to(dtype) : Tensor(),
      bias_g ? sum_dy.to(dtype, /*non_blocking=*/false, /*copy=*/true) : Tensor()};
}

Tensor backward_elemt(
    const Tensor& grad_out,
    const Tensor& input,
    const Tensor& mean,
    const Tensor& invstd,
    const std::optional<Tensor>& weight,
    const Tensor& sum_dy,
    const Tensor& sum_dy_xmu,
    const Tensor& count) {
  const Tensor total = count.sum().to(sum_dy.scalar_type());
  const Tensor projection = over(sum_dy_xmu / total * invstd.square(), input);
  Tensor factor = invstd;
  if (weight.has_value() && weight->defined()) {
    factor = factor * wide(*weight);
  }
  const Tensor centred = wide(grad_out) - over(sum_dy / total, input);
  return ((centred - (wide(input) - over(mean, input)) * projection) * over(factor, input)).to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_elemt", &elemt);
  m.impl("batch_norm_gather_stats", &gather_stats);
  m.impl("batch_norm_gather_stats_with_counts", &gather_stats_with_counts);
  m.impl("batch_norm_backward_reduce", &backward_reduce);
  m.impl("batch_norm_backward_elemt", &backward_elemt);
}

} // namespace

} // namespace trn
