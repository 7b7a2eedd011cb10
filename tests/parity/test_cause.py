"""What differences look like: each pattern planted in made-up tensors and named."""

import pytest
import torch

from trn_dist.parity.cause import Cause, explain, explain_replicas

GROUPS = {"dp": 2, "tp": 4}


@pytest.fixture
def a() -> torch.Tensor:
    return torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0))


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    return tensor * (1 + 2e-7 * noise)


def test_rounding(a: torch.Tensor):
    assert explain(a, rounded(a), GROUPS).cause is Cause.ROUNDING


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.5, "1/2 of what it should be: the size of the group dp"),
        (2.0, "2 times too large: the size of the group dp"),
        (0.25, "the size of the group tp"),
        (512.0, "512 times too large: tokens"),
        (1.7, "1.7 times what it should be, near no group's size"),
    ],
)
def test_scale(a: torch.Tensor, factor: float, words: str):
    found = explain(a, rounded(a) * factor, GROUPS, factors={"tokens": 512})
    assert found.cause is Cause.SCALE and words in found.text


def test_swapped_parts(a: torch.Tensor):
    b = torch.cat([a[4:], a[:4]])
    found = explain(a, rounded(b), GROUPS)
    assert found.cause is Cause.REORDERED and "dimension 0 in 2 parts over dp: part 0 holds 1, 1 holds 0" in found.text


def test_repeated_part(a: torch.Tensor):
    found = explain(a, torch.cat([a[:4], a[:4]]), GROUPS)
    assert found.cause is Cause.REPEATED and "parts 0 and 1 both hold part 0" in found.text


def test_zero_part(a: torch.Tensor):
    b = a.clone()
    b[:, :, 8:16] = 0
    found = explain(a, b, GROUPS)
    assert found.cause is Cause.MISSING and "part 1 of dimension 2 cut in 4 as tp cuts it" in found.text


def test_wrong_scale_in_one_part(a: torch.Tensor):
    b = a.clone()
    b[4:] *= 3
    found = explain(a, b, GROUPS)
    assert found.cause is Cause.SCALE and "only in part 1 of dimension 0" in found.text


def test_shift(a: torch.Tensor):
    found = explain(a, a.roll(1, dims=1), {})
    assert found.cause is Cause.SHIFTED and "shifted by 1 along dimension 1" in found.text


def test_stale(a: torch.Tensor):
    earlier = a + 0.01
    assert explain(a, earlier.clone(), GROUPS, earlier=earlier).cause is Cause.STALE


def test_another_random_stream(a: torch.Tensor):
    masks = [torch.rand(a.shape, generator=torch.Generator().manual_seed(seed)) > 0.1 for seed in (1, 2)]
    assert explain(a * masks[0], a * masks[1], GROUPS).cause is Cause.RANDOM


def test_low_precision(a: torch.Tensor):
    found = explain(a, a.bfloat16().float(), {})
    assert found.cause is Cause.LOW_PRECISION and "bfloat16" in found.text
    # A sum of values that went through bfloat16 is none itself.
    other = torch.randn(a.shape, generator=torch.Generator().manual_seed(2))
    found = explain(a + other, a.bfloat16().float() + other.bfloat16().float(), {})
    assert found.cause is Cause.LOW_PRECISION


def test_not_finite(a: torch.Tensor):
    b = a.clone()
    b[0, 0, 0] = torch.nan
    assert explain(a, b, GROUPS).cause is Cause.NOT_FINITE


def test_no_pattern_is_admitted(a: torch.Tensor):
    b = torch.randn(a.shape, generator=torch.Generator().manual_seed(3))
    assert explain(a, b, GROUPS).cause is Cause.OTHER


def test_complex_numbers_are_compared_as_pairs():
    table = torch.polar(torch.ones(64, 8), torch.arange(64.0)[:, None] * torch.rand(8))
    assert explain(table, table.roll(2, dims=0), {}).cause is Cause.SHIFTED


def test_replicas_that_hold_addends(a: torch.Tensor):
    part = torch.randn(a.shape, generator=torch.Generator().manual_seed(4))
    found = explain_replicas(a, {0: part, 1: a - part}, "tp")
    assert found.cause is Cause.NOT_REDUCED and "not summed over tp" in found.text
    found = explain_replicas(a, {0: a + part, 1: a - part}, "dp")
    assert found.cause is Cause.NOT_REDUCED and "not averaged over dp" in found.text


def test_replicas_with_one_wrong_rank(a: torch.Tensor):
    found = explain_replicas(a, {0: a, 1: a * 1.5}, "tp")
    assert found.cause is Cause.DISAGREE and "wrong on 1" in found.text


def test_replicas_of_a_number_are_shown():
    found = explain_replicas(None, {0: torch.tensor(0.1), 1: torch.tensor(0.2)}, "dp")
    assert found.cause is Cause.DISAGREE and "hold 0.1, 0.2" in found.text
