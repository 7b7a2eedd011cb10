"""Exact sums: correctly rounded whatever the order, and the same training whatever the number of ranks."""

from __future__ import annotations

# What c10d and DTensor return is declared wider than it is.
# mypy: disable-error-code="union-attr, operator, attr-defined"
import contextlib
import math
import os
import random
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.c10d import ranks
from trn_dist.neuron.exact_sums import _ExactGradient, exact_norm


def to_float32(value: Fraction) -> float:
    """The float32 nearest to an exact value, ties to even."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(float(value))[1] - 24, -149)
    scaled = value / Fraction(2) ** exponent
    return math.ldexp(round(scaled), exponent)  # Python rounds fractions half to even


def wild_numbers(count: int, seed: int) -> list[float]:
    """float32 numbers of all sizes, subnormal ones too, many of which cancel."""
    chance = random.Random(seed)
    numbers = [chance.uniform(-1, 1) * 2.0 ** chance.randint(-148, 100) for _ in range(count)]
    numbers += [-number for number in numbers[: count // 2]]
    chance.shuffle(numbers)
    return torch.tensor(numbers).tolist()


def all_reduce(rank: int, size: int, columns: list[list[float]], op: str) -> list[float]:
    torch.neuron.distributed.set_exact_sums(True)
    tensor = torch.tensor([column[rank] for column in columns], device="neuron")
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor.tolist()


@pytest.mark.parametrize("count", [40, 3000], ids=["in the slot", "in the arena"])
@pytest.mark.parametrize(("op", "divisor"), [("SUM", 1), ("AVG", 4)])
def test_all_reduce_is_correctly_rounded(op: str, divisor: int, count: int):
    columns = [wild_numbers(4, seed)[:4] for seed in range(count)]
    # A tie that the smallest addend breaks, and one that it does not.
    columns[:2] = [[1.0, 2.0**-24, 2.0**-100, 0.0], [1.0, 2.0**-24, 0.0, 0.0]]
    expected = [to_float32(sum(map(Fraction, column), Fraction(0)) / divisor) for column in columns]
    assert ranks.run(4, all_reduce, columns, op) == [expected] * 4


def reduce_other(rank: int, size: int) -> list[object]:
    torch.neuron.distributed.set_exact_sums(True)
    special = torch.tensor([math.inf, math.nan, 1.0] if rank else [1.0, 1.0, math.inf], device="neuron")
    dist.all_reduce(special)
    doubled = torch.full((100,), 1.0 + rank * 2.0**-60, dtype=torch.float64, device="neuron")
    dist.all_reduce(doubled)
    whole = torch.full((1000,), rank + 1, device="neuron")
    dist.all_reduce(whole)
    part = torch.empty(500, device="neuron")
    scaled = torch.full((1000,), 1.0 + rank * 2.0**-22, device="neuron")
    dist.reduce_scatter_tensor(part, scaled, dist._make_nccl_premul_sum(0.25))
    return [repr(special.tolist()), doubled[0].item(), whole[0].item(), part[0].item()]


def test_other_numbers_and_collectives():
    assert ranks.run(2, reduce_other) == [["[inf, nan, inf]", 2.0, 3, 0.5 + 2.0**-24]] * 2


def disagree(rank: int, size: int) -> None:
    torch.neuron.distributed.set_exact_sums(rank == 1)
    dist.all_reduce(torch.ones(4, device="neuron"))


def test_ranks_that_do_not_agree_on_it_are_told():
    for outcome in ranks.outcomes(2, disagree):
        assert "rank 1: all_reduce(exact SUM)" in outcome.error


@pytest.mark.parametrize("seed", range(5))
def test_an_accumulated_gradient_is_correctly_rounded_in_any_order(seed: int):
    numbers = wild_numbers(20, seed)
    expected = to_float32(sum(map(Fraction, numbers), Fraction(0)))
    for _ in range(3):
        random.Random(seed).shuffle(numbers)
        parameter = nn.Parameter(torch.ones(3, device="neuron"))
        _ExactGradient(parameter)
        for number in numbers:
            parameter.backward(torch.full((3,), number, device="neuron"))
        assert parameter.grad.tolist() == [expected] * 3


def test_an_accumulated_gradient_begins_where_others_set_it():
    parameter = nn.Parameter(torch.ones(2))
    _ExactGradient(parameter)
    one, tiny = torch.ones(2), torch.full((2,), 2.0**-24)
    for addend in (one, tiny, tiny):
        parameter.backward(addend)
    assert parameter.grad.tolist() == [1 + 2.0**-23] * 2
    parameter.grad.zero_()
    parameter.backward(tiny)
    assert parameter.grad.tolist() == [2.0**-24] * 2
    parameter.grad = torch.ones(2)
    parameter.backward(tiny)
    parameter.backward(tiny)
    assert parameter.grad.tolist() == [1 + 2.0**-23] * 2


@pytest.mark.parametrize("seed", range(5))
def test_the_norm_is_correctly_rounded(seed: int):
    numbers = [number for number in wild_numbers(60, seed) if abs(number) < 2.0**60]
    tensors = [torch.tensor(numbers[:17]), torch.tensor(numbers[17:], device="neuron")]
    squares = sum((Fraction(number) ** 2 for number in numbers), Fraction(0))
    found = Fraction(exact_norm(tensors).item())
    below, above = (
        Fraction(torch.nextafter(torch.tensor(float(found)), torch.tensor(to)).item()) for to in (0.0, 3e38)
    )
    # Nearest: the root lies between the midpoints to the neighbours.
    assert ((below + found) / 2) ** 2 <= squares <= ((found + above) / 2) ** 2


def test_the_norm_of_special_values():
    assert exact_norm([torch.zeros(3)]).item() == 0.0
    assert exact_norm([torch.tensor([2.0**-149])]).item() == 2.0**-149
    assert exact_norm([torch.tensor([1.0, math.inf])]).item() == math.inf
    assert math.isnan(exact_norm([torch.tensor([math.nan, math.inf])]).item())


def test_the_environment_switches_it_on_and_is_checked():
    code = "import torch; print(torch.neuron.distributed.exact_sums())"
    for value, words in (("1", "True"), ("0", "False"), ("yes", "TRN_EXACT_SUMS=yes: expected 1")):
        environment = {**os.environ, "TRN_EXACT_SUMS": value}
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert words in found.stdout + found.stderr


MICROBATCHES = 8


def train(rank: int, size: int, kind: str, steps: int = 3) -> list[object]:
    """Trains with clipping on the same microbatches, whoever has them; returns norms and a digest of the weights."""
    torch.neuron.distributed.set_exact_sums(True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(33, 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 7)).to("neuron")
    model: nn.Module = plain
    if kind == "ddp":
        model = DistributedDataParallel(plain, bucket_cap_mb=0.005)
    elif kind == "fsdp":
        fully_shard(plain[0])
        fully_shard(plain)
    torch.neuron.distributed.accumulate_exactly(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = MICROBATCHES // size
    found: list[object] = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(mine):
            last = number == mine - 1
            if kind == "fsdp":
                plain.set_requires_gradient_sync(last)
            # Which rank has which microbatch does not matter either.
            seed = 100 * step + (number * size + rank if kind == "fsdp" else rank * mine + number)
            batch = torch.randn(4, 33, generator=torch.Generator().manual_seed(seed)).to("neuron")
            with contextlib.nullcontext() if last or kind != "ddp" else model.no_sync():
                (model(batch).square().mean() / mine).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        found.append(norm.item())
    for parameter in plain.parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.append(value.detach().cpu().numpy().tobytes())
    return found


def test_one_rank_with_eight_microbatches_trains_as_eight_with_one():
    (expected,) = ranks.run(1, train, "plain")
    assert expected[0] > 0.05  # clipped
    for size in (2, 4, 8):
        for kind in ("ddp", "fsdp"):
            for found in ranks.run(size, train, kind):
                assert found == expected, (size, kind)


def test_without_exact_sums_they_differ():
    """The test above can fail."""
    assert ranks.run(2, train_inexactly)[0] != ranks.run(1, train_inexactly)[0]


def train_inexactly(rank: int, size: int) -> list[object]:
    exact = torch.neuron.distributed
    exact.accumulate_exactly = lambda model: None
    original, exact.set_exact_sums = exact.set_exact_sums, lambda on: None
    try:
        return train(rank, size, "ddp" if size > 1 else "plain")
    finally:
        exact.set_exact_sums = original


def refuse_hsdp(rank: int, size: int) -> str:
    model = nn.Linear(8, 8).to("neuron")
    fully_shard(model, mesh=init_device_mesh("neuron", (2, 2), mesh_dim_names=("replicate", "shard")))
    try:
        torch.neuron.distributed.accumulate_exactly(model)
    except ValueError as error:
        return str(error)
    return ""


def test_hsdp_is_refused():
    assert all("(HSDP) rounds between its two reductions" in text for text in ranks.run(4, refuse_hsdp))


def test_low_precision_gradients_are_refused():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    torch.neuron.distributed.accumulate_exactly(model)
    with pytest.raises(TypeError, match=r"exact sums take float32 gradients .* got Tensor of torch.bfloat16"):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()


def test_the_switch_can_be_read():
    assert not torch.neuron.distributed.exact_sums()
    torch.neuron.distributed.set_exact_sums(True)
    try:
        assert torch.neuron.distributed.exact_sums()
    finally:
        torch.neuron.distributed.set_exact_sums(False)
