"""Verdicts on made-up curves."""

import math

import numpy as np
import pytest

from trn_dist.parity.promise import Promise
from trn_dist.parity.rounding import Bound
from trn_dist.parity.verdict import Curves, Kind, Verdict, first_difference, judge

LOSS = [8.0, 7.5, 7.0, 6.5]
NORM = [1.0, 1.1, 1.2, 1.3]
BASE: Curves = {"loss": LOSS, "grad_norm": NORM}
LOOSE = Bound(np.full(4, 1e-5), np.full(4, 1e-6), 10.0)  # in all 2e-5
BOUNDS = {"loss": LOOSE, "grad_norm": LOOSE}
TREE = Promise(loss=True, grad_norm=False, reason="the same tree")
FACTORS = {"the data-parallel group's size": 2.0, "the tokens of a step": 2048.0}


def curves(loss: float = 0.0, norm: float = 0.0, factor: float = 1.0) -> Curves:
    return {"loss": [value + loss for value in LOSS], "grad_norm": [(value + norm) * factor for value in NORM]}


def verdict(found: Curves, promised: list[tuple[str, Curves, Promise]] | None = None) -> Verdict:
    return judge("fsdp=2", False, found, ("1", BASE), BOUNDS, promised or [], FACTORS)


def test_within_the_bound_is_rounding():
    found = verdict(curves(loss=1e-5))
    assert found.kind is Kind.WITHIN_ROUNDING
    assert found.worst is not None and found.worst.quantity == "loss"
    assert found.worst.ratio == pytest.approx(0.5, rel=1e-3)


def test_beyond_the_bound_is_different_and_names_step_and_ratio():
    late = {"loss": [*LOSS[:2], LOSS[2] + 1e-3, LOSS[3] + 2e-3], "grad_norm": NORM}
    found = verdict(late)
    assert found.kind is Kind.DIFFERENT and found.first_step == 3
    assert "loss of step 4" in found.reason and "100.0 times what rounding can do" in found.reason


def test_one_bit_breaks_a_promise():
    bit = {"loss": [*LOSS[:3], math.nextafter(LOSS[3], 9)], "grad_norm": NORM}
    found = verdict(bit, [("ddp=2", BASE, TREE)])
    assert found.kind is Kind.DIFFERENT and found.first_step == 4 and found.against == "ddp=2"
    assert "promised bit-equal: the same tree" in found.reason
    assert verdict(bit).kind is Kind.WITHIN_ROUNDING


def test_a_promise_on_the_loss_lets_the_norm_round():
    found = verdict(curves(norm=1e-6), [("ddp=2", BASE, TREE)])
    assert found.kind is Kind.BIT_EQUAL
    assert verdict(curves(norm=1e-6), [("ddp=2", BASE, Promise(True, True, ""))]).kind is Kind.DIFFERENT


def test_a_kept_promise_does_not_excuse_a_layout_beyond_the_bound():
    wrong = curves(loss=1e-3)
    found = verdict(wrong, [("ddp=2", wrong, TREE)])
    assert found.kind is Kind.DIFFERENT and found.against == "1"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.5, "0.5 times that of the reference, 1/2: the data-parallel group's size"),
        (2.0, "2 times that of the reference, 2: the data-parallel group's size"),
        (2048.0, "2048: the tokens of a step"),
        (3.3, "3.3 times that of the reference, near no size of this layout"),
    ],
)
def test_a_wrong_scale_that_the_loss_hides_is_named_by_the_norm(factor: float, words: str):
    found = verdict(curves(factor=factor))
    assert found.kind is Kind.DIFFERENT and found.first_step == 1
    assert words in found.reason


def test_nan_is_beyond_every_bound():
    found = verdict({"loss": [*LOSS[:3], math.nan], "grad_norm": NORM})
    assert found.kind is Kind.DIFFERENT and found.first_step == 4


def test_first_difference_takes_nan_for_equal_to_itself():
    assert first_difference([1.0, math.nan], [1.0, math.nan]) is None
    assert first_difference([1.0, 2.0], [1.0, math.nan]) == 2
