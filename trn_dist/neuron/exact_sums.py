"""Sums that do not depend on how their addends are split over ranks, microbatches and shards.

``torch.neuron.distributed.set_exact_sums(True)``, or ``TRN_EXACT_SUMS=1`` in the environment of every rank, switches on

* the process group's sums (SUM, AVG, PREMUL_SUM of float32 and float64): the exact sum, rounded once;
* the global gradient norm (``torch.nn.utils.get_total_norm``, ``clip_grad_norm_``) of float32 gradients and norm 2,
  plain or DTensors: exact sum of squares over all parameters and shards, rounded once.

Neither is enough for gradients that are accumulated: autograd rounds after each microbatch. With
:func:`accumulate_exactly` a model keeps, beside each ``.grad``, what rounding took away, and its reduction over the
data-parallel ranks adds all of it and rounds once. Deferring the reduction to the last microbatch is PyTorch's own
``no_sync`` (DDP) or ``set_requires_gradient_sync(False)`` (FSDP2). Then one rank with eight microbatches, two with
four, four with two and eight with one have the same gradients to the last bit, if the loss is scaled by powers of
two.

Exact sums are for comparing; what the modelled chip would take for them is not charged. See [Note: Exact sums] in
csrc/fabric/ExactSum.h for how.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

VARIABLE = "TRN_EXACT_SUMS"


def set_exact_sums(enabled: bool) -> None:
    """Switches exact sums of the process group and of the gradient norm on or off in this process.

    All ranks of a group must agree: a reduction that only some of them ask to be exact is refused.
    """
    if enabled:
        _install_norm()
    torch.ops.trn_dist.set_exact_sums(enabled)


def exact_sums() -> bool:
    """Whether exact sums are on in this process."""
    return torch.ops.trn_dist.exact_sums()


def set_from_environment() -> None:
    """Takes ``TRN_EXACT_SUMS`` of the environment: 1 is on, 0, empty or missing off.

    Raises:
        ValueError: it is something else.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value}: expected 1 (exact sums on) or 0")
    if value == "1":
        set_exact_sums(True)


# --- Accumulated gradients


class _ExactGradient:
    """The exact value of a leaf's ``.grad``: parts whose sum it is, of which ``.grad`` shows the rounded one.

    Follows what others do to ``.grad``: where it was set to None, to zeros or to anything else since the last backward
    pass, that is where the sum begins.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parts: list[torch.Tensor] = []
        self._shown: weakref.ref[torch.Tensor] | None = None  # what .grad was when it was last written
        self._version = -1
        parameter.register_hook(functools.partial(self._before_accumulation, parameter))
        parameter.register_post_accumulate_grad_hook(self._after_accumulation)

    @torch.no_grad()
    def _before_accumulation(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        _check_float32(gradient)
        _finish(gradient)
        shown = parameter.grad
        if shown is None:
            self.parts = []
        elif not self._is_shown(shown) or shown._version != self._version:
            _check_float32(shown)
            self.parts = []
            self._add(shown)
        self._add(gradient)

    def clear(self) -> None:
        """Forgets the sum: its parts went into a reduction."""
        self.parts = []
        self._shown = None

    def _is_shown(self, gradient: torch.Tensor) -> bool:
        return self._shown is not None and self._shown() is gradient

    def _add(self, addend: torch.Tensor) -> None:
        rest = torch.ops.trn_dist.exact_add(self.parts, addend.contiguous())
        if rest.numel():
            self.parts.append(rest)
        elif not self.parts:
            self.parts.append(torch.zeros(addend.numel(), dtype=torch.float64))

    @torch.no_grad()
    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if len(self.parts) > 1 or self._is_shown(gradient):  # else it holds the one addend
            rounded = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            torch.ops.trn_dist.exact_round(rounded, self.parts, 1.0)
            gradient.copy_(rounded)
        self._shown, self._version = weakref.ref(gradient), gradient._version


def _check_float32(tensor: torch.Tensor) -> None:
    if type(tensor) is not torch.Tensor or tensor.dtype != torch.float32:
        raise TypeError(
            f"exact sums take float32 gradients of data-parallel layouts, got {type(tensor).__name__} of {tensor.dtype}"
        )


def accumulate_exactly(model: torch.nn.Module) -> None:
    """Makes a model's accumulated and reduced gradients exact sums, each rounded once; see the top of this file.

    Call it once, when the model is on its device and wrapped: a plain module, ``DistributedDataParallel``, PyTorch's
    ``replicate``, or FSDP2 (``fully_shard`` on a mesh of one dimension). Gradients are float32. Registers DDP's
    communication hook or FSDP2's custom reduce-scatter, so a program that has its own cannot use this.

    Raises:
        ValueError: the model is sharded in a way that rounds in between (HSDP, another dimension than the first).
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded:
        for module in sharded:
            _accumulate_fsdp(module)
        return
    gradients = {p: _ExactGradient(p) for p in model.parameters() if p.requires_grad}
    if not hasattr(model, "register_comm_hook"):
        return  # neither DDP nor replicate: one rank
    ddp: Callable[[], Any] = lambda: model  # noqa: E731
    if not isinstance(model, DistributedDataParallel):
        from torch.distributed._composable.replicate import replicate

        state: Any = replicate.state(model)  # type: ignore[attr-defined]
        ddp = lambda: state._ddp  # noqa: E731  # made in the first forward

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at the annotations, which are text here
        return _reduce_bucket(gradients, ddp().process_group, bucket)

    model.register_comm_hook(None, hook)  # type: ignore[operator]


