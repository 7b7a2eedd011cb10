"""The judgement of one layout: its curves against the reference's, held to a promise and a bound.

Pure computation on finished curves. Called by :mod:`trn_dist.parity.comparison`, shown by
:mod:`trn_dist.parity.report`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence

import numpy as np

from trn_dist.parity.promise import Promise
from trn_dist.parity.rounding import Bound

QUANTITIES = ("loss", "grad_norm")
WORDS = {"loss": "loss", "grad_norm": "gradient norm"}
_FACTOR_TOLERANCE = 0.02
"""How near the ratio of two curves must be to a group's size to be called by its name."""


class Kind(enum.Enum):
    BIT_EQUAL = "bit-equal"
    WITHIN_ROUNDING = "within rounding"
    DIFFERENT = "different"
    FAILED = "failed"

    @property
    def passes(self) -> bool:
        return self in (Kind.BIT_EQUAL, Kind.WITHIN_ROUNDING)


Curves = Mapping[str, Sequence[float]]
"""A run's figures by quantity, one number a step."""


@dataclasses.dataclass(frozen=True)
class Excess:
    """Where a curve is farthest from the reference, measured against what rounding may do.

    Attributes:
        quantity: ``loss`` or ``grad_norm``.
        step: counted from 1.
        deviation, bound: absolute, in the quantity's own unit.
    """

    quantity: str
    step: int
    deviation: float
    bound: float

    @property
    def ratio(self) -> float:
        if math.isnan(self.deviation):
            return math.inf
        if self.bound == 0:
            return 0.0 if self.deviation == 0 else math.inf
        return self.deviation / self.bound


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one layout under one clipping mode.

    Attributes:
        layout: its text.
        clipped: whether gradients were clipped.
        kind: the judgement.
        reason: one sentence: which promise was held or broken, which step and figure is out of bounds, which factor.
        against: the layout it was held to.
        worst: the largest deviation from the reference in units of the bound; None without a bound or a run.
        first_step: the first step that differs where it must not; None if there is none.
    """

    layout: str
    clipped: bool
    kind: Kind
    reason: str
    against: str
    worst: Excess | None = None
    first_step: int | None = None


def first_difference(a: Sequence[float], b: Sequence[float]) -> int | None:
    """The first step, counted from 1, at which two curves are not the same float; NaN equals NaN."""
    for step, (x, y) in enumerate(zip(a, b, strict=True), start=1):
        if x != y and not (math.isnan(x) and math.isnan(y)):
            return step
    return None


def judge(
    layout: str,
    clipped: bool,
    curves: Curves,
    reference: tuple[str, Curves],
    bounds: Mapping[str, Bound],
    promised: Sequence[tuple[str, Curves, Promise]],
    factors: Mapping[str, float],
) -> Verdict:
    """Judges a layout.

    Args:
        curves: the layout's figures.
        reference: name and figures of the layout that all are measured against.
        bounds: what rounding may do to each quantity of the reference.
        promised: name and figures of the layouts that this one must share bits with, and what it must share.
        factors: sizes that a wrong scale may come from, by a name for the report.
    """
    against, base = reference
    worst = max((_worst(quantity, curves, base, bounds[quantity]) for quantity in QUANTITIES), key=lambda e: e.ratio)
    for other, other_curves, promise in promised:
        for quantity in QUANTITIES:
            if quantity == "grad_norm" and not promise.grad_norm:
                continue
            step = first_difference(other_curves[quantity], curves[quantity])
            if step is not None:
                a, b = other_curves[quantity][step - 1], curves[quantity][step - 1]
                reason = (
                    f"{WORDS[quantity]} of step {step} is {b!r}, {other} has {a!r}; promised bit-equal: "
                    f"{promise.reason}"
                )
                return Verdict(layout, clipped, Kind.DIFFERENT, reason, other, worst, step)
    if worst.ratio > 1:
        step = min(s for s in (_first_beyond(q, curves, base, bounds[q]) for q in QUANTITIES) if s is not None)
        reason = (
            f"{WORDS[worst.quantity]} of step {worst.step} is {curves[worst.quantity][worst.step - 1]:.7g}, {against} "
            f"has {base[worst.quantity][worst.step - 1]:.7g}: {_times(worst.ratio)} what rounding can do; first beyond "
            f"it in step {step}{_name_factor(curves, base, factors)}"
        )
        return Verdict(layout, clipped, Kind.DIFFERENT, reason, against, worst, step)
    if promised:
        other, _, promise = promised[0]
        what = "loss and gradient norm" if promise.grad_norm else "loss (gradient norm within rounding)"
        names = ", ".join(name for name, _, _ in promised)
        return Verdict(layout, clipped, Kind.BIT_EQUAL, f"{what} bit-equal to {names}: {promise.reason}", other, worst)
    reason = "sums run in another order; within what rounding can do"
    if all(first_difference(base[quantity], curves[quantity]) is None for quantity in QUANTITIES):
        reason = "equal to the last bit, though only rounding was promised"
    return Verdict(layout, clipped, Kind.WITHIN_ROUNDING, reason, against, worst)


def _deviations(quantity: str, curves: Curves, base: Curves) -> np.ndarray:
    return np.abs(np.asarray(curves[quantity], dtype=np.float64) - np.asarray(base[quantity], dtype=np.float64))


def _worst(quantity: str, curves: Curves, base: Curves, bound: Bound) -> Excess:
    deviations, bounds = _deviations(quantity, curves, base), bound.total
    excesses = [
        Excess(quantity, step, float(deviation), float(limit))
        for step, (deviation, limit) in enumerate(zip(deviations, bounds, strict=True), start=1)
    ]
    return max(excesses, key=lambda excess: excess.ratio)


def _first_beyond(quantity: str, curves: Curves, base: Curves, bound: Bound) -> int | None:
    # Not "deviation > bound": NaN must count as beyond.
    beyond = ~(_deviations(quantity, curves, base) <= bound.total)
    return int(np.argmax(beyond)) + 1 if beyond.any() else None


def _times(ratio: float) -> str:
    return f"{ratio:,.1f} times" if math.isfinite(ratio) else "infinitely more than"


def _name_factor(curves: Curves, base: Curves, factors: Mapping[str, float]) -> str:
    """A wrong scale of the gradients shows as one ratio of the norms in the first steps, before weights differ."""
    ratios = np.asarray(curves["grad_norm"][:3], dtype=np.float64) / np.asarray(base["grad_norm"][:3], dtype=np.float64)
    if not np.isfinite(ratios).all() or abs(ratios[0] - 1) < _FACTOR_TOLERANCE:
        return ""
    ratio = float(ratios[0])
    for name, size in factors.items():
        for value, sign in ((size, ""), (1 / size, "1/")):
            if size > 1 and abs(ratio / value - 1) < _FACTOR_TOLERANCE:
                return f"; the gradient norm is {ratio:.4g} times that of the reference, {sign}{size:g}: {name}"
    return f"; the gradient norm is {ratio:.4g} times that of the reference, near no size of this layout"
