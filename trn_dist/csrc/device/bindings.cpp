// What trn_dist.neuron sees of the device. The rest of torch.neuron goes through PyTorch's own accelerator functions.

#include "device/Allocator.h"
#include "device/Arena.h"
#include "device/Device.h"
#include "device/Fallback.h"
#include "device/Generator.h"
#include "device/History.h"
#include "device/Inspection.h"
#include "device/Ledger.h"
#include "device/Norm.h"
#include "device/Sanitizer.h"
#include "device/Stream.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <unordered_map>

namespace torch {
// As in torch/csrc/profiler/python/combined_traceback.h, which needs a JSON library that the wheel does not ship.
std::vector<pybind11::object> py_symbolize(std::vector<CapturedTraceback*>& to_symbolize);
} // namespace torch

namespace trn {

void register_hooks();

namespace {

pybind11::dict stat_dict(const c10::CachingAllocator::StatArray& stats) {
  static constexpr const char* kNames[] = {"all", "small_pool", "large_pool"};
  pybind11::dict result;
  for (size_t i = 0; i < stats.size(); ++i) {
    pybind11::dict entry;
    entry["current"] = stats[i].current;
    entry["peak"] = stats[i].peak;
    entry["allocated"] = stats[i].allocated;
    entry["freed"] = stats[i].freed;
    result[kNames[i]] = entry;
  }
  return result;
}

// The statistics in the nested form of torch.cuda.memory_stats_as_nested_dict.
pybind11::dict memory_stats(c10::DeviceIndex device) {
  const auto stats = Ledger::of(device).stats();
  pybind11::dict result;
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["allocation"] = stat_dict(stats.allocation);
  result["segment"] = stat_dict(stats.segment);
  result["active"] = stat_dict(stats.active);
  result["inactive_split"] = stat_dict(stats.inactive_split);
  result["allocated_bytes"] = stat_dict(stats.allocated_bytes);
  result["reserved_bytes"] = stat_dict(stats.reserved_bytes);
  result["active_bytes"] = stat_dict(stats.active_bytes);
  result["inactive_split_bytes"] = stat_dict(stats.inactive_split_bytes);
  result["requested_bytes"] = stat_dict(stats.requested_bytes);
  // What the modelled allocator does not have: limits on splitting, and waiting for streams before memory is reused.
  result["num_sync_all_streams"] = 0;
  result["num_oom_rejections"] = 0;
  result["max_split_size"] = -1;
  for (const char* name : {"oversize_allocations", "oversize_segments"}) {
    pybind11::dict none;
    for (const char* metric : {"current", "peak", "allocated", "freed"}) {
      none[metric] = 0;
    }
    result[name] = none;
  }
  return result;
}

// Turns contexts into lists of frames ({filename, line, name}), all at once for their symbols are looked up together.
class Frames {
 public:
  void add(const Context& context) {
    if (auto* traceback = dynamic_cast<torch::CapturedTraceback*>(context.get())) {
      tracebacks_.push_back(traceback);
    }
  }
  void symbolize() {
    auto lists = torch::py_symbolize(tracebacks_);
    for (size_t i = 0; i < tracebacks_.size(); ++i) {
      frames_[tracebacks_[i]] = lists[i];
    }
  }
  pybind11::object of(const Context& context) const {
    auto it = frames_.find(dynamic_cast<torch::CapturedTraceback*>(context.get()));
    return it == frames_.end() ? pybind11::object(pybind11::list()) : it->second;
  }

