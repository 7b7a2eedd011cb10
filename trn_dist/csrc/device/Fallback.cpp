#include "device/Fallback.h"

#include "device/Alias.h"
#include "device/Allocator.h"
#include "device/Device.h"
#include "device/Generator.h"
#include "device/Inspection.h"
#include "device/Sanitizer.h"
#include "device/Stream.h"
#include "device/TimingOnly.h"
#include "timing/OperatorCost.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

// [Note: the road of an operator]
// An operator on neuron tensors arrives here with its arguments on the stack. Each neuron tensor is replaced by a CPU
// tensor over the same bytes (Alias.h), the CPU kernel runs while its allocations come from the arena (ArenaScope), and
// what it leaves on the stack is turned back: an argument that it wrote to is the caller's own tensor again, a view of an
// argument becomes a view of the caller's tensor, and a fresh output is adopted without a copy. On the way the tensors'
// sizes are noted, from which the operator is priced and launched in virtual time (timing/OperatorCost.h).

namespace trn {

namespace {

// The keys under which sparse tensors arrive, and those of the kernels that they are handed to.
constexpr std::array<std::pair<c10::DispatchKey, c10::DispatchKey>, 2> kSparseKeys = {{
    {c10::DispatchKey::SparseCPU, c10::DispatchKey::SparsePrivateUse1},
    {c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::SparseCsrPrivateUse1},
}};

struct OperatorInfo {
  size_t num_arguments = 0;
  size_t num_returns = 0;
  c10::SmallVector<bool, 12> writes; // by argument: whether the operator may write to it
  c10::SmallVector<bool, 12> reads; // by argument: false for one that is only written, an out=
  c10::SmallVector<int, 4> returned_argument; // by return: the written argument that it is, or -1
  int generator_argument = -1;
  bool draws = false; // random numbers
  bool takes_cpu_tensors = false; // beside neuron tensors, of any size
  OperatorModel cost;
  std::shared_ptr<const StatedWork> stated; // if the program says what it costs
  int masks = -1; // argument that may hold masks, by which the result's size depends on numbers
  bool overwrites_self = false; // in place, whatever was there before
  bool asks_for_gradients = false; // its CPU kernel does more when an argument requires a gradient
};

// Operators that CUDA, too, gives CPU tensors beside its own: indices and lengths.
const std::unordered_set<std::string>& mixed_operators() {
  static const std::unordered_set<std::string> names = {
      "aten::index",
      "aten::_unsafe_index",
      "aten::index_put",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::_unsafe_index_put",
      "aten::_pack_padded_sequence",
      "aten::_pack_padded_sequence_backward",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::_foreach_copy_",
      "aten::_amp_update_scale_",
      "aten::lstm",
      "aten::repeat_interleave",
      "aten::copy_", // of sparse tensors; that of dense ones is native
      "aten::copy_sparse_to_sparse_",
  };
  return names;
}

// Compositions that pick among kernels by the device they see, or refuse devices that they do not know: taken whole to
// the CPU, they pick what the CPU would.
constexpr std::array<std::string_view, 6> kComposedOnCpu = {
    "aten::convolution",
    "aten::convolution_backward",
    "aten::conj_physical_",
    "aten::linalg_lstsq",
    "aten::linalg_lstsq.out",
    "aten::mode.values",
};

// What the program says of operators of its own.
struct StatedWorks {
  std::mutex mutex;
  std::unordered_map<c10::OperatorName, std::shared_ptr<const StatedWork>> works;
  std::atomic<uint64_t> changes{0};
};

StatedWorks& stated_works() {
  static auto* works = new StatedWorks(); // its functions are Python's, which ends first
  return *works;
}

void use_fallback(const c10::OperatorName& name, c10::DispatchKey key) {
  // Kept for the life of the process: dropping a registration handle would take the kernel back.
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  registrations->push_back(
      c10::Dispatcher::singleton().registerImpl(
          name,
          key,
          c10::KernelFunction::makeFromBoxedFunction<&fallback>(),
          std::nullopt,
          nullptr,
          "trn_dist: CPU kernel over the same memory"));
}

OperatorInfo make_info(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OperatorInfo info;
  info.num_arguments = schema.arguments().size();
  info.num_returns = schema.returns().size();
  for (size_t i = 0; i < info.num_arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    info.writes.push_back(written);
    info.reads.push_back(!(written && argument.is_out()));
    const auto type = argument.type()->kind() == c10::TypeKind::OptionalType
        ? argument.type()->castRaw<c10::OptionalType>()->getElementType()->kind()
        : argument.type()->kind();
    if (type == c10::TypeKind::GeneratorType) {
      info.generator_argument = static_cast<int>(i);
    }
  }
  for (const c10::Argument& result : schema.returns()) {
    int source = -1;
    if (result.alias_info() != nullptr && result.alias_info()->isWrite()) {
      for (size_t i = 0; i < info.num_arguments; ++i) {
        const auto* alias_info = schema.arguments()[i].alias_info();
        if (alias_info != nullptr && *alias_info == *result.alias_info()) {
          source = static_cast<int>(i);
        }
      }
    }
    info.returned_argument.push_back(source);
  }
  const auto& tags = op.getTags();
  info.draws = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end() ||
      info.generator_argument >= 0;
  info.takes_cpu_tensors = mixed_operators().count(schema.name()) > 0;
  info.cost = operator_model(schema.name());
  info.masks = schema.name() == "aten::index" || schema.name() == "aten::_unsafe_index" ? 1 : -1;
  info.overwrites_self = schema.name() == "aten::fill_" || schema.name() == "aten::zero_";
  info.asks_for_gradients = schema.name() == "aten::_sparse_mm_reduce_impl";
  StatedWorks& stated = stated_works();
  std::lock_guard<std::mutex> guard(stated.mutex);
  if (const auto entry = stated.works.find(op.operator_name()); entry != stated.works.end()) {
    info.stated = entry->second;
  }
  return info;
}

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  using Infos = ska::flat_hash_map<const void*, std::unique_ptr<OperatorInfo>>;
  thread_local Infos infos;
  thread_local std::vector<Infos> outdated; // a call that is under way may use them
  thread_local uint64_t seen_changes = 0;
  const uint64_t changes = stated_works().changes.load(std::memory_order_acquire);
  if (C10_UNLIKELY(changes != seen_changes)) {
    outdated.push_back(std::exchange(infos, {}));
    seen_changes = changes;
  }
  const void* key = &op.schema();
  auto it = infos.find(key);
  if (C10_LIKELY(it != infos.end())) {
    return *it->second;
  }
  return *infos.emplace(key, std::make_unique<OperatorInfo>(make_info(op))).first->second;
}

// What the program said of a call, with the dtype and, where it said none, the bytes of the call's tensors.
OperatorWork with_tensors_of(OperatorWork stated, const OperatorWork& counted) {
  stated.type = counted.type;
  if (stated.bytes < 0) {
    stated.bytes = counted.bytes;
  }
  return stated;
}

struct Aliased {
  at::Tensor original;
  at::Tensor alias;
  bool written;
};

// The arguments of one call on their way to the CPU kernel and back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack* stack)
      : op_(op), info_(info), stack_(stack), arguments_begin_(stack->size() - info.num_arguments) {}

