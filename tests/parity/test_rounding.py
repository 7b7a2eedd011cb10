"""The derived bound: its quantile, its growth, and that sums in another order stay within it."""

import math

import numpy as np
import pytest

from trn_dist.parity.rounding import UNIT_ROUNDOFF, derive_bound, growth, student_quantile


@pytest.mark.parametrize(
    ("degrees_of_freedom", "tail", "expected"),  # from published tables
    [(1, 0.05, 12.706), (4, 0.05, 2.776), (4, 0.001, 8.610), (10, 0.01, 3.169), (120, 0.05, 1.980)],
)
def test_students_quantile(degrees_of_freedom: int, tail: float, expected: float):
    assert student_quantile(degrees_of_freedom, tail) == pytest.approx(expected, rel=1e-3)


def test_no_degrees_of_freedom_are_refused():
    with pytest.raises(ValueError, match="expected 1 or more"):
        student_quantile(0)


@pytest.mark.parametrize("addends", [16, 2048, 2**20])
def test_sums_in_another_order_stay_within_the_growth(addends: int):
    numbers = np.random.default_rng(0).random(addends).astype(np.float32)
    exact = math.fsum(map(float, numbers))
    for seed in range(20):
        shuffled = np.random.default_rng(seed).permutation(numbers).reshape(16, -1)
        lanes = np.zeros(16, dtype=np.float32)
        for column in shuffled.T:
            lanes += column
        assert abs(float(lanes.sum()) - exact) <= exact * UNIT_ROUNDOFF["float32"] * growth(addends)
        if addends > 2**16:
            break  # the loop over columns is slow


def test_the_bound_joins_the_last_sum_and_the_measured_spread():
    reference = [8.0, 7.0, 6.0]
    members = [[8.0, 7.0, 6.0 + 3e-5], [8.0, 7.0 + 1e-5, 6.0 - 4e-5]]
    bound = derive_bound(reference, members, addends=2048)
    floor = np.array(reference) * 2.0**-24 * growth(2048)
    assert bound.floor == pytest.approx(floor)
    assert bound.spread == pytest.approx([0, 1e-5 / math.sqrt(2), 5e-5 / math.sqrt(2)], rel=1e-6)
    assert bound.total == pytest.approx(floor + student_quantile(2) * bound.spread)


def test_the_spread_never_falls():
    bound = derive_bound([1.0, 1.0], [[1.1, 1.0], [0.9, 1.0]], addends=16)
    assert bound.spread[1] == bound.spread[0] == pytest.approx(0.1)


def test_a_measured_error_widens_the_bound_on_both_sides():
    plain = derive_bound([1.0], [[1.0], [1.0]], addends=16)
    wider = derive_bound([1.0], [[1.0], [1.0]], addends=16, measured_error=[1e-4])
    assert wider.floor - plain.floor == pytest.approx([2e-4])


def test_no_members_and_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="no perturbed run"):
        derive_bound([1.0], [], addends=16)
    with pytest.raises(ValueError, match="perturbed runs of 2 steps, reference of 1"):
        derive_bound([1.0], [[1.0, 2.0]], addends=16)
