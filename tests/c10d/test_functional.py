"""Collectives as functions: every dtype through every movement, the ``_c10d_functional`` operators, and gradients."""

from __future__ import annotations

# What c10d returns is declared wider than it is.
# mypy: disable-error-code="union-attr, index, operator, assignment, attr-defined, arg-type"
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch.distributed import _functional_collectives as funcol

from tests.c10d import ranks
from tests.c10d.test_collectives import FLOAT8S, FLOATS, INTS, UNSIGNED, check, device_of, reduced, values

MOVED = (torch.bool, *INTS, *UNSIGNED, *FLOATS, *FLOAT8S, torch.complex32, torch.complex64, torch.complex128)


def pattern(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of all values, also such as are no number in their dtype."""
    if dtype == torch.bool:
        return values(rank, numel, dtype)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)


def movement(rank: int, size: int, kind: str) -> None:
    """No collective that only moves elements looks at them."""
    device = device_of(kind, rank)
    numel = 1030
    for dtype in MOVED:
        own = pattern(rank, numel, dtype).to(device)
        everyone = [pattern(r, numel, dtype) for r in range(size)]

        def empty(count: int = numel, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        tensor = own.clone()
        dist.broadcast(tensor, size - 1)
        check(tensor, everyone[-1], "broadcast", dtype)
        outputs = [empty() for _ in range(size)]
        dist.all_gather(outputs, own)
        whole = empty(size * numel)
        dist.all_gather_single(whole, own)
        for r in range(size):
            check(outputs[r], everyone[r], "all_gather", dtype)
            check(whole[r * numel : (r + 1) * numel], everyone[r], "all_gather_single", dtype)
        dist.gather(own, outputs if rank == 0 else None, 0)
        output = empty()
        dist.scatter(output, outputs if rank == 0 else None, 0)
        check(output, own, "gather and scatter", dtype)
        swapped = empty(size * 515)
        dist.all_to_all_single(swapped, torch.cat([own[:515]] * size))
        check(swapped, torch.cat([each[:515] for each in everyone]), "all_to_all_single", dtype)
        outputs = [empty() for _ in range(size)]
        dist.all_to_all(outputs, [own] * size)
        check(torch.cat(outputs), torch.cat(everyone), "all_to_all", dtype)
        request = dist.irecv(output, (rank - 1) % size)
        dist.send(own, (rank + 1) % size)
        request.wait()
        check(output, everyone[rank - 1], "send and recv", dtype)


def operators(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    group = dist.group.WORLD
    for numel in (6, 30_000):
        everyone = [values(r, numel, torch.float32) for r in range(size)]
        own = everyone[rank].to(device)
        total = reduced(size, numel, torch.float32, "SUM")
        check(funcol.wait_tensor(funcol.all_reduce(own, "sum", group)), total, "all_reduce")
        check(funcol.all_reduce(own, "product", group).clone(), reduced(size, numel, torch.float32, "PRODUCT"))
        sums = funcol.all_reduce_coalesced([own, own[:5]], "sum", group)
        check(sums[0].clone(), total, "all_reduce_coalesced")
        check(sums[1].clone(), total[:5], "all_reduce_coalesced")
        check(funcol.broadcast(own, 1, group).clone(), everyone[1], "broadcast")
        columns = funcol.all_gather_tensor(own.view(2, -1), 1, group)
        check(columns.clone(), torch.cat([each.view(2, -1) for each in everyone], dim=1), "all_gather_tensor, dim 1")
        rows = values(rank, numel * size, torch.float32).view(2, -1).to(device)
        whole = reduced(size, numel * size, torch.float32, "SUM").view(2, -1)
        check(funcol.reduce_scatter_tensor(rows, "sum", 1, group).clone(), whole.chunk(size, 1)[rank].contiguous())
        parts = funcol.reduce_scatter_tensor_coalesced([rows.flatten()] * 2, "sum", [0, 0], group)
        for part in parts:
            check(part.clone(), whole.flatten().chunk(size)[rank], "reduce_scatter_tensor_coalesced")
        sends = [numel // 2 if r == 0 else (numel - numel // 2) // (size - 1) for r in range(size)]
        own = own[: sum(sends)]
        receives = [sends[rank]] * size
        begin = sum(sends[:rank])
        expected = torch.cat([each[begin : begin + sends[rank]] for each in everyone])
        check(funcol.all_to_all_single(own, receives, sends, group).clone(), expected, "all_to_all_single")
        shifted = funcol.permute_tensor(own, [(r + 1) % size for r in range(size)], group)
        check(shifted.clone(), everyone[rank - 1][: sum(sends)], "permute_tensor")
    # In place, and the output that the caller gives.
    tensor = everyone[rank].to(device)
    dist.all_reduce(tensor)
    again = everyone[rank].to(device)
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(again, "sum", group.group_name))
    check(again, tensor, "all_reduce_")
    output = torch.zeros(size * numel, device=device)
    name = group.group_name
    result = torch.ops._c10d_functional.all_gather_into_tensor_out(everyone[rank].to(device), size, name, out=output)
    torch.ops._c10d_functional.wait_tensor(result)
    check(output, torch.cat(everyone), "all_gather_into_tensor_out")


def gradients(rank: int, size: int, kind: str) -> None:
    """Of every function that has one: that of the sum over all ranks of what they computed, weighted."""
    device = device_of(kind, rank)
    group = dist.group.WORLD
    numel = 12

    def weights(of: int, count: int) -> torch.Tensor:
        return values(of, count, torch.float32, seed=9)

    def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], count: int = numel) -> torch.Tensor:
        leaf = values(rank, count, torch.float32).to(device).requires_grad_()
        output = function(leaf)
        output = output.wait() if isinstance(output, funcol.AsyncCollectiveTensor) else output
        (output * weights(rank, output.numel()).to(device).view_as(output)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    # What all ranks weigh the part that this rank contributed to or received, added along the tree.
    total = reduced(size, numel, torch.float32, "SUM", seed=9)
    mine = reduced(size, numel * size, torch.float32, "SUM", seed=9)[rank * numel : (rank + 1) * numel]
    everyones = torch.cat([weights(r, numel) for r in range(size)])
    check(gradient_of(lambda x: funcol.all_gather_tensor_autograd(x, 0, group)), mine, "all_gather_tensor_autograd")
    check(
        gradient_of(lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group), numel * size),
        everyones,
        "reduce_scatter_tensor_autograd",
    )
    part = numel // size
    exchanged = torch.cat([weights(r, numel)[rank * part : (rank + 1) * part] for r in range(size)])
    splits = [part] * size
    exchange = [
        lambda x: funcol.all_to_all_single_autograd(x, splits, splits, group),
        lambda x: dist_nn.all_to_all_single(torch.empty_like(x), x),
        lambda x: torch.cat(
            dist_nn.all_to_all([torch.empty_like(each) for each in x.chunk(size)], list(x.chunk(size)))
        ),
    ]
    for function in exchange:
        check(gradient_of(function), exchanged, "all_to_all")
    check(gradient_of(lambda x: dist_nn.all_reduce(x)), total, "all_reduce")
    check(gradient_of(lambda x: torch.cat(dist_nn.all_gather(x))), mine, "all_gather")
    check(
        gradient_of(lambda x: dist_nn._all_gather_base(torch.empty(numel * size, device=device), x)),
        mine,
        "_all_gather_base",
    )
    zeros = torch.zeros(numel)
    check(gradient_of(lambda x: dist_nn.broadcast(x, 1)), total if rank == 1 else zeros, "broadcast")
    check(gradient_of(lambda x: dist_nn.reduce(x, 0)), weights(0, numel), "reduce")
    scattered = torch.cat([weights(r, part) for r in range(size)])
    check(
        gradient_of(lambda x: dist_nn.scatter(list(x.chunk(size)), src=0)),
        scattered if rank == 0 else zeros,
        "scatter",
    )
    check(
        gradient_of(lambda x: dist_nn.reduce_scatter(torch.empty(part, device=device), list(x.chunk(size)))),
        scattered,
        "reduce_scatter",
    )
    gathered = weights(0, numel * size)[rank * numel : (rank + 1) * numel]
    check(gradient_of(lambda x: torch.cat(dist_nn.gather(x, 0))), gathered, "gather")


def groups(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)

    def total(group: dist.ProcessGroup) -> float:
        tensor = torch.tensor([float(rank)], device=device)
        dist.all_reduce(tensor, group=group)
        return tensor.item()

    own, everyones = dist.new_subgroups(group_size=2)
    assert len(everyones) == size // 2
    assert total(own) == sum(r for r in range(size) if r // 2 == rank // 2)
    own, _ = dist.new_subgroups_by_enumeration([[0, size - 1], list(range(1, size - 1))])
    assert total(own) == (size - 1 if rank in (0, size - 1) else sum(range(1, size - 1)))
    # By the rank in the group.
    reverse = dist.new_group(list(range(size))[::-1], use_local_synchronization=True)
    tensor = torch.tensor([float(rank)], device=device)
    dist.broadcast(tensor, group=reverse, group_src=size - 1)
    assert dist.get_global_rank(reverse, size - 1) == tensor.item()
    box: list = [None] * size
    dist.gather_object({"rank": rank}, box if rank == 1 else None, dst=1)
    assert rank != 1 or [entry["rank"] for entry in box] == list(range(size))
    dist.barrier()
    dist.destroy_process_group(reverse)
    assert total(dist.group.WORLD) == sum(range(size))


@pytest.mark.parametrize("kind", ["neuron", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", [movement, operators, pytest.param(gradients, marks=pytest.mark.slow), groups])
def test_functional(body: Callable[[int, int, str], None], kind: str) -> None:
    ranks.run(4, body, kind)