  // [Note: Known numbers]: whether all that the kernel would read is known, and what it writes can be.
  bool numbers_are_known() const {
    if (info_.draws) {
      return false;
    }
    bool all = true;
    const auto look = [&](const at::Tensor& tensor, size_t i) {
      if (!tensor.defined() || !tensor.is_privateuseone()) {
        return;
      }
      const bool read = info_.reads[i] && !(info_.overwrites_self && i == 0);
      all = all && (!read || known(tensor)) && (!info_.writes[i] || may_become_known(tensor));
    };
    for (size_t i = 0; i < info_.num_arguments; ++i) {
      const c10::IValue& value = (*stack_)[arguments_begin_ + i];
      if (value.isTensor()) {
        look(value.toTensor(), i);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) {
          look(tensor, i);
        }
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
          look(tensor.value_or(at::Tensor()), i);
        }
      }
    }
    return all;
  }

  // Runs the kernel for shapes alone.
  void work_out_shapes() {
    shapes_only_ = true;
    if (info_.cost.host_reads) {
      read_unknown();
      return;
    }
    constexpr c10::DispatchKeySet kMetaKeys(c10::DispatchKey::Meta);
    if (C10_UNLIKELY(info_.masks >= 0)) {
      refuse_masks();
    }
    replace_arguments();
    if (op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
      op_.redispatchBoxed(kMetaKeys, stack_);
    } else {
      keep_shapes();
    }
    replace_returns();
    for (const Aliased& aliased : aliased_) {
      if (aliased.written) {
        set_known(aliased.original, false);
      }
    }
    charge();
  }

  void outputs_are_known() const {
    for (const Aliased& aliased : aliased_) {
      if (aliased.written) {
        set_known(aliased.original, may_become_known(aliased.original));
      }
    }
    for (const at::Tensor& tensor : made_) {
      set_known(tensor, may_become_known(tensor));
    }
  }

  void replace_arguments() {
    if (C10_UNLIKELY(info_.stated != nullptr)) {
      stated_ = (*info_.stated)(
          op_.schema(), c10::ArrayRef<c10::IValue>(stack_->data() + arguments_begin_, info_.num_arguments));
    }
    for (size_t i = 0; i < info_.num_arguments; ++i) {
      c10::IValue& value = (*stack_)[arguments_begin_ + i];
      const bool written = info_.writes[i];
      argument_ = static_cast<int>(i);
      if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) {
          continue;
        }
        if (C10_LIKELY(tensor.is_privateuseone())) {
          if (info_.num_returns > 0 && written) {
            written_arguments_.emplace_back(static_cast<int>(i), tensor);
          }
          const bool requires_grad = info_.asks_for_gradients && tensor.requires_grad();
          value = alias_of(tensor, written);
          if (C10_UNLIKELY(requires_grad)) {
            value.toTensor().set_requires_grad(true);
          }
        } else {
          note_cpu(tensor);
        }
      } else if (value.isTensorList()) {
        replace_list(value, written);
      } else if (value.isOptionalTensorList()) {
        replace_optional_list(value);
      } else if (value.isDevice()) {
        const c10::Device device = value.toDevice();
        if (device.type() == kNeuron) {
          set_device(resolve(device));
          value = c10::Device(shapes_only_ ? c10::DeviceType::Meta : c10::DeviceType::CPU);
        }
      }
    }
    if (info_.cost.causal >= 0) {
      causal_ = argument(info_.cost.causal).toBool();
    }
    if (device_ < 0) {
      device_ = current_device();
    } else if (C10_UNLIKELY(cpu_tensor_ && !info_.takes_cpu_tensors)) {
      refuse_second_device("cpu");
    }
  }

  void replace_returns() {
    for (const Aliased& aliased : aliased_) {
      if (!aliased.written) {
        continue;
      }
      if (C10_UNLIKELY(aliased.original.layout() != at::kStrided)) {
        replace_sparse(aliased.original, aliased.alias, [&](const at::Tensor& part) { return turn(part); });
      } else {
        write_back(aliased.original, aliased.alias);
        traffic_.wrote(*aliased.original.unsafeGetTensorImpl());
      }
    }
    const size_t returns_begin = stack_->size() - info_.num_returns;
    for (size_t i = 0; i < info_.num_returns; ++i) {
      c10::IValue& value = (*stack_)[returns_begin + i];
      if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) {
          continue;
        }
        if (info_.returned_argument[i] >= 0) {
          value = written_argument(info_.returned_argument[i], tensor);
        } else {
          value = turn(tensor);
        }
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> turned;
        turned.reserve(value.toListRef().size());
        for (const at::Tensor& tensor : value.toTensorVector()) {
          turned.push_back(tensor.defined() ? turn(tensor) : tensor);
        }
        value = std::move(turned);
      }
    }
  }

  // Launches the operator in virtual time. A view moves nothing and is free.
  void charge() {
    if (traffic_.moved_nothing() && !info_.cost.host_reads) {
      return;
    }
    const OperatorCost cost = C10_UNLIKELY(stated_.has_value())
        ? price(with_tensors_of(*stated_, work_of(info_.cost, traffic_, causal_)), chip_rates())
        : price(info_.cost, traffic_, causal_);
    const Picoseconds end = launch(device_, info_.cost.name, cost);
    if (inspecting()) {
      look();
    }
    if (C10_UNLIKELY(info_.cost.host_reads)) {
      host_wait(end, last_launch());
      host_learns(clock_of(current_stream(device_)));
    }
  }

  c10::DeviceIndex device() const {
    return device_;
  }
  c10::IValue& argument(int index) {
    return (*stack_)[arguments_begin_ + static_cast<size_t>(index)];
  }
  // How many elements the call may draw: the largest tensor it was given.
  uint64_t max_numel() const {
    int64_t numel = 1;
    for (const Aliased& aliased : aliased_) {
      numel = std::max(numel, aliased.alias.numel());
    }
    return static_cast<uint64_t>(numel);
  }

 private:
  // A mask among the indices: how many elements it picks depends on it.
  void refuse_masks() {
    for (const std::optional<at::Tensor>& index : argument(info_.masks).toOptionalTensorVector()) {
      if (index.has_value() && index->defined() &&
          (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
        refuse_unknown(op_.schema().name() + " by a mask");
      }
    }
  }

  // The host asks for a number, or for a size that depends on numbers.
  void read_unknown() {
    const c10::IValue& value = (*stack_)[arguments_begin_];
    const bool item =
        info_.num_arguments == 1 && value.isTensor() && op_.schema().name() == "aten::_local_scalar_dense";
    if (!item || !at::isFloatingType(value.toTensor().scalar_type())) {
      refuse_unknown(op_.schema().name());
    }
    replace_arguments();
    stack_->resize(arguments_begin_);
    stack_->emplace_back(at::Scalar(std::numeric_limits<double>::quiet_NaN()));
    charge();
  }

  // In the place of a kernel that only writes to its arguments, which keep their shapes.
  void keep_shapes() {
    std::vector<c10::IValue> returned;
    bool only_writes = true;
    for (const int source : info_.returned_argument) {
      only_writes = only_writes && source >= 0 && info_.reads[static_cast<size_t>(source)];
      if (only_writes) {
        returned.push_back((*stack_)[arguments_begin_ + static_cast<size_t>(source)]);
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        only_writes,
        "neuron: timing mode (TRN_TIMING_ONLY) cannot run ",
        op_.operator_name(),
        ": PyTorch has no kernel for device meta that says which shapes its results have");
    stack_->resize(arguments_begin_);
    stack_->insert(stack_->end(), returned.begin(), returned.end());
  }

  at::Tensor alias(const at::Tensor& tensor) const {
    return C10_UNLIKELY(shapes_only_) ? meta_alias(tensor) : cpu_alias(tensor);
  }
  at::Tensor alias(const at::Tensor& tensor, const c10::Storage& storage) const {
    return C10_UNLIKELY(shapes_only_) ? meta_alias(tensor, storage) : cpu_alias(tensor, storage);
  }

  const at::Tensor& alias_of(const at::Tensor& tensor, bool written) {
    set_device(tensor.device().index());
    if (C10_UNLIKELY(tensor.layout() != at::kStrided)) {
      // Its parts first: what the kernel returns of them is found by their storages.
      at::Tensor alias =
          map_sparse(tensor, c10::DeviceType::CPU, [&](const at::Tensor& part) { return alias_of(part, false); });
      aliased_.push_back({tensor, std::move(alias), written});
      return aliased_.back().alias;
    }
    const auto note = [&](bool again) {
      if (info_.reads[argument_]) {
        traffic_.read(*tensor.unsafeGetTensorImpl(), argument_, again);
      }
    };
    // Arguments that share memory must share the alias's storage too: kernels look there for overlap. Long lists are of
    // parameters and the like, which do not; only the first few tensors are compared.
    const size_t compared = std::min<size_t>(aliased_.size(), 8);
    for (size_t i = 0; i < compared; ++i) {
      if (aliased_[i].original.is_same(tensor)) {
        note(/*again=*/true);
        aliased_.push_back({tensor, aliased_[i].alias, written});
        return aliased_.back().alias;
      }
      if (aliased_[i].original.has_storage() && aliased_[i].original.storage().is_alias_of(tensor.storage())) {
        note(/*again=*/false);
        aliased_.push_back({tensor, alias(tensor, aliased_[i].alias.storage()), written});
        return aliased_.back().alias;
      }
    }
    note(/*again=*/false);
    aliased_.push_back({tensor, alias(tensor), written});
    return aliased_.back().alias;
  }

  void set_device(c10::DeviceIndex device) {
    if (device_ < 0) {
      device_ = device;
    } else if (C10_UNLIKELY(device_ != device)) {
      refuse_second_device(c10::str("neuron:", static_cast<int>(device)));
    }
  }

  [[noreturn]] void refuse_second_device(const std::string& second) const {
    TORCH_CHECK(
        false,
        "Expected all tensors to be on the same device, but found at least two devices, neuron:",
        static_cast<int>(device_),
        " and ",
        second,
        "! (in ",
        op_.operator_name(),
        ")");
  }

  void note_cpu(const at::Tensor& tensor) {
    cpu_tensor_ = cpu_tensor_ || (tensor.device().is_cpu() && tensor.dim() > 0);
  }

  void replace_list(c10::IValue& value, bool written) {
    c10::List<at::Tensor> replaced;
    replaced.reserve(value.toListRef().size());
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined() && tensor.is_privateuseone()) {
        replaced.push_back(alias_of(tensor, written));
      } else {
        if (tensor.defined()) {
          note_cpu(tensor);
        }
        replaced.push_back(tensor);
      }
    }
    value = std::move(replaced);
  }

  void replace_optional_list(c10::IValue& value) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value() && tensor->defined() && tensor->is_privateuseone()) {
        replaced.push_back(std::optional<at::Tensor>(alias_of(*tensor, false)));
      } else {
        if (tensor.has_value() && tensor->defined()) {
          note_cpu(*tensor);
        }
        replaced.push_back(tensor);
      }
    }
    value = std::move(replaced);
  }

  at::Tensor written_argument(int index, const at::Tensor& tensor) {
    for (auto& [argument, original] : written_arguments_) {
      if (argument == index) {
        return original;
      }
    }
    return turn(tensor);
  }

  // The neuron tensor for a tensor that the kernel returned.
  at::Tensor turn(const at::Tensor& tensor) {
    if (C10_UNLIKELY(!tensor.has_storage())) {
      return turn_without_storage(tensor);
    }
    if (shapes_only_ ? !tensor.is_meta() : !tensor.device().is_cpu()) {
      return tensor;
    }
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    for (const Aliased& aliased : aliased_) {
      if (aliased.alias.has_storage() && aliased.alias.storage().unsafeGetStorageImpl() == storage) {
        return aliased.alias.is_same(tensor) ? aliased.original : adopt_view(tensor, aliased.original);
      }
    }
    at::Tensor output = adopt_output(tensor, device_);
    if (inspecting() || timing_only()) {
      made_.push_back(output);
    }
    traffic_.made(*output.unsafeGetTensorImpl());
    return output;
  }

  void look() const {
    TouchedTensors touched;
    for (const Aliased& aliased : aliased_) {
      touched.push_back({aliased.original, aliased.written});
    }
    for (const at::Tensor& tensor : made_) {
      touched.push_back({tensor, /*written=*/true});
    }
    inspect(device_, info_.cost.name, touched);
  }

  at::Tensor turn_without_storage(const at::Tensor& tensor) {
    for (const Aliased& aliased : aliased_) {
      if (aliased.alias.is_same(tensor)) {
        return aliased.original;
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.is_sparse() || at::sparse_csr::is_sparse_compressed(tensor),
        "neuron: ",
        op_.operator_name(),
        " gives a tensor of a kind that the device does not hold: ",
        tensor.toString(),
        " of layout ",
        tensor.layout());
    return map_sparse(tensor, kNeuron, [&](const at::Tensor& part) { return turn(part); });
  }

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  torch::jit::Stack* stack_;
  const size_t arguments_begin_;
  c10::DeviceIndex device_ = -1;
  bool cpu_tensor_ = false;
  int argument_ = 0; // the one being replaced
  Traffic traffic_;
  bool causal_ = false;
  std::optional<OperatorWork> stated_;
  bool shapes_only_ = false; // timing mode: the kernel is the meta device's
  c10::SmallVector<Aliased, 6> aliased_;
  std::vector<at::Tensor> made_; // outputs, while somebody looks
  c10::SmallVector<std::pair<int, at::Tensor>, 2> written_arguments_;
};

