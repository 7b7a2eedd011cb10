#include "timing/OperatorCost.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string_view>
#include <unordered_map>

namespace trn {

namespace {

// Rows of the moving operand that a matmul instruction takes at least: the issue interval is max(N, 64) cycles (NKI
// performance guide).
constexpr int64_t kMinMovingRows = 64;

std::atomic<LinkTime> link_time{nullptr};

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

OperatorModel elementwise(float vector, float scalar = 0) {
  OperatorModel model;
  model.vector_passes = vector;
  model.scalar_passes = scalar;
  return model;
}

OperatorModel matmul(int8_t left, int8_t right, bool right_transposed = false) {
  OperatorModel model;
  model.kind = OperatorClass::Matmul;
  model.left = left;
  model.right = right;
  model.right_transposed = right_transposed;
  return model;
}

OperatorModel of_kind(OperatorClass kind, bool host_reads = false) {
  OperatorModel model;
  model.kind = kind;
  model.host_reads = host_reads;
  return model;
}

OperatorModel attention(OperatorClass kind, int8_t query, int8_t causal) {
  OperatorModel model;
  model.kind = kind;
  model.left = query;
  model.causal = causal;
  return model;
}

OperatorModel fused_optimizer(float vector, float scalar) {
  OperatorModel model = elementwise(vector, scalar);
  model.read_only = 1; // gradients, which it may unscale in place
  return model;
}

OperatorModel draws() {
  OperatorModel model = of_kind(OperatorClass::Fill);
  model.vector_passes = 0;
  model.gpsimd_passes = 1;
  return model;
}

// By name without "aten::", "_foreach_" and the "_" of the in-place form. Passes are counted on the plainest NKI kernel:
// one for each vector instruction over the whole tile, two if it reads two tiles (NKI performance guide).
const std::unordered_map<std::string_view, OperatorModel>& models() {
  using enum OperatorClass;
  static const auto* table = new std::unordered_map<std::string_view, OperatorModel>{
      // TensorE
      {"mm", matmul(0, 1)},
      {"bmm", matmul(0, 1)},
      {"mv", matmul(0, 1)},
      {"dot", matmul(0, 1)},
      {"vdot", matmul(0, 1)},
      {"addmm", matmul(1, 2)},
      {"_addmm_activation", matmul(1, 2)},
      {"addmv", matmul(1, 2)},
      {"baddbmm", matmul(1, 2)},
      {"addbmm", matmul(1, 2)},
      {"linear", matmul(0, 1, /*right_transposed=*/true)},
      {"_scaled_mm", matmul(0, 1)},
      {"_int_mm", matmul(0, 1)},
      {"_grouped_mm", matmul(0, 1)},
      {"_scaled_grouped_mm", matmul(0, 1)},
      {"_scaled_dot_product_flash_attention_for_cpu", attention(Attention, 0, 4)},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", attention(AttentionBackward, 1, 7)},
      {"convolution", of_kind(Convolution)},
      {"convolution_overrideable", of_kind(Convolution)},
      {"convolution_backward", of_kind(ConvolutionBackward)},
      {"convolution_backward_overrideable", of_kind(ConvolutionBackward)},

      // ScalarE: an activation function is one instruction
      {"exp", elementwise(0, 1)},
      {"exp2", elementwise(0, 1)},
      {"expm1", elementwise(1, 1)},
      {"log", elementwise(0, 1)},
      {"log2", elementwise(1, 1)},
      {"log10", elementwise(1, 1)},
      {"log1p", elementwise(0, 1)},
      {"sqrt", elementwise(0, 1)},
      {"rsqrt", elementwise(0, 1)},
      {"sin", elementwise(0, 1)},
      {"cos", elementwise(0, 1)},
      {"tan", elementwise(2, 2)},
      {"tanh", elementwise(0, 1)},
      {"atan", elementwise(0, 1)},
      {"erf", elementwise(0, 1)},
      {"sigmoid", elementwise(0, 1)},
      {"silu", elementwise(0, 1)},
      {"gelu", elementwise(0, 1)},
      {"softplus", elementwise(0, 1)},
      {"mish", elementwise(0, 1)},
      {"elu", elementwise(2, 1)},
      {"hardswish", elementwise(3, 0)},
      {"sigmoid_backward", elementwise(5, 0)},
      {"tanh_backward", elementwise(5, 0)},
      {"silu_backward", elementwise(8, 1)},
      {"gelu_backward", elementwise(2, 1)}, // the derivative is an activation function too
      // Reductions over rows, then a rescale
      {"_softmax", elementwise(2, 1)}, // maximum, exp with running sum, rescale
      {"_log_softmax", elementwise(2, 1)},
      {"_softmax_backward_data", elementwise(5, 0)},
      {"_log_softmax_backward_data", elementwise(3, 1)},
      {"logsumexp", elementwise(1, 1)},
      {"nll_loss_forward", of_kind(Gather)},
      {"nll_loss_backward", of_kind(Fill)}, // zeros but for one element a row
      {"native_layer_norm", elementwise(6, 0)},
      {"native_layer_norm_backward", elementwise(12, 0)},
      {"native_group_norm", elementwise(6, 0)},
      {"native_group_norm_backward", elementwise(12, 0)},
      {"native_batch_norm", elementwise(6, 0)},
      {"native_batch_norm_backward", elementwise(12, 0)},
      {"_fused_rms_norm", elementwise(4, 0)},
      {"_fused_rms_norm_backward", elementwise(9, 0)},
      {"norm", elementwise(1, 0)},
      {"linalg_vector_norm", elementwise(1, 0)},
      // Per element: weight decay, two moments, their corrections, square root, division, update
      {"_fused_adam", fused_optimizer(12, 1)},
      {"_fused_adamw", fused_optimizer(13, 1)},
      {"_fused_sgd", fused_optimizer(6, 0)},
      {"_fused_adagrad", fused_optimizer(8, 1)},

      // GpSimdE
      {"embedding", of_kind(Gather)},
      {"index", of_kind(Gather)},
      {"_unsafe_index", of_kind(Gather)},
      {"index_select", of_kind(Gather)},
      {"gather", of_kind(Gather)},
      {"take", of_kind(Gather)},
      {"embedding_dense_backward", of_kind(Scatter)},
      {"index_put", of_kind(Scatter)},
      {"_index_put_impl", of_kind(Scatter)},
      {"_unsafe_index_put", of_kind(Scatter)},
      {"index_add", of_kind(Scatter)},
      {"index_copy", of_kind(Scatter)},
      {"index_fill", of_kind(Scatter)},
      {"scatter", of_kind(Scatter)},
      {"scatter_add", of_kind(Scatter)},
      {"scatter_reduce", of_kind(Scatter)},
      {"sort", of_kind(Sort)},
      {"argsort", of_kind(Sort)},
      {"topk", of_kind(Sort)},
      {"histc", of_kind(Scatter)},
      {"bincount", of_kind(Scatter, /*host_reads=*/true)},
      {"nonzero", of_kind(Sort, /*host_reads=*/true)},
      {"masked_select", of_kind(Sort, /*host_reads=*/true)},
      {"_unique", of_kind(Sort, /*host_reads=*/true)},
      {"_unique2", of_kind(Sort, /*host_reads=*/true)},
      {"unique_dim", of_kind(Sort, /*host_reads=*/true)},
      {"unique_consecutive", of_kind(Sort, /*host_reads=*/true)},
      {"repeat_interleave", of_kind(Gather, /*host_reads=*/true)},
      {"uniform", draws()},
      {"normal", draws()},
      {"random", draws()},
      {"bernoulli", draws()},
      {"exponential", draws()},
      {"cauchy", draws()},
      {"log_normal", draws()},
      {"geometric", draws()},
      {"randperm", draws()},

      // DMA
      {"cat", of_kind(Copy)},
      {"stack", of_kind(Copy)},
      {"clone", of_kind(Copy)},
      {"copy", of_kind(Copy)},
      {"_copy_from", of_kind(Copy)},
      {"repeat", of_kind(Copy)},
      {"flip", of_kind(Copy)},
      {"roll", of_kind(Copy)},
      {"_chunk_cat", of_kind(Copy)},
      {"split_with_sizes_copy", of_kind(Copy)},
      {"slice_backward", of_kind(Copy)},
      {"select_backward", of_kind(Copy)},
      {"constant_pad_nd", of_kind(Copy)},

      {"fill", of_kind(Fill)},
      {"zero", of_kind(Fill)},
      {"full", of_kind(Fill)},
      {"ones", of_kind(Fill)},
      {"zeros", of_kind(Fill)},
      {"arange", of_kind(Fill)},
      {"eye", of_kind(Fill)},
      {"linspace", of_kind(Fill)},
      {"scalar_tensor", of_kind(Fill)},

      {"_local_scalar_dense", of_kind(Elementwise, /*host_reads=*/true)},
      {"equal", of_kind(Elementwise, /*host_reads=*/true)},
      {"is_nonzero", of_kind(Elementwise, /*host_reads=*/true)},
  };
  return *table;
}

double elements_ps(const ElementRates& rates, c10::ScalarType type, double passes, int64_t elements) {
  return passes <= 0 ? 0
                     : passes * static_cast<double>(elements) * rates.ps_per_element[static_cast<size_t>(type)] +
          std::ceil(passes) * rates.instruction_ps;
}

struct EngineTime {
  Engine engine;
  double ps;
};

OperatorCost make_cost(EngineTime time, double hbm_ps, int64_t bytes, double flops = 0) {
  OperatorCost cost;
  cost.engine = time.engine;
  cost.hbm_bound = hbm_ps > time.ps;
  cost.time = static_cast<Picoseconds>(std::max(hbm_ps, time.ps));
  cost.bytes = bytes;
  cost.flops = flops;
  return cost;
}

EngineTime longer(EngineTime a, EngineTime b) {
  return b.ps > a.ps ? b : a;
}

// A product's sizes.
struct Product {
  int64_t batch = 1;
  int64_t m = 1;
  int64_t k = 1;
  int64_t n = 1;
  double flops() const {
    return 2.0 * static_cast<double>(batch) * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n);
  }
};

Product product_of(const c10::TensorImpl& left, const c10::TensorImpl& right, bool right_transposed) {
  Product product;
  const auto a = left.sizes();
  const auto b = right.sizes();
  if (a.empty() || b.empty()) {
    return product;
  }
  product.k = a.back();
  for (size_t i = 0; i + 1 < a.size(); ++i) {
    product.m *= a[i];
  }
  if (b.size() >= 2) {
    product.n = right_transposed ? b[b.size() - 2] : b.back();
  }
  if (b.size() == 3 && a.size() == 3) { // a batch of products
    product.batch = a[0];
    product.m = a[1];
  } else if (b.size() == 3 && a.size() == 2) { // a group of rows for each matrix, taken as equal
    product.batch = b[0];
    product.m = ceil_div(a[0], std::max<int64_t>(1, b[0]));
  }
  return product;
}

int64_t size_from_end(const c10::TensorImpl& tensor, size_t from_end) {
  const auto sizes = tensor.sizes();
  return from_end <= sizes.size() ? sizes[sizes.size() - from_end] : 1;
}

} // namespace

