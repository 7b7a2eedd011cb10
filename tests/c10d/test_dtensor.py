"""DTensor on the process group: redistribution between all placements, and each tensor-parallel style, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of

# Even, uneven, and with fewer rows than ranks.
SHAPES = ((8, 4), (5, 7), (3, 2))
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


def eighths(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Numbers whose sums and products are exact, so that no order of adding them can be told from another."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 8


def with_placements(
    mesh: DeviceMesh, device: torch.device, shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[DTensor, torch.Tensor]:
    """A DTensor as it comes out of a computation, and the whole tensor that it stands for."""
    partial = [dim for dim, placement in enumerate(placements) if isinstance(placement, Partial)]
    contributions = torch.stack(
        [eighths(shape, seed) for seed in range(torch.tensor([mesh.size(dim) for dim in partial]).prod().int())]
    )
    whole, mine = contributions[0], 0
    if partial:
        operation = placements[partial[0]]
        assert isinstance(operation, Partial)
        whole = REDUCTIONS[operation.reduce_op](contributions)
        for dim in partial:
            mine = mine * mesh.size(dim) + mesh.get_local_rank(dim)
    laid_out = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    local = distribute_tensor(contributions[mine].to(device), mesh, laid_out, src_data_rank=None).to_local()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride()), whole


def redistribute(rank: int, size: int, kind: str, mesh_shape: tuple[int, ...]) -> None:
    device = device_of(kind, rank)
    mesh = init_device_mesh(device.type, mesh_shape)
    placements: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial("sum")]
    if len(mesh_shape) == 1:
        placements += [Partial("avg"), Partial("max"), Partial("min")]
    # Nothing is redistributed to partial: DTensor does that by itself alone.
    targets = placements[:3]
    for source in itertools.product(placements, repeat=len(mesh_shape)):
        for target in itertools.product(targets, repeat=len(mesh_shape)):
            for shape in SHAPES if len(mesh_shape) == 1 else SHAPES[1:2]:
                tensor, whole = with_placements(mesh, device, shape, source)
                moved = tensor.redistribute(mesh, target)
                assert moved.placements == target
                check(moved.full_tensor(), whole, source, target, shape)
                expected = distribute_tensor(whole.to(device), mesh, target, src_data_rank=None)
                check(moved.to_local(), expected.to_local(), source, target, shape)


@pytest.mark.parametrize(("size", "kind", "mesh_shape"), [(4, "neuron", (4,)), (3, "cpu", (3,)), (4, "neuron", (2, 2))])
def test_redistribute(size: int, kind: str, mesh_shape: tuple[int, ...]) -> None:
    ranks.run(size, redistribute, kind, mesh_shape)


# ---- Tensor parallelism ----------------------------------------------------------------------------------------------


def exact(module: nn.Module, device: torch.device) -> nn.Module:
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(eighths(tuple(parameter.shape), seed))
    return module.to(device)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def compare(
    make: Callable[[], nn.Module],
    plan: ParallelStyle | dict[str, ParallelStyle],
    mesh: DeviceMesh,
    inputs: torch.Tensor,
    given: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    taken: Callable[[torch.Tensor], torch.Tensor] = whole,
    rounded: bool = False,
) -> None:
    """Output and gradients of the module with the plan and without it. `rounded`: gradients are sums of fractions."""
    one, many = exact(make(), inputs.device), exact(make(), inputs.device)
    parallelize_module(many, mesh, plan)
    expected, got = one(inputs), taken(many(given(inputs)))
    check(got.detach(), expected.detach(), plan)
    weights = eighths(tuple(expected.shape), 99).to(inputs.device)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, left), right in zip(many.named_parameters(), one.parameters(), strict=True):
        assert left.grad is not None and right.grad is not None
        if rounded:
            torch.testing.assert_close(whole(left.grad), right.grad)
        else:
            check(whole(left.grad), right.grad, plan, name)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def tensor_parallel_styles(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    mesh = init_device_mesh(device.type, (size,))
    inputs = eighths((4, 8, 6), 50).to(device)

    def sharded(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: tensor.chunk(size, dim)[rank]

    def joined(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: DTensor.from_local(tensor, mesh, [Shard(dim)]).full_tensor()

    compare(TwoLinears, {"up": ColwiseParallel(), "down": RowwiseParallel()}, mesh, inputs)
    compare(lambda: nn.Linear(6, 8), ColwiseParallel(output_layouts=Replicate()), mesh, inputs)
    compare(lambda: nn.Linear(6, 8), ColwiseParallel(use_local_output=False), mesh, inputs)
    compare(lambda: nn.Linear(6, 7), RowwiseParallel(input_layouts=Replicate()), mesh, inputs)
    # As sequence parallelism has it: in and out by the sequence.
    compare(
        TwoLinears,
        {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))},
        mesh,
        inputs,
        given=sharded(1),
        taken=joined(1),
    )
    for norm in (nn.LayerNorm, nn.RMSNorm):
        style = SequenceParallel(use_local_output=True)
        compare(lambda norm=norm: norm(6), style, mesh, inputs, sharded(1), joined(1), rounded=True)
    indices = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(1)).to(device)
    for embedding in (RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())):
        compare(lambda: nn.Embedding(16, 8), embedding, mesh, indices)
    compare(
        Doubled,
        {
            "inner": PrepareModuleInputOutput(
                input_layouts=Shard(0),
                desired_input_layouts=Replicate(),
                use_local_input=True,
                output_layouts=Replicate(),
                desired_output_layouts=Shard(0),
            )
        },
        mesh,
        inputs,
        given=sharded(0),
        taken=joined(0),
    )
    prepared = {
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        "down": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    }
    compare(TwoLinears, prepared, mesh, inputs, given=sharded(1), taken=joined(1))


def parallel_loss(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    mesh = init_device_mesh(device.type, (size,))
    targets = torch.randint(0, 18, (12,), generator=torch.Generator().manual_seed(2)).to(device)
    targets[3] = -100
    for reduction in ("mean", "sum"):
        logits = eighths((12, 18), 5).to(device).requires_grad_()
        spread = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
        expected = F.cross_entropy(logits, targets, reduction=reduction)
        expected.backward()
        with loss_parallel():
            loss = F.cross_entropy(spread, targets, reduction=reduction)
            loss.backward()
        torch.testing.assert_close(whole(loss), expected)
        assert isinstance(spread.grad, DTensor) and logits.grad is not None
        assert spread.grad.placements == (Shard(1),)
        torch.testing.assert_close(spread.grad.full_tensor(), logits.grad)
    dist.barrier()


@pytest.mark.parametrize(
    ("size", "kind"),
    [(2, "neuron"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, "neuron"), (2, "cpu")))],
)
@pytest.mark.parametrize("body", [tensor_parallel_styles, parallel_loss])
def test_tensor_parallelism(body: Callable[[int, int, str], None], size: int, kind: str) -> None:
    ranks.run(size, body, kind)