 private:
  std::vector<torch::CapturedTraceback*> tracebacks_;
  std::unordered_map<torch::CapturedTraceback*, pybind11::object> frames_;
};

// What a device's history holds, in the form of torch.cuda.memory._snapshot()["device_traces"].
pybind11::list memory_history(c10::DeviceIndex device) {
  pybind11::list entries;
  if (!Ledger::exists(device)) {
    return entries;
  }
  const auto events = Ledger::of(device).history();
  Frames frames;
  for (const auto& event : events) {
    frames.add(event.context);
  }
  frames.symbolize();
  for (const auto& event : events) {
    pybind11::dict entry;
    entry["action"] = name_of(event.action);
    entry[event.action == MemoryAction::kOutOfMemory ? "device_free" : "addr"] = event.address;
    entry["size"] = event.size;
    entry["stream"] = event.stream;
    entry["time_us"] = event.time_us;
    entry["frames"] = frames.of(event.context);
    entries.append(entry);
  }
  return entries;
}

// The segments of one device in the form of torch.cuda.memory_snapshot(); none if the device was not used.
pybind11::list memory_segments(c10::DeviceIndex device) {
  pybind11::list segments;
  if (!Ledger::exists(device)) {
    return segments;
  }
  const auto records = Ledger::of(device).snapshot();
  Frames frames;
  for (const auto& segment : records) {
    for (const auto& block : segment.blocks) {
      frames.add(block.context);
    }
  }
  frames.symbolize();
  for (const auto& segment : records) {
    pybind11::list blocks;
    uint64_t allocated = 0;
    uint64_t requested = 0;
    for (const auto& block : segment.blocks) {
      pybind11::dict entry;
      entry["address"] = block.address;
      entry["size"] = block.size;
      entry["requested_size"] = block.requested;
      entry["state"] = block.free ? "inactive" : "active_allocated";
      entry["frames"] = frames.of(block.context);
      blocks.append(entry);
      allocated += block.free ? 0 : block.size;
      requested += block.requested;
    }
    pybind11::dict entry;
    entry["device"] = static_cast<int>(device);
    entry["address"] = segment.address;
    entry["total_size"] = segment.size;
    entry["allocated_size"] = allocated;
    entry["active_size"] = allocated;
    entry["requested_size"] = requested;
    entry["stream"] = segment.stream;
    entry["segment_type"] = segment.small ? "small" : "large";
    entry["segment_pool_id"] = pybind11::make_tuple(0, 0);
    entry["is_expandable"] = false;
    entry["frames"] = pybind11::list();
    entry["blocks"] = blocks;
    segments.append(entry);
  }
  return segments;
}

DeviceConfig config_of(const pybind11::dict& values) {
  DeviceConfig config;
  config.device_count = values["device_count"].cast<int>();
  config.hbm_bytes = values["hbm_bytes"].cast<uint64_t>();
  config.name = values["name"].cast<std::string>();
  SegmentPolicy& policy = config.policy;
  policy.small_limit_included = values["small_limit_included"].cast<bool>();
  policy.small_limit = values["small_limit_bytes"].cast<uint64_t>();
  policy.small_segment = values["small_segment_bytes"].cast<uint64_t>();
  policy.large_segment = values["large_segment_bytes"].cast<uint64_t>();
  policy.unrounded_limit = values["unrounded_limit_bytes"].cast<uint64_t>();
  policy.min_block = values["min_block_bytes"].cast<uint64_t>();
  policy.classes_per_doubling = values["classes_per_doubling"].cast<uint64_t>();
  policy.segment_granule = values["segment_granule_bytes"].cast<uint64_t>();
  return config;
}

// Runs Python code for C++ callers that know PyTorch's exceptions only.
template <typename Function>
auto call_python(Function function) {
  pybind11::gil_scoped_acquire gil;
  try {
    return function();
  } catch (pybind11::error_already_set& error) {
    error.restore();
    python_error again;
    again.persist();
    throw std::move(again);
  }
}

void set_python_observer(const std::optional<pybind11::function>& observer) {
  if (!observer.has_value()) {
    set_operator_observer(nullptr);
    return;
  }
  auto* kept = new pybind11::function(*observer); // like the providers above, never freed
  set_operator_observer([kept](const std::string& name, const TouchedTensors& tensors) {
    call_python([&] {
      pybind11::list touched;
      for (const Touched& one : tensors) {
        touched.append(pybind11::make_tuple(one.tensor, one.written));
      }
      (*kept)(name, touched);
    });
  });
}

// `function` gets the operator's arguments, those that are keyword-only by name, and answers with the fields of an
// OperatorCost of trn_dist.neuron.operator_cost, in their order.
void state_work_of(const std::string& name, const std::string& overload, pybind11::function function) {
  auto* kept = new pybind11::function(std::move(function)); // like the providers above, never freed
  const auto state = [kept](const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
    OperatorWork work;
    work.kind = OperatorClass::Stated;
    call_python([&] {
      pybind11::list arguments;
      pybind11::dict keywords;
      for (size_t i = 0; i < values.size(); ++i) {
        const pybind11::object value = torch::jit::toPyObject(values[i]);
        if (schema.arguments()[i].kwarg_only()) {
          keywords[pybind11::str(schema.arguments()[i].name())] = value;
        } else {
          arguments.append(value);
        }
      }
      const pybind11::tuple cost = (*kept)(*pybind11::tuple(arguments), **keywords);
      const auto product = cost[0].cast<std::array<int64_t, 4>>();
      std::copy(product.begin(), product.end(), work.sizes.begin());
      work.operand = reinterpret_cast<THPDtype*>(pybind11::object(cost[1]).ptr())->scalar_type;
      const auto elements = cost[2].cast<std::array<int64_t, 3>>();
      work.elements = *std::max_element(elements.begin(), elements.end());
      const auto passes = [&](size_t i) {
        return work.elements > 0 ? static_cast<float>(static_cast<double>(elements[i]) / work.elements) : 0.0f;
      };
      work.vector_passes = passes(0);
      work.scalar_passes = passes(1);
      work.gpsimd_passes = passes(2);
      work.bytes = cost[3].cast<int64_t>();
    });
    return work;
  };
  state_work(c10::OperatorName(name, overload), state);
}

} // namespace

void init_device(pybind11::module_& m) {
  install_cpu_allocator();
  register_hooks();
  register_fallback_over_decompositions();

  m.def("_set_device_config_provider", [](pybind11::function provider) {
    // Kept for the life of the process: no destructor may need the interpreter when it is gone.
    auto* kept = new pybind11::function(std::move(provider));
    set_device_config_provider([kept] {
      pybind11::gil_scoped_acquire gil;
      try {
        return config_of((*kept)().cast<pybind11::dict>());
      } catch (pybind11::error_already_set& error) {
        throw std::runtime_error(pybind11::str(error.value()).cast<std::string>());
      }
    });
  });
  m.def("_register_operator_cost", &state_work_of);
  m.def("_configure_device", [](const pybind11::dict& config) { set_device_config(config_of(config)); });
  m.def("_device_count", [] { return static_cast<int>(device_count()); });
  m.def("_device_name", [] { return device_config().name; });
  m.def("_device_hbm_bytes", [] { return device_config().hbm_bytes; });
  m.def("_check_device", [](int device) { check_device(static_cast<c10::DeviceIndex>(std::clamp(device, -1, 127))); });
  m.def("_initialize", [] { Arena::get(); });
  m.def("_is_initialized", &Arena::exists);
  m.def("_in_bad_fork", &Arena::in_bad_fork);
  m.def("_refuse_bad_fork", &Arena::refuse_bad_fork);
  m.def("_devices_in_use", [] {
    std::vector<int> used;
    for (int device = 0; device < static_cast<int>(device_count()); ++device) {
      if (Ledger::exists(static_cast<c10::DeviceIndex>(device))) {
        used.push_back(device);
      }
    }
    return used;
  });
  // Device, address and bytes of a tensor's storage, without Python's wrapper of it; None if it has no memory.
  m.def("_storage_of", [](const at::Tensor& tensor) -> pybind11::object {
    if (!tensor.defined() || !tensor.has_storage() || tensor.device().type() != kNeuron ||
        tensor.storage().nbytes() == 0) {
      return pybind11::none();
    }
    const c10::Storage& storage = tensor.storage();
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    return pybind11::make_tuple(static_cast<int>(tensor.device().index()), address, storage.nbytes());
  });
  // Has the main thread call it when it next runs Python. False: too many calls wait for that.
  m.def("_call_on_main_thread", [](const pybind11::function& call) {
    const auto run = [](void* owned) {
      const auto call = pybind11::reinterpret_steal<pybind11::object>(static_cast<PyObject*>(owned));
      if (PyObject* result = PyObject_CallNoArgs(call.ptr()); result != nullptr) {
        Py_DECREF(result);
      } else {
        PyErr_WriteUnraisable(call.ptr());
      }
      return 0;
    };
    const bool queued = Py_AddPendingCall(run, call.ptr()) == 0;
    if (queued) {
      call.inc_ref();
    }
    return queued;
  });
  m.def("_memory_stats", &memory_stats);
  m.def("_memory_segments", &memory_segments);
  m.def("_memory_history", &memory_history);
  m.def(
      "_record_memory_history",
      [](bool enabled, bool events, int context, bool cpp_frames, size_t max_entries) {
        set_history({enabled, events, static_cast<ContextLevel>(context), cpp_frames, max_entries});
      },
      pybind11::arg("enabled"),
      pybind11::arg("events"),
      pybind11::arg("context"),
      pybind11::arg("cpp_frames"),
      pybind11::arg("max_entries"));
  m.def("_empty_cache", &empty_cache);
  m.def("_reset_peak_memory_stats", [](c10::DeviceIndex device) { Ledger::of(device).reset_peak_stats(); });
  m.def(
      "_reset_accumulated_memory_stats", [](c10::DeviceIndex device) { Ledger::of(device).reset_accumulated_stats(); });
  m.def("_mem_get_info", [](c10::DeviceIndex device) {
    const Ledger& ledger = Ledger::of(device);
    return std::make_pair(ledger.total_bytes() - ledger.reserved_bytes(), ledger.total_bytes());
  });
  m.def("_set_memory_fraction", [](double fraction, c10::DeviceIndex device) {
    Ledger::of(device).set_memory_fraction(fraction);
  });
  m.def(
      "_synchronize_device",
      [](c10::DeviceIndex device) { synchronize_device(device); },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("_set_float64_norm", &set_float64_norm);
  m.def("_set_user_line_provider", [](pybind11::function provider) {
    auto* kept = new pybind11::function(std::move(provider));
    set_user_line_provider([kept] { return call_python([&] { return (*kept)().cast<std::string>(); }); });
  });
  m.def("_set_sanitizer", [](int mode) { set_sanitizer(static_cast<Sanitize>(mode)); });
  m.def("_set_operator_observer", &set_python_observer);
  m.def("_default_generator", [](c10::DeviceIndex device) { return default_generator(device); });
  m.def("_cpu_rng", &cpu_rng);
  m.def("_set_cpu_rng", &set_cpu_rng);
  m.def("_arena_used_bytes", [] { return Arena::exists() ? Arena::get().used_bytes() : 0; });
}

} // namespace trn
