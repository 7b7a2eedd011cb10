"""What PyTorch 2.13 forgets about a PrivateUse1 device that was renamed, corrected when the backend is loaded.

Each function names the place in PyTorch and what is wrong there. Called by :mod:`trn_dist.neuron.autoload`; nothing
that ``import torch`` leaves out is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from trn_dist.neuron.triton import refuse_neuron_tensors
from trn_dist.timing.virtual_world import timing_only


def correct_dlpack_device() -> None:
    """``Tensor.__dlpack_device__`` compares the device's type with ``"privateuse1"``, which no renamed device is."""
    original = torch.Tensor.__dlpack_device__

    @functools.wraps(original)
    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if type(self) is torch.Tensor and self.device.type == "neuron":
            from torch.utils.dlpack import DLDeviceType

            return DLDeviceType.kDLExtDev, self.device.index
        return original(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]


def _correct_flex_attention(module: ModuleType) -> None:
    """``_validate_device`` has a closed list of devices. On neuron flex attention runs its dense form, both ways."""
    original = module._validate_device

    @functools.wraps(original)
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "neuron":
            original(query, key, value)

    module._validate_device = _validate_device  # type: ignore[attr-defined]


def _correct_gather_gradients(module: ModuleType) -> None:
    """The gradient of a gather is a reduce-scatter for NCCL by name; other backends add in another order, or refuse."""
    dist = torch.distributed
    gather, gather_base = module._AllGather, module._AllGatherBase
    of_gather, of_gather_base = gather.backward, gather_base.backward

    def gather_backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        if dist.get_backend(ctx.group) != "neuron":
            return of_gather(ctx, *grad_outputs)
        output = torch.empty_like(grad_outputs[dist.get_rank(ctx.group)])
        return None, module._Reduce_Scatter.apply(dist.ReduceOp.SUM, ctx.group, output, *grad_outputs)

    def gather_base_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        if dist.get_backend(ctx.group) != "neuron":
            return of_gather_base(ctx, grad_output)
        rows = grad_output.size(0) // dist.get_world_size(ctx.group)
        output = grad_output.new_empty(rows, *grad_output.shape[1:])
        dist.reduce_scatter_tensor(output, grad_output.contiguous(), group=ctx.group)
        return None, output, None

    gather.backward = staticmethod(gather_backward)
    gather_base.backward = staticmethod(gather_base_backward)


def _serve_symmetric_memory(module: ModuleType) -> None:
    """Its operators are registered for CUDA alone, and its workspace lies on device ``cuda`` by name."""
    from trn_dist.neuron.symmetric_memory import register

    register(module)


def _correct_draws_of_offloaded_parameters(module: ModuleType) -> None:
    """``OffsetBasedRNGTracker._distribute_region`` places the device's generator where a shard's numbers begin, and
    restores the CPU's afterwards. A parameter that FSDP keeps in CPU memory draws from the latter: the same numbers
    for every shard and every parameter, and ``trunc_normal_``, which draws until all are within bounds, never ends.
    Here the CPU's generator is seeded with the place of the device's.
    """
    tracker = module.OffsetBasedRNGTracker
    original = tracker._distribute_region

    @contextlib.contextmanager
    def _distribute_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        with original(self, spec, generator):
            if self._device.type == "neuron" and self.distribute_region_enabled:
                place = self._device_handle.get_rng_state().numpy().tobytes()
                seed = int.from_bytes(hashlib.sha256(place).digest()[:8], "little", signed=True)
                torch.default_generator.manual_seed(seed)
            yield

    tracker._distribute_region = _distribute_region


def _be_found_by_accelerate(module: ModuleType) -> None:
    """Hugging Face's ``accelerate`` knows neuron (1.12 on), but looks for the name of AWS's package, ``torch_neuronx``,
    before it asks the device.
    """
    if hasattr(module, "is_neuron_available"):
        module.is_neuron_available = lambda check_device=False: torch.neuron.is_available()  # type: ignore[attr-defined]


def _give_each_rank_of_accelerate_its_core(module: ModuleType) -> None:
    """``PartialState.set_device`` takes the current device of neuron for a rank's own and never sets it, and
    ``Accelerator.prepare`` then gives DDP the local rank: on a chip a process sees its own core alone.
    """
    original = module.PartialState.set_device

    @functools.wraps(original)
    def set_device(self: Any) -> None:
        if self.device is None and getattr(self.distributed_type, "value", "") == "MULTI_NEURON":
            torch.neuron.set_device(self.local_process_index)  # type: ignore[attr-defined]
        original(self)

    module.PartialState.set_device = set_device


