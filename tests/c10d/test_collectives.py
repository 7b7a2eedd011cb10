"""Each collective against its definition, on neuron and on cpu tensors, for 2, 4 and 8 ranks."""

from __future__ import annotations

# c10d says that its calls may return None, which they do only outside of a group.
# mypy: disable-error-code="union-attr, index, assignment"
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.c10d import ranks

# Empty, one element, small (in the slot), odd, a few cache lines, several segments.
NUMELS = (0, 1, 7, 129, 4099, 140_001)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def device_of(kind: str, rank: int) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(f"neuron:{rank}")


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What rank `rank` contributes: the same on every rank that asks. On the CPU."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype.is_complex:
        real = dtype.to_real()
        return (
            torch.complex(
                torch.randn(numel, generator=generator, dtype=torch.float64),
                torch.randn(numel, generator=generator, dtype=torch.float64),
            ).to(dtype)
            if real != torch.float16
            else torch.zeros(numel, dtype=dtype)
        )
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 5, (numel,), generator=generator).to(dtype)


def tree(parts: list[torch.Tensor], combine) -> torch.Tensor:
    """The definition of the order: blocks of a power of two, from the left."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return combine(tree(parts[:half], combine), tree(parts[half:], combine))


def reduced(size: int, numel: int, dtype: torch.dtype, op: str, seed: int = 0, factors=None) -> torch.Tensor:
    """The expected bits."""
    parts = [values(rank, numel, dtype, seed) for rank in range(size)]
    low = dtype.is_floating_point and dtype.itemsize < 4
    if dtype == torch.bool:
        logic = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or, "BXOR": torch.logical_xor}
        return tree(parts, logic.get(op, torch.logical_and))
    # The CPU has no arithmetic for uint16 to uint64: their sums fit int64 here.
    wide = torch.float32 if low else torch.int64 if dtype in UNSIGNED else dtype
    parts = [part.to(wide) for part in parts]
    if op == "PREMUL_SUM":
        parts = [part * factor for part, factor in zip(parts, factors, strict=True)]
    functions = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PREMUL_SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    result = tree(parts, functions[op])
    if op == "AVG":
        result = (
            result / size
            if result.is_floating_point() or result.is_complex()
            else torch.div(result, size, rounding_mode="trunc")
        )
    return result.to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit."""
    left, right = left.cpu().contiguous(), right.cpu().contiguous()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