OperatorModel operator_model(const std::string& name) {
  std::string_view base = name;
  if (const auto colons = base.find("::"); colons != std::string_view::npos) {
    base.remove_prefix(colons + 2);
  }
  constexpr std::string_view kForeach = "_foreach_";
  if (base.substr(0, kForeach.size()) == kForeach) {
    base.remove_prefix(kForeach.size());
  }
  if (base.size() > 1 && base.back() == '_' && base[base.size() - 2] != '_') {
    base.remove_suffix(1);
  }
  OperatorModel model;
  if (const auto it = models().find(base); it != models().end()) {
    model = it->second;
  }
  model.name = name_id(name);
  return model;
}

int64_t touched_bytes(const c10::TensorImpl& tensor) {
  int64_t numel = tensor.numel();
  if (numel > 1 && !tensor.is_contiguous()) {
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (strides[i] == 0) {
        numel /= sizes[i];
      }
    }
  }
  return numel * static_cast<int64_t>(tensor.itemsize());
}

void Traffic::meet(c10::ScalarType type) {
  if (C10_UNLIKELY(c10::isComplexType(type))) {
    complex_ = true;
    type = c10::toRealValueType(type);
  }
  if (slowest_ == c10::ScalarType::Undefined || c10::elementSize(type) > c10::elementSize(slowest_)) {
    slowest_ = type;
  }
}

