// What trn_dist.timing sees of virtual time.

#include "device/Device.h"
#include "device/Stream.h"
#include "timing/CollectiveCost.h"
#include "timing/OperatorCost.h"
#include "timing/Trace.h"
#include "timing/VirtualClock.h"

#include <torch/extension.h>

#include <chrono>

namespace trn {

namespace {

// ScalarTypes that a name of the chip's file stands for. A type that none stands for runs as float32.
std::vector<c10::ScalarType> types_called(const std::string& name) {
  using enum c10::ScalarType;
  if (name == "bfloat16") {
    return {BFloat16};
  }
  if (name == "float16") {
    return {Half};
  }
  if (name == "float8") {
    return {Float8_e4m3fn, Float8_e4m3fnuz, Float8_e5m2, Float8_e5m2fnuz, Float8_e8m0fnu};
  }
  if (name == "int8") {
    return {Char, Byte};
  }
  return {};
}

ByDtype by_dtype(const std::map<std::string, double>& named) {
  ByDtype result;
  result.fill(named.at("float32"));
  for (const auto& [name, value] : named) {
    for (const c10::ScalarType type : types_called(name)) {
      result[static_cast<size_t>(type)] = value;
    }
  }
  return result;
}

ElementRates element_rates(const pybind11::dict& rates) {
  ElementRates result;
  result.ps_per_element = by_dtype(rates["ps_per_element"].cast<std::map<std::string, double>>());
  result.instruction_ps = rates["instruction_ps"].cast<double>();
  return result;
}

// The dict that ChipRates.as_dict() of trn_dist/timing/chip_rates.py makes.
ChipRates chip_rates_of(const pybind11::dict& rates) {
  ChipRates result;
  result.chip = rates["chip"].cast<std::string>();
  result.host_operator_ps = rates["host_operator_ps"].cast<Picoseconds>();
  result.host_poll_ps = rates["host_poll_ps"].cast<Picoseconds>();
  result.device_operator_ps = rates["device_operator_ps"].cast<Picoseconds>();
  result.dma_start_ps = rates["dma_start_ps"].cast<Picoseconds>();
  result.cores = rates["cores"].cast<int64_t>();
  result.tensor_rows = rates["tensor_rows"].cast<int64_t>();
  result.tensor_columns = rates["tensor_columns"].cast<int64_t>();
  result.tensor_ps_per_flop = by_dtype(rates["tensor_ps_per_flop"].cast<std::map<std::string, double>>());
  result.vector = element_rates(rates["vector"]);
  result.scalar = element_rates(rates["scalar"]);
  result.gpsimd = element_rates(rates["gpsimd"]);
  result.hbm_ps_per_byte = rates["hbm_ps_per_byte"].cast<double>();
  result.dma_ps_per_byte = rates["dma_ps_per_byte"].cast<double>();
  result.host_ps_per_byte = rates["host_ps_per_byte"].cast<double>();
  return result;
}

pybind11::dict step_dict(const StepTimes& step) {
  pybind11::dict engines;
  for (size_t i = 0; i < kEngines; ++i) {
    engines[engine_name(static_cast<Engine>(i))] = step.engines[i];
  }
  pybind11::list groups;
  for (const auto& group : step.groups) {
    pybind11::dict entry;
    entry["name"] = name_of(group.name);
    entry["exposed_ps"] = group.exposed;
    entry["waiting_ps"] = group.waiting;
    entry["busy_ps"] = group.busy;
    entry["collectives"] = group.collectives;
    entry["bytes"] = group.bytes;
    groups.append(entry);
  }
  pybind11::list operators;
  for (const auto& sum : step.operators) {
    pybind11::dict entry;
    entry["name"] = name_of(sum.name);
    entry["count"] = sum.count;
    entry["busy_ps"] = sum.busy;
    entry["hbm_bound_ps"] = sum.hbm_bound;
    entry["bytes"] = sum.bytes;
    entry["flops"] = sum.flops;
    operators.append(entry);
  }
  pybind11::dict result;
  result["start_ps"] = step.start;
  result["end_ps"] = step.end;
  result["engines"] = engines;
  result["launch_ps"] = step.launch;
  result["host_bound_ps"] = step.host_bound;
  result["idle_ps"] = step.idle;
  result["groups"] = groups;
  result["operators"] = operators;
  result["hbm_bound_ps"] = step.hbm_bound;
  result["flops"] = step.flops;
  result["hbm_bytes"] = step.hbm_bytes;
  return result;
}

} // namespace

void init_timing(pybind11::module_& m) {
  m.def("_set_chip_rates", [](const pybind11::dict& rates) { set_chip_rates(chip_rates_of(rates)); });
  m.def("_set_chip_rates_loader", [](pybind11::function load) {
    // Kept for the life of the process, like the module.
    auto* function = new pybind11::function(std::move(load));
    set_chip_rates_loader([function] {
      const pybind11::gil_scoped_acquire interpreter;
      (*function)();
    });
  });
  m.def("_set_cost_table_loader", [](pybind11::function load) {
    auto* function = new pybind11::function(std::move(load));
    set_cost_table_loader([function](const std::vector<int>& ranks, const std::string& operation) {
      const pybind11::gil_scoped_acquire interpreter;
      std::vector<CostPiece> pieces;
      for (const pybind11::handle row : (*function)(ranks, operation)) {
        const auto [from_bytes, alpha_ps, beta_ps_per_mib] = row.cast<std::tuple<int64_t, Picoseconds, Picoseconds>>();
        pieces.push_back({from_bytes, alpha_ps, beta_ps_per_mib});
      }
      return pieces;
    });
  });
  m.def("_virtual_host_ps", &host_time);
  m.def("_virtual_stream_ps", [](c10::DeviceIndex device, c10::StreamId stream) {
    return stream_time(c10::Stream(c10::Stream::UNSAFE, c10::Device(kNeuron, device), stream));
  });
  // Of two torch.neuron.Event by their event_id.
  m.def(
      "_event_elapsed_ms",
      [](uintptr_t from, uintptr_t to) {
        return elapsed_ms(*reinterpret_cast<EventState*>(from), *reinterpret_cast<EventState*>(to));
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("_mark_step", [] { return step_dict(mark_step()); });
  m.def("_irreproducible_reason", &irreproducible_reason);
  m.def(
      "_matmul_ps",
      [](int64_t batch, int64_t m, int64_t k, int64_t n, const pybind11::object& dtype) {
        return matmul_ps(batch, m, k, n, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
      },
      pybind11::arg("batch"),
      pybind11::arg("m"),
      pybind11::arg("k"),
      pybind11::arg("n"),
      pybind11::arg("dtype"));
  // What one call of an operator would cost, from the sizes of its tensors, which may be on the meta device. `inputs`: a
  // list for each argument, empty if it is no tensor; `written`: those of them that it writes; `made`: its results.
  m.def(
      "_price",
      [](const std::string& name,
         const std::vector<std::vector<at::Tensor>>& inputs,
         const std::vector<at::Tensor>& written,
         const std::vector<at::Tensor>& made,
         bool causal) {
        Traffic traffic;
        for (size_t i = 0; i < inputs.size(); ++i) {
          for (const at::Tensor& tensor : inputs[i]) {
            traffic.read(*tensor.unsafeGetTensorImpl(), static_cast<int>(i), /*again=*/false);
          }
        }
        for (const at::Tensor& tensor : written) {
          traffic.wrote(*tensor.unsafeGetTensorImpl());
        }
        for (const at::Tensor& tensor : made) {
          traffic.made(*tensor.unsafeGetTensorImpl());
        }
        const OperatorCost cost = price(operator_model(name), traffic, causal);
        pybind11::dict result;
        result["engine"] = engine_name(cost.engine);
        result["time_ps"] = cost.time;
        result["hbm_bound"] = cost.hbm_bound;
        result["bytes"] = cost.bytes;
        result["flops"] = cost.flops;
        return result;
      },
      pybind11::arg("name"),
      pybind11::arg("inputs"),
      pybind11::arg("written"),
      pybind11::arg("made"),
      pybind11::arg("causal") = false);
  // Nanoseconds of this host to price and launch the operator once, for benchmarks/virtual_time.py.
  m.def("_time_pricing", [](const std::string& name, const std::vector<at::Tensor>& tensors, int64_t repeats) {
    const OperatorModel model = operator_model(name);
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < repeats; ++i) {
      Traffic traffic;
      int index = 0;
      for (const at::Tensor& tensor : tensors) {
        traffic.read(*tensor.unsafeGetTensorImpl(), index++, /*again=*/false);
      }
      traffic.made(*tensors.at(0).unsafeGetTensorImpl());
      launch(tensors.at(0).device().index(), model.name, price(model, traffic, /*causal=*/false));
    }
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - begin;
    return elapsed.count() / static_cast<double>(repeats);
  });
  m.def("_start_trace", &start_trace, pybind11::arg("path"), pybind11::arg("rank"));
  m.def("_flush_trace", &flush_trace, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace trn
