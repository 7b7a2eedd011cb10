// What trn_dist.timing sees of virtual time.

#include "device/Device.h"
#include "device/Stream.h"
#include "timing/CollectiveCost.h"
#include "timing/CompiledRegion.h"
#include "timing/OperatorCost.h"
#include "timing/Replay.h"
#include "timing/Trace.h"
#include "timing/VirtualClock.h"

#include <torch/extension.h>

#include <chrono>
#include <cstring>
#include <memory>

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

// A recorded program as plain data, and back. The fields of a work are in the order of OperatorWork.
pybind11::tuple work_row(const RecordedWork& recorded) {
  const OperatorWork& work = recorded.work;
  return pybind11::make_tuple(
      name_of(recorded.name),
      static_cast<int>(work.kind),
      work.causal,
      static_cast<int>(work.type),
      static_cast<int>(work.operand),
      work.vector_passes,
      work.scalar_passes,
      work.gpsimd_passes,
      work.products,
      work.sizes,
      work.elements,
      work.bytes,
      work.longer_bytes);
}

// An enumerator from a file, below `end`.
template <typename Enum>
Enum enumerator(const pybind11::handle& value, int end, const char* what) {
  const int number = value.cast<int>();
  TORCH_CHECK_VALUE(number >= 0 && number < end, "replay: ", what, " ", number, " is not known to this version");
  return static_cast<Enum>(number);
}

RecordedWork work_of_row(const pybind11::tuple& row) {
  RecordedWork recorded;
  recorded.name = name_id(row[0].cast<std::string>());
  OperatorWork& work = recorded.work;
  work.kind = enumerator<OperatorClass>(row[1], static_cast<int>(OperatorClass::Stated) + 1, "a class of operators");
  work.causal = row[2].cast<bool>();
  work.type = enumerator<c10::ScalarType>(row[3], static_cast<int>(kScalarTypes), "a dtype");
  work.operand = enumerator<c10::ScalarType>(row[4], static_cast<int>(kScalarTypes), "a dtype");
  work.vector_passes = row[5].cast<float>();
  work.scalar_passes = row[6].cast<float>();
  work.gpsimd_passes = row[7].cast<float>();
  work.products = row[8].cast<float>();
  work.sizes = row[9].cast<std::array<int64_t, 5>>();
  work.elements = row[10].cast<int64_t>();
  work.bytes = row[11].cast<int64_t>();
  work.longer_bytes = row[12].cast<int64_t>();
  return recorded;
}

pybind11::tuple transfer_row(const RecordedTransfer& transfer) {
  return pybind11::make_tuple(
      static_cast<int>(transfer.role),
      transfer.for_host,
      transfer.operation,
      transfer.group,
      transfer.description,
      transfer.ranks,
      transfer.sequence,
      transfer.bytes,
      transfer.stream,
      static_cast<int>(transfer.device));
}

RecordedTransfer transfer_of_row(const pybind11::tuple& row) {
  RecordedTransfer transfer;
  transfer.role = enumerator<RecordedTransfer::Role>(row[0], RecordedTransfer::Receive + 1, "a kind of transfer");
  transfer.for_host = row[1].cast<bool>();
  transfer.operation = row[2].cast<std::string>();
  transfer.group = row[3].cast<std::string>();
  transfer.description = row[4].cast<std::string>();
  transfer.ranks = row[5].cast<std::vector<int>>();
  transfer.sequence = row[6].cast<uint64_t>();
  transfer.bytes = row[7].cast<int64_t>();
  transfer.stream = row[8].cast<int32_t>();
  transfer.device = static_cast<int16_t>(row[9].cast<int>());
  return transfer;
}

pybind11::dict program_dict(const Program& program) {
  pybind11::list works;
  for (const RecordedWork& work : program.works()) {
    works.append(work_row(work));
  }
  pybind11::list transfers;
  for (const RecordedTransfer& transfer : program.transfers()) {
    transfers.append(transfer_row(transfer));
  }
  pybind11::dict result;
  result["actions"] = pybind11::bytes(
      reinterpret_cast<const char*>(program.actions().data()), program.actions().size() * sizeof(Action));
  result["works"] = works;
  result["transfers"] = transfers;
  result["cannot_replay"] = program.reason();
  return result;
}

