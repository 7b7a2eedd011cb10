"""Checks that replicas hold the same bits: data-parallel ranks that have drifted apart train on without a word.

Seen from a program as ``torch.neuron.check_replicas``. With TRN_CHECK_REPLICAS=N every optimizer is checked after each
N of its steps, whatever the program; every rank must then take the same steps.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist


class ReplicaDivergenceError(RuntimeError):
    """A parameter differs between ranks that should hold the same."""


def check_replicas(
    parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup | None = None
) -> None:
    """Compares, by a hash of their bytes, the tensors that the ranks of ``group`` should hold alike.

    Collective: every rank must call it with as many tensors, in the same order. DTensors are compared along the
    dimensions of their mesh on which they are replicated; other tensors over ``group``.

    Args:
        parameters: a module, whose parameters and buffers are compared, or pairs of a name and a tensor.
        group: of the tensors that are no DTensors; None is the whole job.

    Raises:
        ReplicaDivergenceError: names the first tensor that differs, and the ranks (of the job) where it does.
    """
    if isinstance(parameters, torch.nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    else:
        named = list(parameters)
    hashes: dict[dist.ProcessGroup, list[int]] = {}
    names: dict[dist.ProcessGroup, list[str]] = {}
    for name, tensor in named:
        local, groups = _replicas(tensor, group)
        value = content_hash(local) if groups else 0
        for replicas in groups:
            hashes.setdefault(replicas, []).append(value)
            names.setdefault(replicas, []).append(name)
    for replicas, values in hashes.items():
        _compare(replicas, names[replicas], values)


def _replicas(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[dist.ProcessGroup]]:
    """What this rank holds of a tensor, and the groups whose ranks hold the same."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor, [group or dist.group.WORLD]  # type: ignore[list-item]
    mesh = tensor.device_mesh
    along = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return tensor.to_local(), [mesh.get_group(dim) for dim in along if mesh.size(dim) > 1]


def content_hash(tensor: torch.Tensor) -> int:
    """A 64-bit hash of a tensor's bytes, of any dtype, in the order of its elements."""
    data = tensor.detach().to("cpu").contiguous().view(-1)
    content = data.view(torch.uint8).numpy().data if data.numel() else b""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def most_and_others(values: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Ranks that have the value that most have, and the other ranks."""
    common = Counter(values.values()).most_common(1)[0][0]
    most = [rank for rank, value in values.items() if value == common]
    return most, [rank for rank in values if rank not in most]


def _compare(group: dist.ProcessGroup, names: list[str], values: list[int]) -> None:
    own = torch.tensor(values, dtype=torch.int64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    table = torch.stack(everyone)
    different = (table != table[0]).any(dim=0).nonzero()
    if len(different) == 0:
        return
    first = int(different[0])
    column = table[:, first].tolist()
    ranks = dist.get_process_group_ranks(group)
    most, odd = most_and_others(dict(zip(ranks, column, strict=True)))
    said = "has" if len(odd) == 1 else "have"
    raise ReplicaDivergenceError(
        f"replicas have diverged: {names[first]} is the first of {len(different)} tensors that differ; "
        f"{'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd))} {said} other bits than "
        f"{len(most)} of the {len(ranks)} ranks of its group"
    )


def install() -> None:
    """Has every optimizer checked after each TRN_CHECK_REPLICAS of its steps, if that is set.

    Raises:
        ValueError: the variable is no number of steps.
    """
    text = os.environ.get("TRN_CHECK_REPLICAS", "").strip()
    if not text or text == "0":
        return
    if not text.isdigit():
        raise ValueError(f"TRN_CHECK_REPLICAS={text!r}: must be a number of steps, or 0 for never")
    interval = int(text)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: dict[int, int] = {}

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not dist.is_initialized():
            return
        count = steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if count % interval == 0:
            check_replicas(_named_parameters(optimizer))

    register_optimizer_step_post_hook(after_step)


def _named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Its parameters, with the names that the module has for them which holds them all."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names: dict[int, str] = {}
    wanted = {id(parameter) for parameter in parameters}
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module):  # isinstance would ask proxies for what they stand for
            found = {id(parameter): name for name, parameter in module.named_parameters() if id(parameter) in wanted}
            if len(found) > len(names):
                names = found
    return [(names.get(id(parameter), f"parameter {i}"), parameter) for i, parameter in enumerate(parameters)]