// Lends a CPU kernel that draws random numbers a CPU generator seeded from the device's, so that neither the result nor
// PyTorch's CPU generator depends on the other.
class LentGenerator {
 public:
  LentGenerator(const OperatorInfo& info, Call& call) {
    at::Generator given;
    if (info.generator_argument >= 0) {
      c10::IValue& value = call.argument(info.generator_argument);
      if (value.isGenerator()) {
        given = value.toGenerator();
      }
    }
    if (given.defined() && given.device().is_cpu()) {
      TORCH_CHECK(false, "Expected a 'neuron' device type for generator but found 'cpu'");
    }
    if (cpu_rng()) {
      if (given.defined()) {
        call.argument(info.generator_argument) = at::detail::getDefaultCPUGenerator();
      }
      return;
    }
    auto* generator =
        at::check_generator<NeuronGeneratorImpl>(given.defined() ? given : default_generator(call.device()));
    uint64_t seed = 0;
    {
      std::lock_guard<std::mutex> guard(generator->mutex_);
      const auto bits = philox(generator->current_seed(), generator->advance(call.max_numel()));
      seed = (static_cast<uint64_t>(bits[1]) << 32) | bits[0];
    }
    if (info.generator_argument >= 0) {
      call.argument(info.generator_argument) = at::make_generator<at::CPUGeneratorImpl>(seed);
      return;
    }
    // The kernel will ask for the CPU's default generator: lend that, and put its state back afterwards.
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> guard(cpu.mutex());
    saved_state_ = cpu.get_state();
    cpu.unsafeGetGeneratorImpl()->set_current_seed(seed);
  }
  ~LentGenerator() {
    if (saved_state_.defined()) {
      at::Generator cpu = at::detail::getDefaultCPUGenerator();
      std::lock_guard<std::mutex> guard(cpu.mutex());
      cpu.unsafeGetGeneratorImpl()->set_state(*saved_state_.unsafeGetTensorImpl());
    }
  }