RankProgram program_of_dict(const pybind11::dict& given) {
  RankProgram program;
  program.rank = given["rank"].cast<int>();
  const auto bytes = given["actions"].cast<std::string>();
  TORCH_CHECK_VALUE(
      bytes.size() % sizeof(Action) == 0, "replay: the actions of rank ", program.rank, " end in the middle of one");
  program.actions.resize(bytes.size() / sizeof(Action));
  std::memcpy(program.actions.data(), bytes.data(), bytes.size());
  for (const pybind11::handle row : given["works"]) {
    program.works.push_back(work_of_row(pybind11::tuple(pybind11::reinterpret_borrow<pybind11::sequence>(row))));
  }
  for (const pybind11::handle row : given["transfers"]) {
    program.transfers.push_back(
        transfer_of_row(pybind11::tuple(pybind11::reinterpret_borrow<pybind11::sequence>(row))));
  }
  for (const Action& action : program.actions) {
    TORCH_CHECK_VALUE(
        action.kind <= Action::MarkStep && action.device >= 0 && action.device < 256 && action.stream >= 0 &&
            action.value >= 0,
        "replay: the record of rank ",
        program.rank,
        " is damaged");
  }
  return program;
}

Traffic traffic_of(
    const std::vector<std::vector<at::Tensor>>& inputs,
    const std::vector<at::Tensor>& written,
    const std::vector<at::Tensor>& made) {
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
  return traffic;
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
  m.def("_stream_wait_ps", [](c10::DeviceIndex device, Picoseconds time) {
    stream_wait(current_stream(device), time, Origin{});
  });
  // Launches an operator in virtual time alone, from the sizes of its tensors (as _price takes them).
  m.def(
      "_launch_untouched",
      [](c10::DeviceIndex device,
         const std::string& name,
         const std::vector<std::vector<at::Tensor>>& inputs,
         const std::vector<at::Tensor>& made) {
        const OperatorModel model = operator_model(name);
        return launch(device, model.name, price(model, traffic_of(inputs, {}, made), /*causal=*/false));
      },
      pybind11::arg("device"),
      pybind11::arg("name"),
      pybind11::arg("inputs"),
      pybind11::arg("made"));
  pybind11::class_<UntimedScope>(m, "_UntimedScope").def(pybind11::init<>());
  pybind11::class_<CompiledRegion>(m, "_CompiledRegion").def(pybind11::init<>());
  m.def("_mark_step", [] { return step_dict(mark_step()); });
  m.def("_times_so_far", [] {
    StepTimes times;
    {
      const pybind11::gil_scoped_release nothing_of_python;
      times = times_so_far();
    }
    return step_dict(times);
  });
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
        const OperatorCost cost = price(operator_model(name), traffic_of(inputs, written, made), causal);
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
  m.def("_start_program", &start_program);
  m.def("_program_so_far", [] { return program_dict(program_so_far()); });
  // (time_ps, flops, bytes) of each work of a recorded program.
  m.def(
      "_price_works",
      [](const pybind11::dict& rates, const pybind11::list& works) {
        const ChipRates chip = chip_rates_of(rates);
        pybind11::list priced;
        for (const pybind11::handle row : works) {
          const RecordedWork recorded =
              work_of_row(pybind11::tuple(pybind11::reinterpret_borrow<pybind11::sequence>(row)));
          const OperatorCost cost = price(recorded.work, chip);
          priced.append(pybind11::make_tuple(cost.time, cost.flops, cost.bytes));
        }
        return priced;
      },
      pybind11::arg("rates"),
      pybind11::arg("works"));
  pybind11::class_<Replay>(m, "_Replay")
      .def(
          pybind11::init([](const std::vector<pybind11::dict>& programs, bool lone) {
            std::vector<RankProgram> parsed;
            for (const pybind11::dict& program : programs) {
              parsed.push_back(program_of_dict(program));
            }
            return std::make_unique<Replay>(std::move(parsed), lone);
          }),
          pybind11::arg("programs"),
          pybind11::arg("lone"))
      // (operation, description, ranks, source, target, bytes, start_ps, end_ps) of each collective and message.
      .def(
          "transfers",
          [](const Replay& replay) {
            pybind11::list rows;
            for (const SharedTransfer& t : replay.transfers()) {
              rows.append(
                  pybind11::make_tuple(
                      t.operation, t.description, t.ranks, t.source, t.target, t.bytes, t.start, t.end));
            }
            return rows;
          })
      // The steps of each program, as _mark_step gives them.
      .def(
          "run",
          [](Replay& replay, const pybind11::dict& rates, const std::vector<Picoseconds>& durations) {
            pybind11::list programs;
            for (const auto& steps : replay.run(chip_rates_of(rates), durations)) {
              pybind11::list rows;
              for (const StepTimes& step : steps) {
                rows.append(step_dict(step));
              }
              programs.append(rows);
            }
            return programs;
          },
          pybind11::arg("rates"),
          pybind11::arg("durations"));
  m.def("_start_trace", &start_trace, pybind11::arg("path"), pybind11::arg("rank"));
  m.def("_flush_trace", &flush_trace, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace trn
