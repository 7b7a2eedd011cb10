// The cells of LSTM and GRU. PyTorch composes these layers by device: on an accelerator each step ends in a fused cell, and
// these are they, written in plain operators. (The CPU's own path, oneDNN's whole layer, cannot be reached from a device,
// so numbers differ from the CPU's by rounding.)

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace trn {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

// Derivatives by a function's own result.
Tensor through_sigmoid(const Tensor& grad, const Tensor& result) {
  return grad * result * (1 - result);
}
Tensor through_tanh(const Tensor& grad, const Tensor& result) {
  return grad * (1 - result * result);
}

// Gates of shape (batch, 4 * hidden): input, forget, cell, output. The workspace holds them after their functions.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& cx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto gates = (with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias)).chunk(4, 1);
  const Tensor input = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor cell = gates[2].tanh();
  const Tensor output = gates[3].sigmoid();
  const Tensor cy = (forget * cx).add_(input * cell);
  return {output * cy.tanh(), cy, at::cat({input, forget, cell, output}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy,
    const OptionalTensor& grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  const bool hy_used = grad_hy.has_value() && grad_hy->defined();
  const bool cy_used = grad_cy.has_value() && grad_cy->defined();
  if (!hy_used && !cy_used) {
    return {};
  }
  const auto gates = workspace.chunk(4, 1);
  const Tensor &input = gates[0], &forget = gates[1], &cell = gates[2], &output = gates[3];
  const Tensor tanh_cy = cy.tanh();
  const Tensor of_hy = hy_used ? *grad_hy : at::zeros_like(cy);
  Tensor of_cy = through_tanh(of_hy * output, tanh_cy);
  if (cy_used) {
    of_cy = of_cy + *grad_cy;
  }
  const Tensor grad_gates = at::cat(
      {through_sigmoid(of_cy * cell, input),
       through_sigmoid(of_cy * cx, forget),
       through_tanh(of_cy * input, cell),
       through_sigmoid(of_hy * tanh_cy, output)},
      1);
  return {grad_gates, of_cy * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// Gates of shape (batch, 3 * hidden): reset, update, new. The workspace holds reset, update and new after their functions,
// the old state, and the hidden part of new before the reset.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates,
    const Tensor& hidden_gates,
    const Tensor& hx,
    const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (from_hidden[0] + from_input[0]).sigmoid();
  const Tensor update = (from_hidden[1] + from_input[1]).sigmoid();
  const Tensor fresh = (from_input[2] + from_hidden[2] * reset).tanh();
  return {(hx - fresh).mul_(update).add_(fresh), at::cat({reset, update, fresh, hx, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3], &hidden = saved[4];
  const Tensor of_update = through_sigmoid(grad_hy * (hx - fresh), update);
  const Tensor of_fresh = through_tanh(grad_hy * (1 - update), fresh);
  const Tensor of_reset = through_sigmoid(of_fresh * hidden, reset);
  const Tensor of_input = at::cat({of_reset, of_update, of_fresh}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {
      of_input,
      of_hidden,
      grad_hy * update,
      has_bias ? of_input.sum(0) : Tensor(),
      has_bias ? of_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace

} // namespace trn