void Traffic::read(const c10::TensorImpl& tensor, int index, bool again) {
  if (arguments_.empty() || arguments_.back().index != index) {
    arguments_.emplace_back();
    arguments_.back().index = index;
    arguments_.back().tensor = &tensor;
    meet(tensor.dtype().toScalarType());
  }
  arguments_.back().numel += tensor.numel();
  arguments_.back().bytes += again ? 0 : touched_bytes(tensor);
}

void Traffic::wrote(const c10::TensorImpl& tensor) {
  wrote_ = true;
  if (result_ == nullptr) {
    result_ = &tensor;
    meet(tensor.dtype().toScalarType());
  }
  written_bytes_ += touched_bytes(tensor);
  written_numel_ += tensor.numel();
}

void Traffic::made(const c10::TensorImpl& tensor) {
  wrote(tensor);
  made_bytes_ += touched_bytes(tensor);
}

const Traffic::Argument* Traffic::argument(int index) const {
  for (const Argument& candidate : arguments_) {
    if (candidate.index == index) {
      return &candidate;
    }
  }
  return nullptr;
}

namespace {

double product_ps(const ChipRates& rates, int64_t batch, int64_t m, int64_t k, int64_t n, c10::ScalarType type) {
  const int64_t rows = rates.tensor_rows;
  const int64_t columns = rates.tensor_columns;
  const int64_t cores = rates.cores;
  // `stationary` stays in the array, `moving` streams through it.
  const auto cycles = [&](int64_t stationary, int64_t moving) {
    const int64_t tiles = batch * ceil_div(stationary, columns);
    const int64_t by_tiles = ceil_div(tiles, cores) * std::max(moving, kMinMovingRows);
    const int64_t by_rows = tiles * std::max(ceil_div(moving, cores), kMinMovingRows);
    return ceil_div(k, rows) * std::min(by_tiles, by_rows);
  };
  const int64_t best = std::min(cycles(m, n), cycles(n, m));
  return 2.0 * static_cast<double>(best) * static_cast<double>(rows * columns) *
      rates.tensor_ps_per_flop[static_cast<size_t>(type)];
}

} // namespace