 private:
  at::Tensor saved_state_;
};

} // namespace

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::DispatchKey cpu_key = c10::DispatchKey::CPU;
  for (const auto& [sparse_cpu_key, key] : kSparseKeys) {
    if (C10_UNLIKELY(keys.has(key))) {
      cpu_key = sparse_cpu_key;
    }
  }
  const c10::DispatchKeySet cpu_keys(cpu_key);
  const OperatorInfo& info = info_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(cpu_key),
      "neuron: operator ",
      op.operator_name(),
      " has no kernel for device neuron, and none for cpu that it could use instead");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call call(op, info, stack);
  if (C10_UNLIKELY(timing_only()) && !call.numbers_are_known()) {
    call.work_out_shapes();
    return;
  }
  call.replace_arguments();
  {
    std::optional<LentGenerator> generator;
    if (C10_UNLIKELY(info.draws)) {
      generator.emplace(info, call);
    }
    ArenaScope scope;
    op.redispatchBoxed(cpu_keys, stack);
  }
  call.replace_returns();
  if (C10_UNLIKELY(timing_only())) {
    call.outputs_are_known();
  }
  call.charge();
}

void register_fallback_over_decompositions() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto has_decomposition = [](const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
        op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  };
  auto composed_on_cpu = [](const c10::OperatorName& name) {
    const std::string full_name = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    return std::find(kComposedOnCpu.begin(), kComposedOnCpu.end(), full_name) != kComposedOnCpu.end();
  };
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    if ((op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && has_decomposition(*op)) || composed_on_cpu(name)) {
      use_fallback(name, c10::DispatchKey::PrivateUse1);
    }
    for (const auto& [cpu_key, key] : kSparseKeys) {
      if (op->hasKernelForDispatchKey(cpu_key) && has_decomposition(*op)) {
        use_fallback(name, key);
      }
    }
  }
}

void state_work(const c10::OperatorName& name, StatedWork work) {
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  TORCH_CHECK_VALUE(op.has_value(), "neuron: there is no operator ", name);
  StatedWorks& stated = stated_works();
  std::lock_guard<std::mutex> guard(stated.mutex);
  if (stated.works.count(name) == 0) {
    TORCH_CHECK_VALUE(
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1),
        "neuron: ",
        name,
        " has a kernel of its own for device neuron: state the costs of the operators that it calls");
    TORCH_CHECK_VALUE(
        !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd),
        "neuron: ",
        name,
        " is a composition of operators (CompositeImplicitAutograd): state the costs of those");
    use_fallback(name, c10::DispatchKey::PrivateUse1);
  }
  stated.works[name] = std::make_shared<const StatedWork>(std::move(work));
  stated.changes.fetch_add(1, std::memory_order_release);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace trn
