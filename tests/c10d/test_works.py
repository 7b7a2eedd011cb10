"""What is known about a collective in flight: async_op, futures, events of the device, order, and dropped works."""

from __future__ import annotations

# c10d says that its calls may return None, which they do only outside of a group.
# mypy: disable-error-code="union-attr"
import pytest
import torch
import torch.distributed as dist

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of, reduced, values

NUMEL = 100_003


def asynchronous(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    tensors = [values(rank, NUMEL, torch.float32, seed).to(device) for seed in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    # Waited for in another order on each rank.
    for i in [(7 * rank + 3 * i) % 10 for i in range(10)]:
        works[i].wait()
        check(tensors[i], reduced(size, NUMEL, torch.float32, "SUM", i), "async", i)
        assert works[i].is_completed() and works[i].is_success()
    tensor = values(rank, NUMEL, torch.float32).to(device)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    check(tensor, reduced(size, NUMEL, torch.float32, "SUM"), "polled")


def chained(rank: int, size: int, kind: str) -> None:
    """Collectives that use each other's results without a wait in between come one after the other, as on a stream."""
    device = device_of(kind, rank)
    for numel in (3, NUMEL):
        tensor = torch.full((numel,), float(rank + 1), device=device)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        total = size * (size + 1) / 2
        assert (tensor == total * size * size).all()


def futures(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    for numel in (3, NUMEL):
        tensor = values(rank, numel, torch.float32).to(device)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        check(doubled.wait(), reduced(size, numel, torch.float32, "SUM") * 2, "then")
        check(future.wait()[0], reduced(size, numel, torch.float32, "SUM"), "wait")
        output = torch.zeros(size * numel, device=device)
        work = dist.all_gather_single(output, values(rank, numel, torch.float32).to(device), async_op=True)
        torch.futures.wait_all([work.get_future()])
        check(output, torch.cat([values(r, numel, torch.float32) for r in range(size)]), "gathered")


def dropped(rank: int, size: int, kind: str) -> None:
    """Nobody keeps the work or the tensor; the others' results are right all the same, and slots are used again."""
    device = device_of(kind, rank)
    for i in range(100):
        tensor = values(rank, 2000, torch.float32, i).to(device)
        if rank == 0:
            dist.all_reduce(tensor, async_op=True)
        else:
            dist.all_reduce(tensor)
            check(tensor, reduced(size, 2000, torch.float32, "SUM", i), "dropped", i)
        del tensor
    dist.barrier()


def freed(rank: int, size: int, kind: str) -> None:
    """Memory that a collective wrote, which nobody waited for, serves other tensors once it is done and freed."""
    device = device_of(kind, rank)
    for _ in range(3):
        dist.all_reduce(torch.ones(1000, device=device), async_op=True)
        tensor = torch.ones(1000, device=device)
        dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        del tensor
        fresh = [torch.full((1000,), 2.0, device=device) for _ in range(8)]
        assert all((tensor == 2).all() for tensor in fresh)
    # What is not freed stays refused until somebody waits.
    tensor = torch.ones(1000, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    if kind == "neuron":
        with pytest.raises(RuntimeError, match="still in flight"):
            tensor.sum()
    work.wait()
    assert (tensor == size).all()


def synchronized(rank: int, size: int, kind: str) -> None:
    """On neuron: the device's and a stream's synchronisation finish what is in flight."""
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    tensor = values(rank, NUMEL, torch.float32).to(device)
    work = dist.all_reduce(tensor, async_op=True)
    torch.accelerator.synchronize() if kind == "neuron" else work.wait()
    check(tensor, reduced(size, NUMEL, torch.float32, "SUM"), "synchronize")
    assert work.is_completed()


def subgroups(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1]), dist.new_group(list(range(size)))]
    members = [[0, 2], [1, 3], list(range(size))]
    for group, ids in zip(groups, members, strict=True):
        if rank not in ids:
            continue
        assert dist.get_world_size(group) == len(ids)
        assert group._get_backend(device).name() == "neuron"
        for numel in (5, NUMEL):
            tensor = values(rank, numel, torch.float32).to(device)
            dist.all_reduce(tensor, group=group)
            expected = values(ids[0], numel, torch.float32)
            if len(ids) == 2:
                check(tensor, expected + values(ids[1], numel, torch.float32), "subgroup", ids)
            else:
                check(tensor, reduced(size, numel, torch.float32, "SUM"), "subgroup", ids)
            tensor = values(rank, numel, torch.float32).to(device)
            dist.broadcast(tensor, src=ids[-1], group=group)
            check(tensor, values(ids[-1], numel, torch.float32), "subgroup broadcast")
    # Both groups of a rank in flight at once, finished in another order on each.
    first, second = (values(rank, NUMEL, torch.float32, seed).to(device) for seed in (1, 2))
    own = groups[0] if rank in members[0] else groups[1]
    works = [dist.all_reduce(first, group=own, async_op=True), dist.all_reduce(second, async_op=True)]
    for work in works if rank % 2 else works[::-1]:
        work.wait()
    check(second, reduced(size, NUMEL, torch.float32, "SUM", 2), "two groups")


def blocks(rank: int, size: int, kind: str) -> None:
    """A sum over aligned blocks of a power of two ranks, then over the blocks, has the bits of the flat sum."""
    device = device_of(kind, rank)
    width = size // 2
    inner = dist.new_subgroups(group_size=width)[0]
    across = None
    for offset in range(width):
        group = dist.new_group([offset, offset + width])
        if rank % width == offset:
            across = group
    for dtype in (torch.float32, torch.float64):
        flat = values(rank, NUMEL, dtype).to(device)
        hierarchical = flat.clone()
        dist.all_reduce(flat)
        dist.all_reduce(hierarchical, group=inner)
        dist.all_reduce(hierarchical, group=across)
        check(hierarchical, flat, "hierarchical", dtype)
    # As HSDP does it.
    flat = values(rank, size * 1000, torch.float32).to(device)
    shard = torch.zeros(size * 1000 // width, device=device)
    dist.reduce_scatter_single(shard, flat, group=inner)
    dist.all_reduce(shard, group=across)
    gathered = torch.zeros_like(flat)
    dist.all_gather_single(gathered, shard, group=inner)
    dist.all_reduce(flat)
    check(gathered, flat, "HSDP")


def split(rank: int, size: int, kind: str) -> None:
    group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert dist.get_world_size(group) == 2
    tensor = torch.full((1000,), float(rank), device=device_of(kind, rank))
    dist.all_reduce(tensor, group=group)
    assert (tensor == (1.0 if rank < 2 else 5.0)).all()


def metadata(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    backend = dist.group.WORLD._get_backend(device)
    assert dist.get_backend() == "neuron"
    assert backend.name() == "neuron" and backend.size() == size and backend.rank() == rank
    assert backend.supports_coalescing and backend.supports_splitting
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.ones(3, device=device))
    assert backend._get_sequence_number_for_group() == before + 2
    work = dist.all_reduce(torch.ones(3, device=device), async_op=True)
    assert [tensor.shape for tensor in work.result()] == [(3,)]
    work.wait()


@pytest.mark.parametrize("kind", ["neuron", "cpu"])
@pytest.mark.parametrize(
    ("body", "size"),
    [
        (asynchronous, 4),
        (chained, 2),
        (futures, 2),
        (dropped, 2),
        (freed, 2),
        (synchronized, 2),
        (subgroups, 4),
        (blocks, 4),
        (blocks, 8),
        (metadata, 2),
    ],
)
def test_works(body, size: int, kind: str) -> None:
    ranks.run(size, body, kind)


def bits(rank: int, size: int) -> bytes:
    """Sums in an order that a race could change, with ranks that arrive at different times."""
    results = []
    for i in range(20):
        tensor = values(rank, 70_001, torch.float32, i).to(f"neuron:{rank}")
        torch.randn(2000 * ((rank + i) % size)).sort()
        dist.all_reduce(tensor)
        results.append(tensor.cpu())
    return torch.stack(results).numpy().tobytes()


def test_a_run_has_the_bits_of_its_rerun() -> None:
    first, second = ranks.run(4, bits), ranks.run(4, bits)
    assert len(set(first + second)) == 1