double matmul_ps(int64_t batch, int64_t m, int64_t k, int64_t n, c10::ScalarType type) {
  return product_ps(chip_rates(), batch, m, k, n, type);
}

OperatorCost price_copy(int64_t bytes_read, int64_t bytes_written) {
  OperatorWork work;
  work.kind = OperatorClass::Copy;
  work.bytes = bytes_read + bytes_written;
  work.longer_bytes = std::max(bytes_read, bytes_written);
  return price(work, chip_rates());
}

OperatorCost price_peer_copy(const void* address, int64_t bytes_read, int64_t bytes_written) {
  OperatorCost cost = price_copy(bytes_read, bytes_written);
  if (const LinkTime function = link_time.load(std::memory_order_acquire)) {
    cost.time = std::max(cost.time, function(address, std::max(bytes_read, bytes_written)));
  }
  return cost;
}

void set_link_time(LinkTime function) {
  link_time.store(function, std::memory_order_release);
}

OperatorCost price_host_copy(int64_t nbytes) {
  OperatorWork work;
  work.kind = OperatorClass::HostCopy;
  work.bytes = nbytes;
  return price(work, chip_rates());
}

OperatorWork work_of(const OperatorModel& model, const Traffic& traffic, bool causal) {
  int64_t read_bytes = 0;
  int64_t elements = traffic.written_numel_;
  int sources = 0; // tensors that a pass reads
  for (const Traffic::Argument& argument : traffic.arguments_) {
    read_bytes += argument.bytes;
    elements = std::max(elements, argument.numel);
    sources += argument.numel > 1 ? 1 : 0;
  }
  OperatorWork work;
  work.kind = model.kind;
  work.bytes = read_bytes + traffic.written_bytes_;
  if (model.read_only >= 0) {
    if (const auto* argument = traffic.argument(model.read_only)) {
      work.bytes -= argument->bytes;
    }
  }
  work.type = traffic.slowest_ == c10::ScalarType::Undefined ? c10::ScalarType::Float : traffic.slowest_;
  work.elements = elements;

  switch (model.kind) {
    case OperatorClass::Matmul: {
      const auto* left = traffic.argument(model.left);
      const auto* right = traffic.argument(model.right);
      if (left == nullptr || right == nullptr) {
        break;
      }
      const Product product = product_of(*left->tensor, *right->tensor, model.right_transposed);
      work.sizes = {product.batch, product.m, product.k, product.n};
      work.operand = left->tensor->dtype().toScalarType();
      work.products = traffic.complex_ ? 4 : 1;
      return work;
    }
    case OperatorClass::Attention:
    case OperatorClass::AttentionBackward: {
      const auto* query = traffic.argument(model.left);
      const auto* key = traffic.argument(model.left + 1);
      const auto* value = traffic.argument(model.left + 2);
      if (query == nullptr || key == nullptr || value == nullptr) {
        break;
      }
      const int64_t rows = size_from_end(*query->tensor, 2);
      const int64_t width = size_from_end(*query->tensor, 1);
      const int64_t heads = rows * width == 0 ? 0 : query->numel / (rows * width);
      work.sizes = {heads, rows, size_from_end(*key->tensor, 2), width, size_from_end(*value->tensor, 1)};
      work.operand = query->tensor->dtype().toScalarType();
      work.causal = causal;
      return work;
    }
    case OperatorClass::Convolution:
    case OperatorClass::ConvolutionBackward: {
      const bool backward = model.kind == OperatorClass::ConvolutionBackward;
      const auto* input = traffic.argument(backward ? 1 : 0);
      const auto* weight = traffic.argument(backward ? 2 : 1);
      const c10::TensorImpl* output = backward ? nullptr : traffic.result_;
      if (const auto* gradient = backward ? traffic.argument(0) : nullptr) {
        output = gradient->tensor;
      }
      if (input == nullptr || weight == nullptr || output == nullptr || weight->numel == 0 || output->numel() == 0) {
        break;
      }
      // The product of the weights [out, in/groups * window] with the unfolded input.
      const int64_t out_channels = weight->tensor->sizes()[0];
      const int64_t groups = std::max<int64_t>(1, input->tensor->sizes()[1] / weight->tensor->sizes()[1]);
      const int64_t places = output->numel() / out_channels;
      work.sizes = {groups, ceil_div(out_channels, groups), weight->numel / out_channels, places};
      work.operand = input->tensor->dtype().toScalarType();
      return work;
    }
    case OperatorClass::Gather: {
      // Only the rows that are taken are read, not the table, which is the first argument.
      const auto* table = traffic.argument(0);
      work.bytes += traffic.written_bytes_ - (table != nullptr ? table->bytes : 0);
      work.elements = traffic.written_numel_;
      work.gpsimd_passes = 1;
      return work;
    }
    case OperatorClass::Scatter: {
      // The rows given are read, and read and written where they go; a table that is made is written once more.
      int64_t moved = traffic.made_bytes_;
      int64_t given = 0;
      int64_t given_bytes = 0;
      for (const Traffic::Argument& argument : traffic.arguments_) {
        const bool table = argument.index == 0 && traffic.arguments_.size() > 1 && traffic.result_ != nullptr &&
            traffic.result_->numel() == argument.numel;
        if (!table) {
          moved += argument.bytes;
          if (argument.numel > given) {
            given = argument.numel;
            given_bytes = argument.bytes;
          }
        } else if (traffic.made_bytes_ > 0) {
          moved += argument.bytes;
        }
      }
      work.bytes = moved + 2 * given_bytes;
      work.elements = given;
      work.gpsimd_passes = 1;
      return work;
    }
    case OperatorClass::Sort: {
      const auto* keys = traffic.argument(0);
      const int64_t row = keys != nullptr && !keys->tensor->sizes().empty() ? keys->tensor->sizes().back() : 1;
      // A merge sort: a pass for each doubling of a row.
      const double doublings = std::ceil(std::log2(static_cast<double>(std::max<int64_t>(row, 2))));
      work.gpsimd_passes = static_cast<float>(std::max(1.0, doublings));
      return work;
    }
    case OperatorClass::Copy:
      work.bytes = read_bytes + traffic.written_bytes_;
      work.longer_bytes = std::max(read_bytes, traffic.written_bytes_);
      return work;
    case OperatorClass::Fill: {
      const bool drawn = model.gpsimd_passes > 0;
      work.gpsimd_passes = drawn ? model.gpsimd_passes : 0;
      work.vector_passes = drawn ? 0 : 1;
      work.elements = traffic.written_numel_;
      work.bytes = traffic.written_bytes_;
      return work;
    }
    case OperatorClass::Elementwise:
    case OperatorClass::HostCopy:
    case OperatorClass::Stated:
      break;
  }
  // Elementwise, or a call that lacks the arguments of its class.
  work.kind = OperatorClass::Elementwise;
  // N cycles for a tile of N columns, 2 N with two inputs (NKI performance guide); more inputs, more instructions.
  work.vector_passes = model.vector_passes;
  if (work.vector_passes < 0) {
    work.vector_passes = static_cast<float>(sources <= 1 ? 1 : 2 * (sources - 1));
  }
  if (C10_UNLIKELY(traffic.complex_)) {
    work.vector_passes *= 3; // a complex product is four products and two sums where a real one is one product
  }
  work.scalar_passes = model.scalar_passes;
  return work;
}

