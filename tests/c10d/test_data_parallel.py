"""DDP with each of its settings, communication hooks, uneven inputs, and what shards the optimizer alone."""

from __future__ import annotations

# What c10d returns is declared wider than it is.
# mypy: disable-error-code="union-attr, index, operator, assignment, attr-defined"
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of, tree
from tests.c10d.test_training import batch, make_model, reference, train


class Branches(nn.Module):
    """Uses one of its two branches, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return sum(branch(x) for name, branch in self.named_children() if name in which)


def branches(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Branches().to(device)


def averaged(make: Callable[[torch.device], nn.Module], loss: Callable[[nn.Module, int], torch.Tensor], size: int):
    """The gradients that DDP must have: divided by the number of ranks, then added along the tree."""
    gradients = []
    for rank in range(size):
        model = make(torch.device("cpu"))
        loss(model, rank).backward()
        gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    return [tree([each[i] / size for each in gradients], torch.add) for i in range(len(gradients[0]))]


def settings(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    for view, static, buckets in itertools.product((False, True), (False, True), (0.005, 25)):
        model = DistributedDataParallel(
            make_model(device), gradient_as_bucket_view=view, static_graph=static, bucket_cap_mb=buckets
        )
        train(model, rank, device)
        for got, expected in zip(model.parameters(), reference(size), strict=True):
            check(got.detach(), expected, view, static, buckets)


def unused(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    model = DistributedDataParallel(branches(device), find_unused_parameters=True)
    # Each rank its own branch; then one that nobody uses.
    for which in ([("left", "right")[r % 2] for r in range(size)], ["left"] * size):
        model.zero_grad()
        model(batch(rank, 0).to(device), which[rank]).square().mean().backward()
        expected = averaged(branches, lambda m, r, which=which: m(batch(r, 0), which[r]).square().mean(), size)
        for (name, parameter), gradient in zip(model.module.named_parameters(), expected, strict=True):
            if name.split(".")[0] in which:
                check(parameter.grad, gradient, which, name)
            else:
                assert parameter.grad is None, name


def not_synchronized(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    model = DistributedDataParallel(make_model(device))
    with model.no_sync():
        model(batch(rank, 0).to(device)).square().mean().backward()
    alone = make_model(torch.device("cpu"))
    alone(batch(rank, 0)).square().mean().backward()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        check(got.grad, expected.grad, "no_sync")
    model(batch(rank, 1).to(device)).square().mean().backward()

    def both(replica: nn.Module, r: int) -> torch.Tensor:
        replica(batch(r, 0)).square().mean().backward()
        return replica(batch(r, 1)).square().mean()

    for got, gradient in zip(model.parameters(), averaged(make_model, both, size), strict=True):
        check(got.grad, gradient, "after no_sync")


def hooks(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    exact = averaged(make_model, lambda m, r: m(batch(r, 0)).square().mean(), size)
    plain: list[tuple[Callable, object, torch.dtype]] = [
        (default_hooks.allreduce_hook, dist.group.WORLD, torch.float32),
        (default_hooks.fp16_compress_hook, dist.group.WORLD, torch.float16),
    ]
    if kind == "neuron":  # for CPU modules DDP refuses it
        plain.append((default_hooks.bf16_compress_hook, dist.group.WORLD, torch.bfloat16))
    for hook, state, dtype in plain:
        model = DistributedDataParallel(make_model(device), bucket_cap_mb=0.005)
        model.register_comm_hook(state, hook)
        model(batch(rank, 0).to(device)).square().mean().backward()
        for got, gradient in zip(model.parameters(), exact, strict=True):
            if dtype == torch.float32:
                check(got.grad, gradient, hook)
            else:
                torch.testing.assert_close(got.grad.cpu(), gradient, rtol=2**-6, atol=1e-4)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model = DistributedDataParallel(make_model(device))
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, rank, device, steps=5)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.zeros_like(weights) for _ in range(size)]
    dist.all_gather(everyone, weights)
    for other in everyone:
        check(other, weights, "PowerSGD: the same weights everywhere")
    assert weights.isfinite().all()


def uneven_inputs(rank: int, size: int, kind: str) -> None:
    """Rank r has r + 1 batches: whoever is out answers the others' collectives."""
    device = device_of(kind, rank)
    model = DistributedDataParallel(make_model(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    steps = 0
    with Join([model, optimizer]):
        for step in range(rank + 1):
            model.zero_grad()
            model(batch(rank, step).to(device)).square().mean().backward()
            optimizer.step()
            steps += 1
    assert steps == rank + 1
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.zeros_like(weights) for _ in range(size)]
    dist.all_gather(everyone, weights)
    for other in everyone:
        check(other, weights, "the last rank's weights are everybody's")


def sharded_optimizer(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    results = []
    for overlap, zero in ((False, False), (False, True), (True, True)):
        model = DistributedDataParallel(make_model(device), gradient_as_bucket_view=overlap)
        if zero:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=overlap
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step).to(device)).square().mean().backward()
            optimizer.step()
        if zero:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    check(results[1], results[0], "ZeroRedundancyOptimizer")
    check(results[2], results[0], "ZeroRedundancyOptimizer, bucket views")


def batch_norm(rank: int, size: int, kind: str) -> None:
    """SyncBatchNorm over all ranks is BatchNorm over all their samples."""
    device = device_of(kind, rank)
    for shape in ((6, 5), (6, 5, 4), (2, 5, 4, 3)):
        generator = torch.Generator().manual_seed(7)
        samples = torch.randn(size * shape[0], *shape[1:], generator=generator)
        alone = nn.BatchNorm1d(5) if len(shape) < 4 else nn.BatchNorm2d(5)
        nn.init.uniform_(alone.weight, generator=generator)
        together = nn.SyncBatchNorm.convert_sync_batchnorm(
            type(alone)(5).requires_grad_().to(device), process_group=dist.group.WORLD
        )
        together.load_state_dict(alone.state_dict())
        whole = samples.clone().requires_grad_()
        part = samples.chunk(size)[rank].to(device).requires_grad_()
        expected = alone(whole)
        got = together(part)
        torch.testing.assert_close(got.cpu(), expected.chunk(size)[rank])
        expected.square().sum().backward(retain_graph=True)
        (expected.sin().sum()).backward()
        got.square().sum().backward(retain_graph=True)
        (got.sin().sum()).backward()
        torch.testing.assert_close(part.grad.cpu(), whole.grad.chunk(size)[rank], rtol=1e-4, atol=1e-5)
        for name in ("weight", "bias"):
            gradient = getattr(together, name).grad
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient.cpu(), getattr(alone, name).grad, rtol=1e-4, atol=1e-5)
        for name, buffer in alone.named_buffers():
            torch.testing.assert_close(together.get_buffer(name).cpu(), buffer)


BODIES: list[Callable[[int, int, str], None]] = [settings, unused, not_synchronized, uneven_inputs]
LONGER: list[Callable[[int, int, str], None]] = [hooks, sharded_optimizer]


@pytest.mark.parametrize("body", BODIES)
def test_data_parallel(body: Callable[[int, int, str], None]) -> None:
    ranks.run(2, body, "neuron")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["neuron", "cpu"])
@pytest.mark.parametrize("body", LONGER)
def test_more_settings(body: Callable[[int, int, str], None], kind: str) -> None:
    ranks.run(2, body, kind)


@pytest.mark.slow
def test_batch_norm_over_all_ranks() -> None:
    ranks.run(2, batch_norm, "neuron")
