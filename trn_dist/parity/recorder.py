"""Writes what passes through a model in chosen steps: inputs, outputs and gradients of every module, the parameters as
they were used, gradients before and after clipping, parameters and optimizer state after the update.

Each rank writes its own local tensors and where they lie in the whole; no collective is used, for the collectives may
be what is wrong. :mod:`trn_dist.parity.assemble` puts them together. Imports torch only. In TorchTitan's trainer it is
installed by :mod:`trn_dist.titan.observe`; a program with a trainer of its own makes a :class:`Recorder` itself.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

STEPS = "TRN_PARITY_RECORD_STEPS"
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")


def step_folder(folder: Path, step: int) -> Path:
    return folder / "records" / f"step-{step:06d}"


def plain_name(name: str) -> str:
    """A module's or parameter's name without what wrappers add to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Recorder:
    """Records the given steps of a training; see the top of this file.

    A record is a dict: ``stage`` (when: "start", "forward", "backward", "gradient", "clipped", "update", "state"),
    ``name`` (module or parameter), ``what`` ("input 0", "output", "weight", ...), ``call`` (microbatch, from 0 on),
    ``tensor`` (this rank's part, on the CPU); for DTensors also ``shape`` (of the whole) and ``offset`` (of the part),
    and ``partial`` (True if the ranks' parts are addends).

    Args:
        model_parts: this rank's modules, in the order of the pipeline's stages.
        optimizers: their optimizers; a step of the last one ends a training step.
        coordinates: position and size of this rank in each dimension ``pp``, ``dp``, ``cp``, ``tp``; missing ones are
            (0, 1).
        folder: where ``records/step-NNNNNN/rank-NNNNN.pt`` are written.
        steps: which steps, counted from 1.
        rank: this rank.
    """

    def __init__(
        self,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        coordinates: Mapping[str, tuple[int, int]],
        folder: Path,
        steps: Iterable[int],
        rank: int,
    ) -> None:
        self.model_parts = list(model_parts)
        self.optimizers = list(optimizers)
        self.coordinates = {name: coordinates.get(name, (0, 1)) for name in ("pp", "dp", "cp", "tp")}
        self.folder = folder
        self.steps = frozenset(steps)
        self.rank = rank
        self.step = 1
        self.records: list[dict[str, Any]] = []
        self._calls: dict[str, int] = {}
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._updated = 0
        self._started = False
        self._trial = False
        for number, part in enumerate(self.model_parts):
            for name, module in part.named_modules():
                self._watch(self._module_name(name, number), module)
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._after_update)

    def _module_name(self, name: str, part: int) -> str:
        """Tells the roots of pipeline stages apart: the model's are the first one's input and the last one's output."""
        if name:
            return plain_name(name)
        (stage, stages), parts = self.coordinates["pp"], len(self.model_parts)
        if stages * parts == 1:
            return "model"
        first, last = stage == 0 and part == 0, stage == stages - 1 and part == parts - 1
        return "model (first stage)" if first else "model (last stage)" if last else f"stage {stage}.{part}"

    @property
    def recording(self) -> bool:
        # A forward inside a backward is a recomputation of checkpointed activations, recorded before; one without
        # gradients is a validation.
        in_backward = torch._C._current_graph_task_id() != -1
        return self.step in self.steps and torch.is_grad_enabled() and not in_backward and not self._trial

    def _watch(self, name: str, module: torch.nn.Module) -> None:
        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if module in self.model_parts:
                self._trial = _is_trial()
            if not self.recording:
                return
            if not self._started:
                self._started = True
                self._record_parameters("start")
            call = self._calls[name] = self._calls.get(name, -1) + 1
            if call == 0:
                for own, parameter in module.named_parameters(recurse=False):
                    self._add("forward", name, f"{own} as used", 0, parameter)
            for key, value in [*enumerate(args), *kwargs.items()]:
                if isinstance(value, torch.Tensor) and not self._is_known(value):
                    self._add("forward", name, f"input {key}", call, value)

        def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self.recording:
                return
            call = self._calls[name]
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            for number, value in enumerate(outputs):
                if not isinstance(value, torch.Tensor):
                    continue
                what = "output" if len(outputs) == 1 else f"output {number}"
                self._add("forward", name, what, call, value)
                self._seen[id(value)] = weakref.ref(value)
                if value.requires_grad:
                    value.register_hook(lambda grad, what=what: self._add("backward", name, what, call, grad))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was recorded as another module's output."""
        seen = self._seen.get(id(tensor))
        return seen is not None and seen() is tensor

    def _add(self, stage: str, name: str, what: str, call: int, tensor: torch.Tensor) -> None:
        record: dict[str, Any] = {"stage": stage, "name": name, "what": what, "call": call}
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

                shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
                _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
                record["shape"], record["offset"] = tuple(shape), tuple(offset)
                record["partial"] = any(placement.is_partial() for placement in placements)
                tensor = tensor.to_local()
                if hasattr(tensor, "wait"):  # an AsyncCollectiveTensor
                    tensor = tensor.wait()
            record["tensor"] = tensor.detach().to("cpu", copy=True)
        self.records.append(record)

    def _named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                yield plain_name(name), parameter

    def _record_parameters(self, stage: str) -> None:
        for name, parameter in self._named_parameters():
            self._add(stage, name, "parameter", 0, parameter)

    def _record_gradients(self, stage: str) -> None:
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                self._add(stage, name, "gradient", 0, parameter.grad)

    def before_clipping(self, parameters: Any = None) -> None:
        """To be called when the gradients of a step are complete."""
        if self.step in self.steps:
            self._record_gradients("gradient")

    def after_clipping(self, parameters: Any = None, norm: torch.Tensor | None = None) -> None:
        """To be called after clipping, if the program clips; ``norm`` is the global norm before it."""
        if self.step in self.steps:
            if norm is not None:
                self._add("clipped", "all parameters", "gradient norm", 0, norm)
            self._record_gradients("clipped")

    def _after_update(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._updated += 1
        if self._updated < len(self.optimizers):
            return
        self._updated = 0
        if self.step in self.steps:
            self._record_update()
            self._write()
        self.step += 1
        self.records, self._calls, self._seen, self._started = [], {}, {}, False

    def _record_update(self) -> None:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = torch.as_tensor(group["lr"], dtype=torch.float64)
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    name = names[id(parameter)]
                    self._add("update", name, "learning rate", 0, rate)
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            self._add("update", name, f"optimizer state {key}", 0, value)
                    self._add("update", name, "parameter", 0, parameter)

    def _write(self) -> None:
        folder = step_folder(self.folder, self.step)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank-{self.rank:05d}.pt"
        part = file.with_suffix(".part")
        torch.save({"coordinates": self.coordinates, "records": self.records}, part)
        part.replace(file)


def _is_trial() -> bool:
    """Whether a pipeline stage runs its module only to find out shapes, which it does before the first microbatch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_forward_metadata_inference":
            return True
        frame = frame.f_back
    return False


def titan_coordinates(parallel_dims: Any, rank: int) -> dict[str, tuple[int, int]]:
    """A rank's place in TorchTitan's mesh, whose dimensions are pp, batch, cp, tp from the slowest to the fastest."""
    batch = parallel_dims.dp_replicate * parallel_dims.dp_shard
    coordinates = {}
    for name, size in (("tp", parallel_dims.tp), ("cp", parallel_dims.cp), ("dp", batch), ("pp", parallel_dims.pp)):
        rank, coordinates[name] = rank // size, (rank % size, size)
    return coordinates


def observe(model_parts: list[torch.nn.Module], optimizers: Any, parallel_dims: Any) -> Recorder:
    """Records the steps in the environment, for :mod:`trn_dist.titan.observe`."""
    rank = torch.distributed.get_rank()
    steps = [int(step) for step in os.environ[STEPS].split(",")]
    return Recorder(
        model_parts,
        optimizers.optimizers,
        titan_coordinates(parallel_dims, rank),
        Path(os.environ["TRN_OBSERVER_FOLDER"]),
        steps,
        rank,
    )


def observe_perturbed(model_parts: list[torch.nn.Module], optimizers: Any, parallel_dims: Any) -> Recorder:
    """The same with every module's output and gradient moved by rounding units."""
    from trn_dist.parity import perturbation

    perturbation.observe(model_parts, optimizers, parallel_dims)
    return observe(model_parts, optimizers, parallel_dims)
