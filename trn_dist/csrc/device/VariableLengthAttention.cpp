// torch.nn.attention.varlen: sequences of several lengths packed one behind the other, [total, heads, size], each attending
// to itself alone. PyTorch has no CPU kernel for it; here each sequence goes through the CPU's flash kernel, forward and
// backward, so no T×T matrix is made unless a window asks for a mask.

#include "device/Alias.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace trn {

namespace {

using at::Tensor;

struct Window {
  bool causal = false;
  int64_t left = -1; // keys before a query's own place; negative: all
  int64_t right = -1;
  std::optional<double> scale;

  // As CUDA's flash kernels count: the last query stands at the last key. Nothing for what the kernel does by itself.
  std::optional<Tensor> mask(const Tensor& query, int64_t queries, int64_t keys) const {
    const int64_t after = causal ? 0 : right;
    if (left < 0 && (after < 0 || (causal && queries == keys))) {
      return std::nullopt;
    }
    const auto options = at::TensorOptions().dtype(at::kLong).device(query.device());
    const Tensor offset = at::arange(keys, options) - at::arange(keys - queries, keys, options).unsqueeze(1);
    Tensor hidden = after < 0 ? offset < -left : offset > after;
    if (after >= 0 && left >= 0) {
      hidden = hidden.logical_or(offset < -left);
    }
    return at::zeros({queries, keys}, query.options()).masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  bool causal_kernel(int64_t queries, int64_t keys) const {
    return causal && left < 0 && queries == keys;
  }
};

Window window_of(
    bool causal,
    std::optional<double> scale,
    const std::optional<int64_t>& left,
    const std::optional<int64_t>& right) {
  return {causal, left.value_or(-1), right.value_or(-1), scale};
}

// Where the sequences begin, and where the last one ends.
std::vector<int64_t> boundaries_of(const Tensor& cumulative) {
  const Tensor host = to_cpu_alias(cumulative).to(at::kLong).contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

// [length, heads, size] of one sequence as the kernels take it: [1, heads, length, size].
Tensor sequence(const Tensor& packed, int64_t begin, int64_t length) {
  return packed.narrow(0, begin, length).transpose(0, 1).unsqueeze(0);
}

Tensor packed(const Tensor& batched) {
  return batched.squeeze(0).transpose(0, 1);
}

struct Lengths {
  int64_t query_begin;
  int64_t queries;
  int64_t key_begin;
  int64_t keys;
};

std::vector<Lengths>
lengths_of(const Tensor& cum_seq_q, const Tensor& cum_seq_k, const std::optional<Tensor>& used_keys) {
  const auto queries = boundaries_of(cum_seq_q);
  const auto keys = boundaries_of(cum_seq_k);
  TORCH_CHECK_VALUE(
      queries.size() == keys.size(),
      "variable-length attention: cu_seq_q and cu_seq_k must have one entry more than there are sequences, but they "
      "have ",
      queries.size(),
      " and ",
      keys.size());
  const auto used = used_keys.has_value() ? boundaries_of(*used_keys) : std::vector<int64_t>();
  std::vector<Lengths> lengths;
  for (size_t i = 0; i + 1 < queries.size(); ++i) {
    const int64_t available = keys[i + 1] - keys[i];
    lengths.push_back({queries[i], queries[i + 1] - queries[i], keys[i], used.empty() ? available : used.at(i)});
  }
  return lengths;
}

std::tuple<Tensor, Tensor> forward(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& cum_seq_q,
    const std::optional<Tensor>& cum_seq_k,
    double dropout_p,
    const Window& window,
    const std::optional<Tensor>& used_keys,
    const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& block_table) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      dropout_p == 0.0 && !alibi_slopes.has_value() && !block_table.has_value(),
      "neuron: variable-length attention has no dropout, no ALiBi slopes and no paged keys (block_table)");
  if (!cum_seq_q.has_value()) { // a batch of equal lengths, [batch, length, heads, size]
    const int64_t queries = query.size(1);
    const int64_t keys = key.size(1);
    auto [output, log_sumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        0.0,
        window.causal_kernel(queries, keys),
        window.mask(query, queries, keys),
        window.scale);
    return {output.transpose(1, 2), log_sumexp};
  }
  std::vector<Tensor> outputs;
  std::vector<Tensor> log_sumexps;
  for (const Lengths& one : lengths_of(*cum_seq_q, cum_seq_k.value_or(*cum_seq_q), used_keys)) {
    if (one.queries == 0) {
      continue;
    }
    if (one.keys == 0) {
      outputs.push_back(at::zeros_like(query.narrow(0, one.query_begin, one.queries)));
      log_sumexps.push_back(
          at::full(
              {query.size(1), one.queries},
              std::numeric_limits<double>::infinity(),
              query.options().dtype(at::kFloat)));
      continue;
    }
    auto [output, log_sumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        sequence(query, one.query_begin, one.queries),
        sequence(key, one.key_begin, one.keys),
        sequence(value, one.key_begin, one.keys),
        0.0,
        window.causal_kernel(one.queries, one.keys),
        window.mask(query, one.queries, one.keys),
        window.scale);
    outputs.push_back(packed(output));
    log_sumexps.push_back(log_sumexp.squeeze(0));
  }
  if (outputs.empty()) {
    return {at::empty_like(query), at::empty({query.size(1), 0}, query.options().dtype(at::kFloat))};
  }
  return {at::cat(outputs, 0), at::cat(log_sumexps, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_forward(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& cum_seq_q,
    const std::optional<Tensor>& cum_seq_k,
    int64_t /*max_q*/,
    int64_t /*max_k*/,
    double dropout_p,
    bool is_causal,
    bool /*return_debug_mask*/,
    std::optional<double> scale,
    std::optional<int64_t> window_left,
    std::optional<int64_t> window_right,
    const std::optional<Tensor>& used_keys,
    const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& block_table,
    std::optional<int64_t> /*num_splits*/) {
  auto [output, log_sumexp] = forward(
      query,
      key,
      value,
      cum_seq_q,
      cum_seq_k,
      dropout_p,
      window_of(is_causal, scale, window_left, window_right),
      used_keys,
      alibi_slopes,
      block_table);
  // The state of the dropout that there is not.
  const Tensor none = at::empty({0}, query.options());
  return {output, log_sumexp, at::empty({2}, query.options().dtype(at::kUInt64)), none, none};
}

Tensor flash_attention_forward_into(
    Tensor& out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& cum_seq_q,
    const std::optional<Tensor>& cum_seq_k,
    int64_t max_q,
    int64_t max_k,
    double dropout_p,
    bool is_causal,
    bool return_debug_mask,
    std::optional<double> scale,
    std::optional<int64_t> window_left,
    std::optional<int64_t> window_right,
    const std::optional<Tensor>& used_keys,
    const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& block_table,
    std::optional<int64_t> num_splits) {
  const auto results = flash_attention_forward(
      query,
      key,
      value,
      cum_seq_q,
      cum_seq_k,
      max_q,
      max_k,
      dropout_p,
      is_causal,
      return_debug_mask,
      scale,
      window_left,
      window_right,
      used_keys,
      alibi_slopes,
      block_table,
      num_splits);
  out.copy_(std::get<0>(results));
  return std::get<1>(results);
}

std::tuple<Tensor, Tensor, Tensor> flash_attention_backward(
    const Tensor& grad_out,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& out,
    const Tensor& log_sumexp,
    const Tensor& cum_seq_q,
    const Tensor& cum_seq_k,
    int64_t /*max_q*/,
    int64_t /*max_k*/,
    double dropout_p,
    bool is_causal,
    const Tensor& /*rng_state*/,
    const Tensor& /*unused*/,
    std::optional<double> scale,
    std::optional<int64_t> window_left,
    std::optional<int64_t> window_right) {
  TORCH_CHECK_NOT_IMPLEMENTED(dropout_p == 0.0, "neuron: variable-length attention has no dropout");
  const Window window = window_of(is_causal, scale, window_left, window_right);
  Tensor grad_query = at::zeros_like(query);
  Tensor grad_key = at::zeros_like(key);
  Tensor grad_value = at::zeros_like(value);
  for (const Lengths& one : lengths_of(cum_seq_q, cum_seq_k, std::nullopt)) {
    if (one.queries == 0 || one.keys == 0) {
      continue;
    }
    const auto [for_query, for_key, for_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        sequence(grad_out, one.query_begin, one.queries),
        sequence(query, one.query_begin, one.queries),
        sequence(key, one.key_begin, one.keys),
        sequence(value, one.key_begin, one.keys),
        sequence(out, one.query_begin, one.queries),
        log_sumexp.narrow(1, one.query_begin, one.queries).unsqueeze(0),
        0.0,
        window.causal_kernel(one.queries, one.keys),
        window.mask(query, one.queries, one.keys),
        scale);
    grad_query.narrow(0, one.query_begin, one.queries).copy_(packed(for_query));
    grad_key.narrow(0, one.key_begin, one.keys).copy_(packed(for_key));
    grad_value.narrow(0, one.key_begin, one.keys).copy_(packed(for_value));
  }
  return {grad_query, grad_key, grad_value};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_flash_attention_forward", &flash_attention_forward);
  m.impl("_flash_attention_forward_no_dropout_inplace", &flash_attention_forward_into);
  m.impl("_flash_attention_backward", &flash_attention_backward);
}

} // namespace

} // namespace trn
