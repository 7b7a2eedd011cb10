#include "c10d/Arguments.h"

#include "c10d/ExactSums.h"
#include "fabric/ExactSum.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace trn {

bool is_neuron(const at::Tensor& tensor) {
  return tensor.device().type() == c10::DeviceType::PrivateUse1;
}

void check_tensor(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.defined(), "neuron: ", name, ": a tensor is missing");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, "neuron: ", name, " needs dense tensors, got one of layout ", tensor.layout());
  TORCH_CHECK_VALUE(
      is_neuron(tensor) || tensor.device().is_cpu(),
      "neuron: ",
      name,
      " needs tensors on neuron or cpu, got one on ",
      tensor.device());
}

void check_contiguous(const at::Tensor& tensor, const char* name) {
  check_tensor(tensor, name);
  TORCH_CHECK_VALUE(
      tensor.is_contiguous(tensor.suggest_memory_format()), "neuron: ", name, ": Tensors must be contiguous");
}

void check_same_dtype(const at::Tensor& tensor, const at::Tensor& other, const char* name) {
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == other.scalar_type(),
      "neuron: ",
      name,
      " needs tensors of one dtype, got ",
      tensor.scalar_type(),
      " and ",
      other.scalar_type());
}

void check_one(const std::vector<at::Tensor>& tensors, const char* name) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "neuron: ", name, " takes one tensor a rank, got ", tensors.size());
}

Region dense_region(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes(), nullptr};
}

MemoryUse use_of(const Region& region, bool written) {
  const Layout* layout = region.layout.get();
  const uint64_t nbytes = layout == nullptr
      ? region.nbytes
      : at::detail::computeStorageNbytes(layout->sizes, layout->strides, c10::elementSize(layout->dtype));
  return {region.data, region.data + nbytes, written};
}

Region logical_region(const at::Tensor& tensor) {
  Region region{
      static_cast<std::byte*>(tensor.data_ptr()),
      static_cast<uint64_t>(tensor.numel() * tensor.element_size()),
      nullptr};
  if (!tensor.is_contiguous()) {
    auto layout = std::make_shared<Layout>();
    layout->dtype = tensor.scalar_type();
    layout->sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    layout->strides.assign(tensor.strides().begin(), tensor.strides().end());
    region.layout = std::move(layout);
  }
  return region;
}

void keep(CollectiveCall& call, const at::Tensor& tensor) {
  call.tensors.push_back(tensor);
}

void describe_by(CollectiveCall& call, const at::Tensor& tensor) {
  call.dtype = tensor.scalar_type();
  call.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
}

static Reduction to_reduction(const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return Reduction::Sum;
    case c10d::ReduceOp::AVG:
      return Reduction::Avg;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::Product;
    case c10d::ReduceOp::MIN:
      return Reduction::Min;
    case c10d::ReduceOp::MAX:
      return Reduction::Max;
    case c10d::ReduceOp::BAND:
      return Reduction::BitAnd;
    case c10d::ReduceOp::BOR:
      return Reduction::BitOr;
    case c10d::ReduceOp::BXOR:
      return Reduction::BitXor;
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction::PremulSum;
    default:
      TORCH_CHECK_VALUE(false, "neuron: unknown ReduceOp ", static_cast<int>(op.op_));
  }
}

void set_reduction(CollectiveCall& call, const c10d::ReduceOp& op, const char* name) {
  call.reduction = to_reduction(op);
  const char* reason = why_unsupported(call.dtype, call.reduction);
  TORCH_CHECK_TYPE(
      reason == nullptr,
      "neuron: ",
      name,
      " cannot reduce ",
      dtype_name(call.dtype),
      " with ReduceOp.",
      reduction_name(call.reduction),
      ": ",
      reason);
  if (c10::isComplexType(call.dtype)) {
    call.dtype = c10::toRealValueType(call.dtype); // as pairs
  }
  if (exact_sums()) {
    call.reduction = exact(call.dtype, call.reduction);
  }
  if (plain(call.reduction) == Reduction::PremulSum) {
    const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(supplement != nullptr, "neuron: ", name, " with ReduceOp.PREMUL_SUM needs a factor");
    call.factor =
        supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
  }
}

void add_splits(
    c10::SmallVector<Region, 4>& regions,
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    const char* side) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  TORCH_CHECK_VALUE(
      std::all_of(splits.begin(), splits.end(), [](int64_t n) { return n >= 0; }) &&
          std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
      "neuron: all_to_all_single: the ",
      side,
      " splits ",
      c10::IntArrayRef(splits),
      " must not be negative and must add up to the first dimension, ",
      rows);
  const uint64_t row_bytes = rows > 0 ? tensor.nbytes() / rows : 0;
  auto* data = static_cast<std::byte*>(tensor.data_ptr());
  for (const int64_t n : splits) {
    regions.push_back({data, n * row_bytes, nullptr});
    data += n * row_bytes;
  }
}

} // namespace trn