namespace {

OperatorCost price_attention(const OperatorWork& work, const ChipRates& rates, double hbm_ps) {
  const auto [heads, rows, columns, width, value_width] = work.sizes;
  const auto product = [&, heads = heads](int64_t m, int64_t k, int64_t n) {
    return product_ps(rates, heads, m, k, n, work.operand);
  };
  // Tiles of the weights' matrix that a causal mask leaves: the diagonal's and what is below it.
  const int64_t tiles = ceil_div(std::max<int64_t>(rows, 1), rates.tensor_rows);
  const double share = work.causal ? static_cast<double>(tiles + 1) / static_cast<double>(2 * tiles) : 1.0;
  const double weights = static_cast<double>(heads) * static_cast<double>(rows) * static_cast<double>(columns) * share;
  const bool backward = work.kind == OperatorClass::AttentionBackward;
  // Forward: Q K^T and P V. Backward: Q K^T again, dO V^T; dQ = dS K and dK = dS^T Q; dV = P^T dO.
  const double scores = product(rows, width, columns);
  const double values = product(rows, columns, value_width);
  double tensor = (scores + values) * share;
  double flops = 2 * weights * static_cast<double>(width + value_width);
  if (backward) {
    const double to_weights = product(rows, value_width, columns);
    const double to_query = product(rows, columns, width);
    const double to_key = product(columns, rows, width);
    const double to_value = product(columns, rows, value_width);
    tensor = (scores + to_weights + to_query + to_key + to_value) * share;
    flops = 2 * weights * static_cast<double>(3 * width + 2 * value_width);
  }
  const auto count = static_cast<int64_t>(weights);
  // Forward: maximum and rescale on VectorE, exp with running sum on ScalarE. Backward: exp again; dP - delta and its
  // product with P on VectorE.
  const double vector = elements_ps(rates.vector, work.type, backward ? 3 : 1, count);
  const double scalar = elements_ps(rates.scalar, work.type, 1, count);
  return make_cost(
      longer(longer({Engine::Tensor, tensor}, {Engine::Vector, vector}), {Engine::Scalar, scalar}),
      hbm_ps,
      work.bytes,
      flops);
}

OperatorCost price_kind(const OperatorWork& work, const ChipRates& rates) {
  const double hbm_ps = static_cast<double>(work.bytes) * rates.hbm_ps_per_byte;
  const auto [batch, m, k, n, _] = work.sizes;
  const Product product{batch, m, k, n};
  switch (work.kind) {
    case OperatorClass::Matmul: {
      const double ps = product_ps(rates, batch, m, k, n, work.operand);
      return make_cost(
          {Engine::Tensor, ps * work.products},
          hbm_ps,
          work.bytes,
          product.flops() * static_cast<double>(work.products));
    }
    case OperatorClass::Attention:
    case OperatorClass::AttentionBackward:
      return price_attention(work, rates, hbm_ps);
    case OperatorClass::Convolution:
      return make_cost(
          {Engine::Tensor, product_ps(rates, batch, m, k, n, work.operand)}, hbm_ps, work.bytes, product.flops());
    case OperatorClass::ConvolutionBackward: {
      // One for the input's gradient, one for the weights'.
      const double ps =
          product_ps(rates, batch, k, m, n, work.operand) + product_ps(rates, batch, m, n, k, work.operand);
      return make_cost({Engine::Tensor, ps}, hbm_ps, work.bytes, 2 * product.flops());
    }
    case OperatorClass::Gather:
    case OperatorClass::Scatter:
    case OperatorClass::Sort:
      return make_cost(
          {Engine::GpSimd, elements_ps(rates.gpsimd, work.type, work.gpsimd_passes, work.elements)},
          hbm_ps,
          work.bytes);
    case OperatorClass::Copy: {
      const auto start = static_cast<double>(rates.dma_start_ps);
      const double dma = start + static_cast<double>(work.longer_bytes) * rates.dma_ps_per_byte;
      return make_cost({Engine::Dma, dma}, start + hbm_ps, work.bytes);
    }
    case OperatorClass::HostCopy: {
      const double ps =
          static_cast<double>(rates.dma_start_ps) + static_cast<double>(work.bytes) * rates.host_ps_per_byte;
      return make_cost({Engine::Dma, ps}, 0, work.bytes);
    }
    case OperatorClass::Fill: {
      const bool drawn = work.gpsimd_passes > 0;
      const double ps = drawn ? elements_ps(rates.gpsimd, work.type, work.gpsimd_passes, work.elements)
                              : elements_ps(rates.vector, work.type, 1, work.elements);
      return make_cost({drawn ? Engine::GpSimd : Engine::Vector, ps}, hbm_ps, work.bytes);
    }
    case OperatorClass::Stated: {
      const double tensor = product.flops() > 0 ? product_ps(rates, batch, m, k, n, work.operand) : 0;
      const auto passes = [&](const auto& engine, float count) {
        return count > 0 ? elements_ps(engine, work.type, count, work.elements) : 0;
      };
      const EngineTime vector{Engine::Vector, passes(rates.vector, work.vector_passes)};
      const EngineTime scalar{Engine::Scalar, passes(rates.scalar, work.scalar_passes)};
      const EngineTime gpsimd{Engine::GpSimd, passes(rates.gpsimd, work.gpsimd_passes)};
      return make_cost(
          longer(longer({Engine::Tensor, tensor}, vector), longer(scalar, gpsimd)),
          hbm_ps,
          work.bytes,
          product.flops());
    }
    case OperatorClass::Elementwise:
      break;
  }
  return make_cost(
      longer(
          {Engine::Vector, elements_ps(rates.vector, work.type, work.vector_passes, work.elements)},
          {Engine::Scalar, elements_ps(rates.scalar, work.type, work.scalar_passes, work.elements)}),
      hbm_ps,
      work.bytes);
}

} // namespace

OperatorCost price(const OperatorWork& work, const ChipRates& rates) {
  OperatorCost cost = price_kind(work, rates);
  cost.work = work;
  return cost;
}

} // namespace trn
