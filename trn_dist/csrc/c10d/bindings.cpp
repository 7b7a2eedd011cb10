// The Python face of the process group, and what the fabric needs of Python.

#include "c10d/ProcessGroupNeuron.h"
#include "fabric/Host.h"

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <pybind11/chrono.h>

#include <sys/syscall.h>
#include <unistd.h>

namespace trn {

namespace {

void* release_interpreter() {
  return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

void retake_interpreter(void* released) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(released));
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
  host_hooks = {release_interpreter, retake_interpreter, check_signals};

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
  group.def("_set_default_timeout", &ProcessGroupNeuron::setTimeout, pybind11::arg("timeout"))
      .def_property_readonly("options", [](ProcessGroupNeuron& self) {
        return c10::dynamic_intrusive_pointer_cast<Options>(self.getBackendOptions());
      });

  m.def(
      "_create_process_group",
      [](const c10d::DistributedBackendOptions& options) -> c10::intrusive_ptr<ProcessGroupNeuron> {
        return ProcessGroupNeuron::create(
            options.store,
            options.group_rank,
            options.group_size,
            std::chrono::milliseconds(static_cast<int64_t>(options.timeout.count() * 1000)),
            options.group_id,
            options.global_ranks_in_group);
      },
      pybind11::arg("options"),
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Makes the group that a torch.distributed._DistributedBackendOptions describes. Collective over its ranks.");
}

} // namespace trn