def _finish(tensor: torch.Tensor) -> None:
    """Carries out collectives that are still to write to a tensor: exact sums read its memory as it is."""
    if tensor.device.type == "neuron":
        torch.neuron.synchronize()  # type: ignore[attr-defined]


def _reduce_scatter(group: Any, parts: list[torch.Tensor], divisor: float, out: torch.Tensor) -> None:
    """Sums all ranks' parts, float64 of shape (ranks, n) each, and writes row ``rank`` of the sum to ``out``."""
    size = torch.distributed.get_world_size(group)
    count = torch.tensor(len(parts), device=out.device)
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX, group)
    mine = torch.zeros(size, int(count), out.numel(), dtype=torch.float64, device=out.device)
    for number, part in enumerate(parts):
        mine[:, number] = part
    theirs = torch.empty_like(mine)
    torch.distributed.all_to_all_single(theirs, mine, group=group)
    _finish(theirs)
    torch.ops.trn_dist.exact_round(out, list(theirs.flatten(0, 1).unbind()), divisor)


def _reduce_bucket(
    gradients: dict[torch.Tensor, _ExactGradient], group: Any, bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the average over ranks of all that was accumulated."""
    size = torch.distributed.get_world_size(group)
    buffer = bucket.buffer()
    chunk = -(-buffer.numel() // size)
    owners = [gradients[parameter] for parameter in bucket.parameters()]
    views = bucket.gradients()
    if not all(view.is_contiguous() for view in views):
        raise ValueError("exact sums: a parameter is not contiguous; DDP keeps its gradient in another order")
    flat = []
    for number in range(max(len(owner.parts) for owner in owners)):
        part = torch.zeros(size * chunk, dtype=torch.float64)
        for owner, view in zip(owners, views, strict=True):
            if number < len(owner.parts):
                begin = view.storage_offset() - buffer.storage_offset()
                part[begin : begin + view.numel()] = owner.parts[number]
        flat.append(part.view(size, chunk))
    mine = torch.empty(chunk, device=buffer.device)
    _reduce_scatter(group, flat, size, mine)
    whole = torch.empty(size * chunk, device=buffer.device)
    torch.distributed.all_gather_into_tensor(whole, mine, group)
    for owner in owners:
        owner.clear()
    devices = [buffer.device] if buffer.device.type != "cpu" else []
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    done.set_result(whole[: buffer.numel()])
    return done


class _ExactReduceScatter:
    """FSDP2's custom reduce-scatter of one group of parameters: sums what its gradients hold beside what they show."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.gradients: dict[int, _ExactGradient] = {}

    def watch(self, *_: Any) -> None:
        """Before the group's forward, when its unsharded parameters are there."""
        for parameter in self.group.fsdp_params:
            whole = parameter._unsharded_param
            if whole.requires_grad and id(whole) not in self.gradients:
                self.gradients[id(whole)] = _ExactGradient(whole)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        size = torch.distributed.get_world_size(group)
        owners = [self.gradients[id(p._unsharded_param)] for p in self.group.fsdp_params]
        shapes = [p._unsharded_param.shape for p in self.group.fsdp_params]
        used = [(owner, shape) for owner, shape in zip(owners, shapes, strict=True) if owner.parts]
        flat = []
        for number in range(max(len(owner.parts) for owner, _ in used)):
            parts = [
                (owner.parts[number] if number < len(owner.parts) else torch.zeros_like(owner.parts[0])).view(shape)
                for owner, shape in used
            ]
            part = torch.empty(size, output_tensor.numel(), dtype=torch.float64)
            torch.ops.fsdp.chunk_cat(parts, dim=0, num_chunks=size, out=part)
            flat.append(part)
        _reduce_scatter(group, flat, _divisor(op, size), output_tensor)
        for owner in owners:
            owner.clear()


def _divisor(op: Any, size: int) -> float:
    """What FSDP2's reduction divides the sum by."""
    if op == torch.distributed.ReduceOp.AVG:
        return float(size)
    if op == torch.distributed.ReduceOp.SUM:
        return 1.0
    return 1.0 / float(op.__getstate__()[1])  # PREMUL_SUM and its factor


def _accumulate_fsdp(module: Any) -> None:
    # The one place that looks behind FSDP2's interface: which parameters a reduce-scatter is of, and in which order.
    for group in module._get_fsdp_state()._fsdp_param_groups:
        if isinstance(group._reduce_scatter_comm, _ExactReduceScatter):
            continue  # modules that were sharded together
        if group.mesh_info.mesh.ndim > 1:
            raise ValueError(
                "exact sums: FSDP2 on a mesh of two dimensions (HSDP) rounds between its two reductions; shard over "
                "one dimension, or replicate with DDP"
            )
        for parameter in group.fsdp_params:
            if parameter.fsdp_placement.dim != 0:
                raise ValueError(
                    f"exact sums: a parameter is sharded along dimension {parameter.fsdp_placement.dim}; "
                    "expected 0, as fully_shard does by itself"
                )
        reduce_scatter = _ExactReduceScatter(group)
        module.set_custom_reduce_scatter(reduce_scatter)
        for member in group.modules:
            member.register_forward_pre_hook(reduce_scatter.watch)


# --- The global norm


def exact_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm of float32 tensors taken together: exact sum of squares, one rounding.

    DTensors are summed over the ranks that shard them, so the call is collective over those. Returns a float32 scalar
    on the device of the first tensor.
    """
    from torch.distributed.tensor import DTensor

    tensors = list(tensors)
    sums: dict[Any, torch.Tensor] = {}
    count = torch.ops.trn_dist.square_words()
    for tensor in tensors:
        groups: tuple[Any, ...] = ()
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                tensor = tensor.redistribute(
                    placements=[
                        torch.distributed.tensor.Replicate() if p.is_partial() else p for p in tensor.placements
                    ]
                )
            groups = tuple(
                tensor.device_mesh.get_group(dim) for dim, p in enumerate(tensor.placements) if not p.is_replicate()
            )
            tensor = tensor.to_local()
        _finish(tensor)
        words = sums.setdefault(groups, torch.zeros(count, dtype=torch.int64))
        torch.ops.trn_dist.add_squares(words, tensor.contiguous())
    total = [0] * count
    for groups, words in sums.items():
        if groups:
            words = words.to(tensors[0].device)
        for group in groups:
            torch.distributed.all_reduce(words, group=group)
        total = [a + b for a, b in zip(total, words.tolist(), strict=True)]
    *limbs, infinities, nans = total
    if nans or infinities:
        norm = math.nan if nans else math.inf
    else:
        norm = _root(sum(limb << 32 * place for place, limb in enumerate(limbs)))
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.tensor(norm, dtype=torch.float64).float().to(device)


def _root(squares: int) -> float:
    """The root of a number of units of 2^-298, rounded to odd at 50 bits: to be rounded once more, to float32."""
    if squares == 0:
        return 0.0
    shift = max(0, 104 - squares.bit_length())
    shift += shift % 2
    root = math.isqrt(squares << shift)
    inexact = root * root != squares << shift
    drop = root.bit_length() - 50
    inexact |= root & ((1 << drop) - 1) != 0
    return math.ldexp((root >> drop) | inexact, drop - shift // 2 - 149)


@functools.cache
def _install_norm() -> None:
    """Lets PyTorch's total norm be exact while exact sums are on."""
    from torch.nn.utils import clip_grad

    original = clip_grad._get_total_norm

    @functools.wraps(original)
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not exact_sums() or norm_type != 2.0 or any(tensor.dtype != torch.float32 for tensor in tensors):
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        with torch.no_grad():
            norm = exact_norm(tensors)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise RuntimeError(f"the total norm of the gradients is {norm.item()}, so they cannot be clipped")
        return norm

    clip_grad._get_total_norm = get_total_norm
    torch.nn.utils.get_total_norm = get_total_norm