def _load_safetensors_on_neuron(module: ModuleType) -> None:
    """safetensors has a closed list of devices by name; a number is an index of the accelerator, whatever it is."""
    from trn_dist.neuron.device import device_index

    original = module.load_file

    @functools.wraps(original)
    def load_file(filename: Any, device: Any = "cpu", *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        if str(device).split(":")[0] == "neuron":
            device = device_index(device)
        return original(filename, device, *args, **kwargs)

    module.load_file = load_file  # type: ignore[attr-defined]


def _be_known_to_dynamo(module: ModuleType) -> None:
    """``get_interface_for_device`` has the functions of a closed list of devices."""
    functions = {
        name: staticmethod(getattr(torch.neuron, name))  # type: ignore[attr-defined]
        for name in vars(module.DeviceInterface)
        if not name.startswith("_") and hasattr(torch.neuron, name)  # type: ignore[attr-defined]
    }
    module.register_interface_for_device("neuron", type("NeuronInterface", (module.DeviceInterface,), functions))


# Modules that ``import torch`` leaves out, with what corrects them.
_LATE: dict[str, Callable[[ModuleType], None]] = {
    "torch._dynamo.device_interface": _be_known_to_dynamo,
    "torch.nn.attention.flex_attention": _correct_flex_attention,
    "torch.distributed.nn.functional": _correct_gather_gradients,
    "torch.distributed._symmetric_memory": _serve_symmetric_memory,
    "torch.distributed.tensor._random": _correct_draws_of_offloaded_parameters,
    "triton.runtime.jit": refuse_neuron_tensors,
    "accelerate.utils.imports": _be_found_by_accelerate,
    "accelerate.state": _give_each_rank_of_accelerate_its_core,
    "safetensors.torch": _load_safetensors_on_neuron,
}


class _LateFinder(importlib.abc.MetaPathFinder):
    """Corrects the modules of `_LATE` when they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _LATE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _LATE[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def correct_late_modules() -> None:
    """Corrects the modules of `_LATE` that were imported now, the others when they will be."""
    for name, correct in _LATE.items():
        if name in sys.modules:
            correct(sys.modules[name])
    sys.meta_path.insert(0, _LateFinder())


def correct_module_moves() -> None:
    """``Module._apply`` keeps a parameter's identity between ``cpu`` and ``cuda``, for TensorImpl has a closed list of
    devices whose tensors are of one kind. On any other device it makes new parameters: an optimizer made before trains
    what nobody uses, shared weights fall apart, attributes of parameters are lost. Here they are swapped in place.
    """
    module_class = torch.nn.Module
    to, cpu, neuron = module_class.to, module_class.cpu, module_class.neuron  # type: ignore[attr-defined]

    def moved(module: torch.nn.Module, device: torch.device | None, move: Callable[[], torch.nn.Module]) -> Any:
        if device is None:  # another dtype alone
            return move()
        kinds = {parameter.device.type for parameter in module.parameters()}
        if "neuron" not in kinds | {device.type} or not kinds - {device.type, "meta"}:
            return move()
        kept = [(parameter, type(parameter), dict(parameter.__dict__)) for parameter in module.parameters()]
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            result = move()
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            torch.__future__.set_swap_module_params_on_conversion(False)
            result = move()
            warnings.warn(
                f"{type(module).__name__} was moved to {device} while autograd or a wrapper held its parameters, so "
                "some are new ones: make optimizers and tie shared weights after the move",
                stacklevel=3,
            )
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        for parameter, kind, attributes in kept:
            if issubclass(kind, UninitializedTensorMixin):
                parameter.__class__ = kind  # type: ignore[assignment]
            parameter.__dict__.update(attributes)
        return result

    @functools.wraps(to)
    def to_any(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        return moved(self, device, lambda: to(self, *args, **kwargs))

    @functools.wraps(cpu)
    def to_cpu(self: torch.nn.Module) -> Any:
        return moved(self, torch.device("cpu"), lambda: cpu(self))

    @functools.wraps(neuron)
    def to_neuron(self: torch.nn.Module, device: Any = None) -> Any:
        return moved(self, torch.device("neuron"), lambda: neuron(self, device))

    module_class.to, module_class.cpu = to_any, to_cpu  # type: ignore[method-assign, assignment]
    module_class.neuron = to_neuron  # type: ignore[attr-defined]


def correct_bfloat16_hooks() -> None:
    """DDP lets hooks that compress to bfloat16, which it knows by name, pass for NCCL on CUDA 11 and XCCL alone."""
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp._check_comm_hook

    @functools.wraps(original)
    def _check_comm_hook(self: Any, hook: Any) -> None:
        if self.device_type == "neuron" and getattr(hook, "__name__", "").startswith("bf16_compress"):
            of_another_name = functools.wraps(hook)(lambda *arguments: hook(*arguments))
            of_another_name.__name__ = "compress"
            hook = of_another_name
        original(self, hook)

    ddp._check_comm_hook = _check_comm_hook  # type: ignore[method-assign]


def correct_grouped_query_gradients() -> None:
    """The shape function of efficient attention's backward (``torch/_meta_registrations.py:6574``) gives the gradients
    of keys and values the queries' number of heads; CUDA's kernel knows no grouped queries, the one on neuron does.
    DTensor and ``torch.compile`` take shapes from there.
    """
    import torch._meta_registrations as registrations

    name = "_scaled_dot_product_efficient_attention_backward"
    original = registrations.meta__scaled_dot_product_efficient_backward

    @functools.wraps(original)
    def shapes(
        grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        grad_query, grad_key, grad_value, grad_bias = original(grad_out, query, key, value, *args, **kwargs)
        if key.size(1) != query.size(1):
            grad_key, grad_value = (
                torch.empty_permuted(like.shape, (0, 2, 1, 3), dtype=like.dtype, device=like.device)
                for like in (key, value)
            )
        return grad_query, grad_key, grad_value, grad_bias

    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl(name, shapes, allow_override=True)
    _libraries.append(library)


# A library's registrations end with it.
_libraries: list[torch.library.Library] = []


def draw_truncated_once() -> None:
    """``torch.nn.init.trunc_normal_`` draws anew until no number lies outside. In timing mode, where nothing is drawn,
    the first draw counts.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    @functools.wraps(original)
    def _no_grad_trunc_normal_(tensor: torch.Tensor, mean: float, std: float, *bounds: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "neuron":
            return original(tensor, mean, std, *bounds, **kwargs)
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=kwargs.get("generator"))

    torch.nn.init._no_grad_trunc_normal_ = _no_grad_trunc_normal_


def correct_all() -> None:
    correct_dlpack_device()
    correct_late_modules()
    correct_bfloat16_hooks()
    correct_module_moves()
    correct_grouped_query_gradients()
    if timing_only():
        draw_truncated_once()
