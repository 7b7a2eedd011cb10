"""How far rounding alone may carry a curve: the bound for a layout whose sums must run in another order.

[Note: The bound]

Two layouts of one model compute the same real-number function and differ in the order of sums. What that can do to the
curve of a quantity q (loss or gradient norm) at step k is bounded by

    bound(k) = floor(k) + t * spread(k)

* ``floor`` is the rounding of the last sum of the step itself, the mean of n token losses or the root of the sum of n
  squares. All addends have one sign, so its condition is 1, and the error is |q(k)| * u * growth(n). For the norm the
  kernel's error is measured as well, against float64, and may stand on either side: the CPU adds the squares of a
  tensor one after the other, and small ones vanish beside a large sum (7e-5 of the norm for 524,288 elements).
* ``spread`` is what rounding inside forward and backward, this step's and all steps' before, does to q. It is measured:
  runs of the reference in which every module's output and gradient is moved by u * growth(n), see
  :mod:`trn_dist.parity.perturbation`; the root mean square of their deviations, never less than at an earlier step.
  So the condition of every sum is in it as it is, and training itself propagates it.
* ``t`` is Student's quantile for as many degrees of freedom as there are members, since the spread is estimated.

u is the unit roundoff of the dtype. ``growth(n)`` is the growth of rounding in a sum of n addends: vectorised kernels
keep LANES partial sums, each a chain of n / LANES additions whose roundings are independent, so they grow with the root
of their number, and a tree over the lanes (Higham, Accuracy and Stability of Numerical Algorithms, chapters 2.8 and 4).

Imports numpy only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

LANES = 16
UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}
FALSE_ALARM = 1e-3
"""Chance that one step of one correct layout lies outside t * spread, were the deviations normal."""


def growth(addends: int) -> float:
    """How many rounding units a sum of so many addends may be off, statistically."""
    return math.log2(LANES) + math.sqrt(max(1.0, addends / LANES))


def student_quantile(degrees_of_freedom: int, tail: float = FALSE_ALARM) -> float:
    """The t for which P(|T| > t) = ``tail``."""
    if degrees_of_freedom < 1:
        raise ValueError(f"degrees_of_freedom = {degrees_of_freedom}: expected 1 or more")
    half = degrees_of_freedom / 2
    constant = math.exp(math.lgamma(half + 0.5) - math.lgamma(half)) / math.sqrt(degrees_of_freedom * math.pi)
    # P(|T| > t) as an integral over an angle, t = sqrt(dof) * tan(angle): its integrand is bounded.
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = constant * math.sqrt(degrees_of_freedom) * np.cos(angles) ** (degrees_of_freedom - 1)
    steps = (density[1:] + density[:-1]) / 2 * np.diff(angles)
    beyond = 2 * np.cumsum(steps[::-1])[::-1]
    return math.sqrt(degrees_of_freedom) * math.tan(angles[int(np.argmax(beyond <= tail))])


@dataclasses.dataclass(frozen=True)
class Sums:
    """The last sums of a training step, from which bounds are derived.

    Attributes:
        loss: number of addends of the loss: tokens of the global batch.
        grad_norm: number of addends of the squared gradient norm: parameters.
        dtype: of activations; the last sums themselves run in float32.
    """

    loss: int
    grad_norm: int
    dtype: str = "float32"

    @property
    def amplitude(self) -> float:
        """How far a perturbed run moves everything: what a sum over the step's tokens may be off, and the rounding of
        the result to the activations' dtype, which another layout may do once more.
        """
        low = 2 * UNIT_ROUNDOFF[self.dtype] if self.dtype != "float32" else 0.0
        return UNIT_ROUNDOFF["float32"] * growth(self.loss) + low


@dataclasses.dataclass(frozen=True)
class Bound:
    """What rounding may do to one curve, step by step; arrays of shape (steps,).

    Attributes:
        floor: of the last sum of the step.
        spread: root mean square deviation of the perturbed runs, never falling.
        quantile: the factor before the spread.
    """

    floor: np.ndarray
    spread: np.ndarray
    quantile: float

    @property
    def total(self) -> np.ndarray:
        return self.floor + self.quantile * self.spread


def derive_bound(
    reference: Sequence[float],
    members: Sequence[Sequence[float]],
    addends: int,
    dtype: str = "float32",
    measured_error: Sequence[float] | None = None,
) -> Bound:
    """The bound of one curve; see [Note: The bound].

    Args:
        reference: the quantity at every step of the unperturbed reference.
        members: the same for each perturbed run.
        addends: number of addends of the step's last sum.
        dtype: in which that sum runs.
        measured_error: of that sum in the reference, at every step, where it was measured.
    """
    if not members:
        raise ValueError("no perturbed run: the spread cannot be measured")
    curve = np.asarray(reference, dtype=np.float64)
    runs = np.asarray(members, dtype=np.float64)
    if runs.shape[1:] != curve.shape:
        raise ValueError(f"perturbed runs of {runs.shape[1]} steps, reference of {len(curve)}")
    spread = np.maximum.accumulate(np.sqrt(np.mean((runs - curve) ** 2, axis=0)))
    floor = np.abs(curve) * UNIT_ROUNDOFF[dtype] * growth(addends)
    if measured_error is not None:
        floor = floor + 2 * np.asarray(measured_error, dtype=np.float64)
    return Bound(floor, spread, student_quantile(len(runs)))
