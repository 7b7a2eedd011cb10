// The Python face of the process group, and what the fabric needs of Python.

#include "c10d/CallSite.h"
#include "c10d/ProcessGroupLone.h"
#include "c10d/ProcessGroupNeuron.h"
#include "c10d/SymmetricMemoryNeuron.h"
#include "c10d/WorkNeuron.h"
#include "fabric/CallSite.h"
#include "fabric/Exchange.h"
#include "fabric/FlightRecorder.h"
#include "fabric/Host.h"
#include "fabric/Network.h"
#include "fabric/RankStatus.h"

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <pybind11/chrono.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace trn {

namespace {

void* release_interpreter() {
  return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

void retake_interpreter(void* released) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(released));
}

// Set once, by trn_dist.neuron.distributed.
PyObject* thread_counter = nullptr;
PyObject* failure_listener = nullptr;

void on_failure() {
  if (failure_listener == nullptr || !Py_IsInitialized()) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  const pybind11::handle listener(failure_listener);
  listener();
}

pybind11::list flight_record(const ProcessGroupNeuron& group, int rank) {
  pybind11::list calls;
  const Fabric::Peer& peer = group.fabric()->peer(rank);
  for (const FlightRecord& record : flight_records(peer)) {
    pybind11::dict call;
    const bool message = record.operation >= FlightRecord::kSend;
    call["record_id"] = record.id;
    call["group"] = call_site_text(peer, record.group);
    call["site"] = call_site_text(peer, record.site);
    call["sequence"] = record.sequence;
    call["operation"] = record.operation == FlightRecord::kSend ? "send"
        : message                                               ? "recv"
                  : collective_name(static_cast<Collective>(record.operation));
    call["is_p2p"] = message;
    call["chunked"] = record.chunked != 0;
    call["rank"] = record.rank;
    call["peer"] = record.peer;
    call["created_ns"] = record.created_ns;
    call["completed_ns"] = record.completed_ns;
    call["failed"] = record.failed != 0;
    call["timeout_ms"] = record.timeout_ms;
    const auto dtype = static_cast<c10::ScalarType>(record.dtype);
    const bool known = record.dtype < static_cast<uint64_t>(c10::ScalarType::Undefined);
    call["dtype"] = known ? c10::toString(dtype) : "?";
    const uint64_t element = known ? std::max<uint64_t>(c10::elementSize(dtype), 1) : 1;
    call["input_numel"] = record.input_nbytes / element;
    call["output_numel"] = record.output_nbytes / element;
    pybind11::list shape;
    for (uint64_t i = 0; i < std::min<uint64_t>(record.ndim, kMaxShape); ++i) {
      shape.append(record.shape[i]);
    }
    call["shape"] = shape;
    calls.append(call);
  }
  return calls;
}

uint32_t count_threads() {
  if (thread_counter == nullptr || !Py_IsInitialized()) {
    return 1;
  }
  pybind11::gil_scoped_acquire gil;
  const pybind11::handle counter(thread_counter);
  return counter().cast<uint32_t>();
}

// Seconds that `iterations` calls in a row take without Python between them. `group`: any c10d backend; the result of an
// all_reduce goes to `output`, its input is ignored. For benchmarks.
double time_calls(
    c10d::Backend& group,
    const std::string& operation,
    at::Tensor output,
    at::Tensor input,
    int64_t iterations) {
  const int right = (group.getRank() + 1) % group.getSize();
  const int left = (group.getRank() + group.getSize() - 1) % group.getSize();
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  std::vector<int64_t> even;
  // As the functions of torch.distributed call it unless told otherwise.
  const auto blocking = [](auto options) {
    options.asyncOp = false;
    return options;
  };
  const auto wait_for = [](const c10::intrusive_ptr<c10d::Work>& work) {
    if (work != nullptr) {
      work->wait();
    }
  };
  const auto run = [&](const std::function<void()>& call) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < iterations; ++i) {
      call();
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  if (operation == "all_reduce") {
    const auto options = blocking(c10d::AllreduceOptions());
    return run([&] { wait_for(group.allreduce(outputs, options)); });
  }
  if (operation == "all_gather") {
    const auto options = blocking(c10d::AllgatherOptions());
    return run([&] { wait_for(group._allgather_base(output, input, options)); });
  }
  if (operation == "reduce_scatter") {
    const auto options = blocking(c10d::ReduceScatterOptions());
    return run([&] { wait_for(group._reduce_scatter_base(output, input, options)); });
  }
  if (operation == "all_to_all") {
    const auto options = blocking(c10d::AllToAllOptions());
    return run([&] { wait_for(group.alltoall_base(output, input, even, even, options)); });
  }
  if (operation == "sendrecv") {
    return run([&] {
      auto sent = group.send(inputs, right, 0);
      group.recv(outputs, left, 0)->wait();
      sent->wait();
    });
  }
  if (operation == "barrier") {
    const auto options = blocking(c10d::BarrierOptions());
    return run([&] { wait_for(group.barrier(options)); });
  }
  TORCH_CHECK_VALUE(false, "neuron: _time_calls knows no operation ", operation);
}

std::chrono::milliseconds timeout_of(const c10d::DistributedBackendOptions& options) {
  return std::chrono::milliseconds(static_cast<int64_t>(options.timeout.count() * 1000));
}

void check_signals() {
  // Python handles signals on its main thread alone, which is the process's first.
  if (!Py_IsInitialized() || syscall(SYS_gettid) != getpid()) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

} // namespace

void init_c10d(pybind11::module_& m) {
  host_hooks = {release_interpreter, retake_interpreter, check_signals, python_call_site, count_threads, on_failure};

  auto c10d_module = pybind11::module_::import("torch._C._distributed_c10d");
  auto backend = c10d_module.attr("Backend");
  using Options = ProcessGroupNeuron::Options;
  auto group = pybind11::class_<ProcessGroupNeuron, c10::intrusive_ptr<ProcessGroupNeuron>>(
      m, "ProcessGroupNeuron", backend, "Process group over the shared memory of one machine's simulated NeuronCores.");
  pybind11::class_<Options, c10::intrusive_ptr<Options>>(group, "Options", backend.attr("Options"))
      .def(
          pybind11::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<Options>(timeout); }),
          pybind11::arg("timeout") = kBackendDefaultTimeout)
      .def("__copy__", [](const Options& self) { return c10::make_intrusive<Options>(self); })
      .def("__deepcopy__", [](const Options& self, const pybind11::dict&) {
        return c10::make_intrusive<Options>(self);
      });
  group
      .def(
          "_flight_record",
          [](const ProcessGroupNeuron& self, int rank) {
            TORCH_CHECK_INDEX(
                rank >= 0 && rank < self.fabric()->size(), "rank ", rank, " of a job of ", self.fabric()->size());
            return flight_record(self, rank);
          },
          pybind11::arg("rank"),
          "The last calls of a rank of the job, oldest first, also of one that has died.")
      .def_property_readonly("_fabric_rank", [](const ProcessGroupNeuron& self) { return self.fabric()->rank(); })
      .def_property_readonly("_fabric_size", [](const ProcessGroupNeuron& self) { return self.fabric()->size(); });
  group.def("_set_default_timeout", &ProcessGroupNeuron::setTimeout, pybind11::arg("timeout"))
      .def_property_readonly("options", [](ProcessGroupNeuron& self) {
        return c10::dynamic_intrusive_pointer_cast<Options>(self.getBackendOptions());
      });

  m.def("_set_network_loader", [](pybind11::function load) {
    auto* function = new pybind11::function(std::move(load));
    set_network_loader([function](
                           const c10::intrusive_ptr<c10d::Store>& store,
                           int rank,
                           int size,
                           const std::string& address,
                           std::chrono::milliseconds timeout) {
      const pybind11::gil_scoped_acquire interpreter;
      return (*function)(store, rank, size, address, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
    });
  });

  m.def(
      "_set_failure_listener",
      [](const pybind11::function& listener) { failure_listener = listener.inc_ref().ptr(); },
      pybind11::arg("listener"),
      "Has `listener` called before a call raises because its group has failed.");
  m.def(
      "_set_thread_counter",
      [](const pybind11::function& counter) { thread_counter = counter.inc_ref().ptr(); },
      pybind11::arg("counter"),
      "Has `counter` tell how many threads of the program could call a collective.");
  m.def(
      "_begin_pause", &begin_pause, "Until _end_pause, the deadlines of the other ranks of this machine stand still.");
  m.def("_end_pause", &end_pause, "Ends what _begin_pause began.");
  register_symmetric_memory();
  // Carries a collective out and returns when it began and ended in virtual time; nothing waits for it there.
  m.def(
      "_finish_collective",
      [](const c10::intrusive_ptr<c10d::Work>& work) {
        auto* neuron = dynamic_cast<WorkNeuron*>(work.get());
        TORCH_CHECK_TYPE(neuron != nullptr, "neuron: a Work of the neuron process group is needed here");
        return neuron->finish();
      },
      pybind11::arg("work"),
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "_create_process_group",
      [](const c10d::DistributedBackendOptions& options) -> c10::intrusive_ptr<ProcessGroupNeuron> {
        return ProcessGroupNeuron::create(
            options.store,
            options.group_rank,
            options.group_size,
            timeout_of(options),
            options.group_id,
            options.global_ranks_in_group);
      },
      pybind11::arg("options"),
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Makes the group that a torch.distributed._DistributedBackendOptions describes. Collective over its ranks.");
  pybind11::class_<ProcessGroupLone, c10::intrusive_ptr<ProcessGroupLone>>(
      m, "ProcessGroupLone", pybind11::module_::import("torch._C._distributed_c10d").attr("Backend"))
      .def("_set_default_timeout", &ProcessGroupLone::setTimeout, pybind11::arg("timeout"));
  m.def(
      "_create_lone_group",
      [](const c10d::DistributedBackendOptions& options, const std::vector<int>& live_ranks) {
        return ProcessGroupLone::create(
            options.store,
            options.group_rank,
            options.group_size,
            timeout_of(options),
            options.group_id,
            options.global_ranks_in_group,
            live_ranks);
      },
      pybind11::arg("options"),
      pybind11::arg("live_ranks"),
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "The group that a torch.distributed._DistributedBackendOptions describes, in timing mode. `live_ranks`: those of "
      "the job that have a process; collective over those of the group.");
  m.def(
      "_time_calls",
      time_calls,
      pybind11::arg("group"),
      pybind11::arg("operation"),
      pybind11::arg("output"),
      pybind11::arg("input"),
      pybind11::arg("iterations"),
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Seconds that `iterations` collectives of a backend take, called from C++ one after the other. For benchmarks.");
}

} // namespace trn