def check(got: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
    assert same(got, expected), f"{what}: got {got.flatten()[:8]}, expected {expected.flatten()[:8]}"


def all_reduce_every_dtype(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    arithmetic = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    bitwise = ("BAND", "BOR", "BXOR")
    cases = [(dtype, op) for dtype in (*FLOATS, *FLOAT8S) for op in arithmetic]
    cases += [(dtype, op) for dtype in (*INTS, *UNSIGNED) for op in (*arithmetic, *bitwise)]
    cases += [(torch.bool, op) for op in (*arithmetic, *bitwise) if op != "AVG"]
    for dtype, op in cases:
        for numel in (7, 4099):
            tensor = values(rank, numel, dtype).to(device)
            dist.all_reduce(tensor, getattr(ReduceOp, op))
            check(tensor, reduced(size, numel, dtype, op), "all_reduce", dtype, op, numel)
    for dtype in (torch.complex64, torch.complex128):
        tensor = values(rank, 1001, dtype).to(device)
        dist.all_reduce(tensor)
        check(tensor, reduced(size, 1001, dtype, "SUM"), "all_reduce", dtype)
    factors = [0.5 + r for r in range(size)]
    for dtype in FLOATS:
        for factor in (factors[rank], torch.tensor([factors[rank]])):
            tensor = values(rank, 4099, dtype).to(device)
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
            check(tensor, reduced(size, 4099, dtype, "PREMUL_SUM", factors=factors), "premul", dtype)
    for dtype in (torch.int32, torch.bool):  # 0.5 would become 0
        with pytest.raises(TypeError, match="a factor needs a floating-point dtype"):
            dist.all_reduce(torch.ones(3, dtype=dtype, device=device), dist._make_nccl_premul_sum(0.5))
    nan = torch.full((300,), float("nan") if rank == 1 else 1.0, device=device)
    dist.all_reduce(nan, ReduceOp.MAX)
    assert nan.isnan().all()


def every_collective(rank: int, size: int, kind: str, numel: int, dtype: torch.dtype) -> None:
    device = device_of(kind, rank)

    def mine(seed: int = 0, count: int = numel, of: int = rank) -> torch.Tensor:
        return values(of, count, dtype, seed).to(device)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    everyone = [values(r, numel, dtype) for r in range(size)]

    tensor = mine()
    dist.all_reduce(tensor)
    check(tensor, reduced(size, numel, dtype, "SUM"), "all_reduce")

    for root in (0, size - 1):
        tensor = mine()
        dist.broadcast(tensor, root)
        check(tensor, everyone[root], "broadcast")

        tensor = mine()
        dist.reduce(tensor, root)
        check(tensor, reduced(size, numel, dtype, "SUM") if rank == root else everyone[rank], "reduce")

        outputs = [empty(numel) for _ in range(size)] if rank == root else None
        dist.gather(mine(), outputs, root)
        for r in range(size if rank == root else 0):
            check(outputs[r], everyone[r], "gather")

        tensor = empty(numel)
        inputs = [mine(seed=7 + r, of=root) for r in range(size)] if rank == root else None
        dist.scatter(tensor, inputs, root)
        check(tensor, values(root, numel, dtype, 7 + rank), "scatter")

    outputs = [empty(numel) for _ in range(size)]
    dist.all_gather(outputs, mine())
    for r in range(size):
        check(outputs[r], everyone[r], "all_gather")

    output = empty(size * numel)
    dist.all_gather_single(output, mine())
    check(output, torch.cat(everyone), "all_gather_single")
    # In place: the input is the own part of the output.
    output = empty(size * numel)
    part = output[rank * numel : (rank + 1) * numel]
    part.copy_(mine())
    dist.all_gather_single(output, part)
    check(output, torch.cat(everyone), "all_gather_single in place")

    whole = reduced(size, numel * size, dtype, "SUM")
    shard = whole[rank * numel : (rank + 1) * numel]
    output = empty(numel)
    dist.reduce_scatter_single(output, mine(count=numel * size))
    check(output, shard, "reduce_scatter_single")
    inputs = mine(count=numel * size)
    part = inputs[rank * numel : (rank + 1) * numel]
    dist.reduce_scatter_single(part, inputs)
    check(part, shard, "reduce_scatter_single in place")
    output = empty(numel)
    dist.reduce_scatter(output, list(mine(count=numel * size).chunk(size)) if numel else [empty(0)] * size)
    check(output, shard, "reduce_scatter")

    output = empty(numel * size)
    dist.all_to_all_single(output, mine(count=numel * size))
    expected = [values(r, numel * size, dtype)[rank * numel : (rank + 1) * numel] for r in range(size)]
    check(output, torch.cat(expected), "all_to_all_single")
    outputs = [empty(numel) for _ in range(size)]
    dist.all_to_all(outputs, [mine(count=numel * size)[r * numel : (r + 1) * numel] for r in range(size)])
    check(torch.cat(outputs), torch.cat(expected), "all_to_all")
    # In place.
    tensor = mine(count=numel * size)
    dist.all_to_all_single(tensor, tensor)
    check(tensor, torch.cat(expected), "all_to_all_single in place")

    dist.barrier()


def every_size(rank: int, size: int, kind: str) -> None:
    for numel in NUMELS:
        every_collective(rank, size, kind, numel, torch.float32)
    for dtype in (torch.bfloat16, torch.int64, torch.uint8):
        for numel in (1, 515, 20_003):
            every_collective(rank, size, kind, numel, dtype)


def uneven(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    for width in (1, 3, 5000):
        # Rank i sends (i + j) % 3 rows to rank j.
        sends = [(rank + to) % 3 for to in range(size)]
        receives = [(frm + rank) % 3 for frm in range(size)]
        rows = values(rank, sum(sends) * width, torch.float32).view(-1, width).to(device)
        output = torch.zeros(sum(receives), width, device=device)
        dist.all_to_all_single(output, rows, receives, sends)
        expected = []
        for frm in range(size):
            theirs = [(frm + to) % 3 for to in range(size)]
            block = values(frm, sum(theirs) * width, torch.float32).view(-1, width)
            begin = sum(theirs[:rank])
            expected.append(block[begin : begin + theirs[rank]])
        check(output, torch.cat(expected), "all_to_all_single uneven", width)

        # Lists whose tensors differ in size from rank to rank.
        lengths = [(r + 1) * width for r in range(size)]
        outputs = [torch.zeros(n, device=device) for n in lengths]
        dist.all_gather(outputs, values(rank, lengths[rank], torch.float32).to(device))
        for r in range(size):
            check(outputs[r], values(r, lengths[r], torch.float32), "all_gather uneven")
        output = torch.zeros(lengths[rank], device=device)
        dist.reduce_scatter(output, [values(rank, n, torch.float32, seed=n).to(device) for n in lengths])
        check(output, reduced(size, lengths[rank], torch.float32, "SUM", seed=lengths[rank]), "reduce_scatter uneven")


def layouts(rank: int, size: int, kind: str) -> None:
    """Where NCCL works with tensors that are not contiguous, so does this; where it refuses, so does this."""
    device = device_of(kind, rank)
    for rows in (3, 500):
        strided = values(rank, rows * 4, torch.float32).to(device).view(rows, 4).t()
        outputs = [torch.zeros(4, rows, device=device).t().contiguous().t() for _ in range(size)]
        assert not outputs[0].is_contiguous() and not strided.is_contiguous()
        dist.all_gather(outputs, strided)
        for r in range(size):
            check(outputs[r], values(r, rows * 4, torch.float32).view(rows, 4).t(), "all_gather, strided")
        peer = (rank + 1) % size
        received = torch.zeros(8, rows, device=device)[::2]
        request = dist.irecv(received, (rank - 1) % size)
        dist.isend(strided, peer).wait()
        request.wait()
        check(received, values((rank - 1) % size, rows * 4, torch.float32).view(rows, 4).t(), "recv, strided")
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_reduce(strided)
    images = values(rank, 2 * 3 * 4 * 5, torch.float32).view(2, 3, 4, 5).to(device)
    images = images.contiguous(memory_format=torch.channels_last)
    dist.all_reduce(images)
    check(images.contiguous(), reduced(size, 120, torch.float32, "SUM").view(2, 3, 4, 5), "channels_last")
    scalar = torch.tensor(float(rank), device=device)
    dist.all_reduce(scalar)
    assert scalar.item() == size * (size - 1) / 2
    dist.barrier()


def coalesced(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    for numels in ((3, 5), (70_001, 1, 300_000)):
        tensors = [values(rank, n, torch.float32).to(device) for n in numels]
        dist.all_reduce_coalesced(tensors)
        for n, tensor in zip(numels, tensors, strict=True):
            check(tensor, reduced(size, n, torch.float32, "SUM"), "all_reduce_coalesced")

        with dist._coalescing_manager(async_ops=True) as works:
            tensors = [values(rank, n, torch.float32).to(device) for n in numels]
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
        works.wait()
        for n, tensor in zip(numels, tensors, strict=True):
            check(tensor, reduced(size, n, torch.float32, "SUM"), "coalescing manager, all_reduce")

        outputs = [torch.zeros(n * size, device=device) for n in numels]
        with dist._coalescing_manager():
            for n, output in zip(numels, outputs, strict=True):
                dist.all_gather_single(output, values(rank, n, torch.float32).to(device))
        for n, output in zip(numels, outputs, strict=True):
            check(output, torch.cat([values(r, n, torch.float32) for r in range(size)]), "all_gather coalesced")

        outputs = [torch.zeros(n, device=device) for n in numels]
        with dist._coalescing_manager():
            for n, output in zip(numels, outputs, strict=True):
                dist.reduce_scatter_single(output, values(rank, n * size, torch.float32).to(device))
        for n, output in zip(numels, outputs, strict=True):
            expected = reduced(size, n * size, torch.float32, "SUM")[rank * n : (rank + 1) * n]
            check(output, expected, "reduce_scatter coalesced")

        lists = [[torch.zeros(n, device=device) for n in numels] for _ in range(size)]
        dist.all_gather_coalesced(lists, [values(rank, n, torch.float32).to(device) for n in numels])
        for r in range(size):
            for n, output in zip(numels, lists[r], strict=True):
                check(output, values(r, n, torch.float32), "all_gather_coalesced")

    with dist._coalescing_manager(device=device, async_ops=True) as works:
        first = values(rank, 40_000, torch.float32).to(device)
        second = values(rank, 3, torch.float32).to(device)
        dist.broadcast(first, 0, async_op=True)
        dist.broadcast(second, 1, async_op=True)
    works.wait()
    check(first, values(0, 40_000, torch.float32), "broadcast, coalesced")
    check(second, values(1, 3, torch.float32), "broadcast, coalesced")

    inputs = [values(rank, 5, dtype).to(device) for dtype in (torch.float32, torch.int64, torch.bool)]
    outputs = [torch.zeros(5 * size, dtype=tensor.dtype, device=device) for tensor in inputs]
    with dist._coalescing_manager():
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    for output in outputs:
        check(output, torch.cat([values(r, 5, output.dtype) for r in range(size)]), "coalesced, of several dtypes")

    # Managers of two groups may be nested, and one that an exception has left is none for the next.
    other = dist.new_group(list(range(size)))
    first, second = values(rank, 10, torch.float32).to(device), values(rank, 20, torch.float32).to(device)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(first)
        with dist._coalescing_manager(group=other, async_ops=True) as inner:
            dist.all_reduce(second, group=other)
    inner.wait()
    works.wait()
    check(first, reduced(size, 10, torch.float32, "SUM"), "outer manager")
    check(second, reduced(size, 20, torch.float32, "SUM"), "inner manager")
    backend = dist.group.WORLD._get_backend(device)
    backend._start_coalescing()
    backend.allreduce([values(rank, 10, torch.float32).to(device)])
    first = values(rank, 10, torch.float32).to(device)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(first)
    works.wait()
    check(first, reduced(size, 10, torch.float32, "SUM"), "after a manager that an exception left")


def functional(rank: int, size: int, kind: str) -> None:
    from torch.distributed import _functional_collectives as funcol

    device = device_of(kind, rank)
    group = list(range(size))
    for n in (4, 50_000):
        tensor = values(rank, n, torch.float32).to(device)
        check(funcol.all_reduce(tensor, "sum", group).clone(), reduced(size, n, torch.float32, "SUM"))
        check(tensor, values(rank, n, torch.float32), "the input of a functional collective stays")
        gathered = funcol.all_gather_tensor(tensor, 0, group)
        check(gathered.clone(), torch.cat([values(r, n, torch.float32) for r in range(size)]))
        whole = values(rank, n * size, torch.float32).to(device)
        shard = reduced(size, n * size, torch.float32, "AVG")[rank * n : (rank + 1) * n]
        check(funcol.reduce_scatter_tensor(whole, "avg", 0, group).clone(), shard)
        outputs = funcol.all_gather_into_tensor_coalesced([tensor, tensor[:3]], group)
        check(outputs[1].clone(), torch.cat([values(r, n, torch.float32)[:3] for r in range(size)]))


def objects(rank: int, size: int, kind: str) -> None:
    gathered: list = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank * 1000)})
    assert [entry["rank"] for entry in gathered] == list(range(size))
    assert len(gathered[-1]["text"]) == (size - 1) * 1000
    box = [("from the root", 42)] if rank == 1 else [None]
    dist.broadcast_object_list(box, src=1)
    assert box == [("from the root", 42)]
    output: list = [None]
    dist.scatter_object_list(output, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert output == [f"for {rank}"]


@pytest.mark.parametrize(("size", "kind"), [(2, "neuron"), (4, "neuron"), (8, "neuron"), (2, "cpu"), (4, "cpu")])
@pytest.mark.parametrize("body", [every_size, uneven, layouts, coalesced, functional, objects])
def test_collectives(body, size: int, kind: str) -> None:
    ranks.run(size, body, kind)


@pytest.mark.parametrize(("size", "kind"), [(2, "neuron"), (5, "neuron"), (3, "cpu")])
def test_every_dtype_and_reduction(size: int, kind: str) -> None:
    ranks.run(size, all_reduce_every_dtype, kind)


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_odd_numbers_of_ranks(size: int) -> None:
    ranks.run(size, odd_sizes)


def odd_sizes(rank: int, size: int) -> None:
    for numel in (1, 129, 70_001):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = values(rank, numel, dtype).to(f"neuron:{rank}")
            dist.all_reduce(tensor, ReduceOp.AVG)
            check(tensor, reduced(size, numel, dtype, "AVG"), numel, dtype)
    if size > 1:
        every_collective(rank, size, "neuron", 20_011, torch.float32)


def group_of(members: list[int]) -> dist.ProcessGroup:
    """A group whose rank i is members[i]; new_group() alone would sort them. Collective over the job."""
    return dist.distributed_c10d._new_group_with_tag(members, sort_ranks=False)


def hierarchical(rank: int, size: int, kind: str, members: list[int], numel: int) -> None:
    """Sums within aligned blocks of the group, then across them, against the sum over the group at once."""
    flat = group_of(members)
    place = members.index(rank) if rank in members else None
    for block in (2, 4):
        inner = [group_of(members[first : first + block]) for first in range(0, len(members), block)]
        outer = [group_of(members[first::block]) for first in range(block)]
        if place is None:
            continue
        within, across = inner[place // block], outer[place % block]
        for dtype in (torch.float32, torch.bfloat16):
            expected = reduced(len(members), numel, dtype, "SUM")
            tensor = values(place, numel, dtype).to(device_of(kind, rank))
            at_once = tensor.clone()
            dist.all_reduce(at_once, group=flat)
            check(at_once, expected, "flat", members, dtype)
            # What lies between the stages keeps the accumulator's dtype, and is rounded once at the end.
            by_stages = tensor.to(torch.float32, copy=True)
            dist.all_reduce(by_stages, group=within)
            dist.all_reduce(by_stages, group=across)
            check(by_stages.to(dtype), expected, "all_reduce by stages", members, block, dtype)
            whole = tensor.to(torch.float32, copy=True)
            shard = torch.empty(numel // block, device=whole.device)
            dist.reduce_scatter_single(shard, whole, group=within)
            dist.all_reduce(shard, group=across)
            dist.all_gather_single(whole, shard, group=within)
            check(whole.to(dtype), expected, "as HSDP", members, block, dtype)


@pytest.mark.parametrize("kind", ["neuron", "cpu"])
@pytest.mark.parametrize(
    "members",
    [list(range(8)), [5, 2, 7, 0, 3, 6, 1, 4], [6, 1, 4, 3]],
    ids=["in order", "out of order", "subgroup"],
)
def test_a_hierarchical_sum_has_the_bits_of_the_flat_one(members: list[int], kind: str) -> None:
    ranks.run(8, hierarchical, kind, members, 40_000)
