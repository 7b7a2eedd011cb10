"""What TorchTitan assumes about CUDA, corrected for the device ``neuron``. All of it, and only here.

``install_import_hook`` is called by the device's autoload during ``import torch``. It only puts a finder on
``sys.meta_path``: nothing of TorchTitan or torch is imported here, and a correction is applied at the moment
TorchTitan's own module is imported, so a plain ``torchrun -m torchtitan.train`` gets it as well. Where CUDA is
available TorchTitan would train on CUDA, and nothing is touched.

Corrections (files and lines of TorchTitan 0.2.1):

* ``models/moe/kernels.py:8``: ``import triton``, reached by importing torchtitan itself. CPU builds of torch have
  none, and its kernel would need a GPU. The module is replaced by :mod:`trn_dist.titan.expert_permutation`.
* ``tools/utils.py:68``, ``get_peak_flops``: a table of GPU names; anything else counts as an A100, so MFU would be
  wrong.
* ``tools/profiling.py:73``: ``None`` is passed as profiler activity when there is neither CUDA nor XPU, which
  ``torch.profiler`` refuses. Fixed upstream in 0.3.0.
* ``tools/profiling.py:107,134``: memory snapshots are asked of ``torch.cuda.memory``. Fixed upstream in 0.2.2.
* ``config/manager.py:47``, ``parse_args``: its default ``sys.argv[1:]`` is taken when the module is imported, so
  ranks forked from a process that imported it would read that process's arguments.
* ``distributed/activation_checkpoint.py:112``, per-operator selective checkpointing: PyTorch 2.13 refuses a region that
  opens more of the profiler's spans when it is recomputed than it did before. FSDP2 does in a pipeline with expert
  parallelism, on any device: a span for each all-gather. Spans are left out of the comparison.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Dense bfloat16 FLOP/s of one device, i.e. of one logical NeuronCore (two physical cores on Trainium 2 and 3), by the
# device's name. The same figures stand in TorchTitan itself from 0.3.0 on (pytorch/torchtitan#2382, by AWS).
PEAK_FLOPS: dict[str, float] = {
    "trn1": 90e12,
    "trn1n": 90e12,
    "inf2": 90e12,
    "trn2": 158e12,
    "trn2n": 158e12,
    "trn2u": 158e12,
    "trn3": 158e12,
    "trn3u": 158e12,
}


def _cuda_is_used() -> bool:
    import torch

    return torch.cuda.is_available()


class _Overlay(ModuleType):
    """A module's view in which a few attributes are others; every other access reaches the module itself."""

    def __init__(self, base: ModuleType, **attributes: Any) -> None:
        super().__init__(base.__name__)
        self.__dict__["_base"] = base
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


def _correct_peak_flops(utils: Any) -> None:
    """``tools/utils.py``: the peak of this device, by its name."""
    upstream = utils.get_peak_flops

    def get_peak_flops(device_name: str) -> float:
        from trn_dist import neuron

        if utils.device_type != "neuron":
            return upstream(device_name)
        name = neuron.get_device_properties().name
        if name not in PEAK_FLOPS:
            raise ValueError(f"peak FLOP/s are not known for the device {name!r}; known: {', '.join(PEAK_FLOPS)}")
        return PEAK_FLOPS[name]

    utils.get_peak_flops = get_peak_flops


def _correct_profiling(profiling: Any) -> None:
    """``tools/profiling.py``: its global ``torch`` becomes a view with our profiler activity and memory."""
    import torch

    def profile(*args: Any, activities: Sequence[Any] | None = None, **kwargs: Any) -> Any:
        if activities is not None:
            own = torch.profiler.ProfilerActivity.PrivateUse1
            activities = [own if activity is None else activity for activity in activities]
        return torch.profiler.profile(*args, activities=activities, **kwargs)

    class _Memory(ModuleType):
        def __getattr__(self, name: str) -> Any:
            from trn_dist import neuron

            return getattr(neuron.memory, name)

    profiling.torch = _Overlay(
        torch,
        profiler=_Overlay(torch.profiler, profile=profile),
        cuda=_Overlay(torch.cuda, memory=_Memory("torch.neuron.memory")),
    )


def _correct_arguments(manager: Any) -> None:
    """``config/manager.py``: the arguments of the process that calls, not of the one that imported."""
    upstream = manager.ConfigManager.parse_args

    def parse_args(self: Any, args: list[str] | None = None) -> Any:
        return upstream(self, sys.argv[1:] if args is None else args)

    manager.ConfigManager.parse_args = parse_args


def _correct_activation_checkpoint(module: Any) -> None:
    """``distributed/activation_checkpoint.py``: what its policy decides on are operators, not the profiler's spans."""
    import torch
    import torch.utils.checkpoint

    spans = torch.ops.profiler
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(
        {
            spans._record_function_enter.default,
            spans._record_function_enter_new.default,
            spans._record_function_exit.default,
            spans._record_function_exit._RecordFunction,
        }
    )


_CORRECTIONS: dict[str, Callable[[Any], None]] = {
    "torchtitan.config.manager": _correct_arguments,
    "torchtitan.distributed.activation_checkpoint": _correct_activation_checkpoint,
    "torchtitan.tools.utils": _correct_peak_flops,
    "torchtitan.tools.profiling": _correct_profiling,
}
_REPLACEMENTS: dict[str, str] = {
    "torchtitan.models.moe.kernels": "trn_dist.titan.expert_permutation",
}


class _CorrectingLoader(importlib.abc.Loader):
    def __init__(self, upstream: importlib.abc.Loader, correct: Callable[[Any], None]) -> None:
        self.upstream = upstream
        self.correct = correct

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.upstream.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.upstream.exec_module(module)
        self.correct(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.upstream, name)


class TorchTitanFinder(importlib.abc.MetaPathFinder):
    """Finds the few TorchTitan modules named above and hands them out corrected."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torchtitan."):
            return None
        if fullname not in _REPLACEMENTS and fullname not in _CORRECTIONS:
            return None
        if _cuda_is_used():
            return None
        if fullname in _REPLACEMENTS:
            own = importlib.util.find_spec(_REPLACEMENTS[fullname])
            assert own is not None and own.origin is not None
            return importlib.util.spec_from_file_location(fullname, own.origin)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _CorrectingLoader(spec.loader, _CORRECTIONS[fullname])
        return spec


def install_import_hook() -> None:
    """Makes TorchTitan come out corrected whenever it is imported later. Idempotent, and imports nothing.

    Raises:
        RuntimeError: TorchTitan was imported before this device was loaded, so it would run uncorrected.
    """
    if any(isinstance(finder, TorchTitanFinder) for finder in sys.meta_path):
        return
    too_late = sorted({*_CORRECTIONS, *_REPLACEMENTS} & sys.modules.keys())
    if too_late:
        raise RuntimeError(f"{too_late[0]} was imported before the device neuron was loaded; import torch first")
    sys.meta_path.insert(0, TorchTitanFinder())
