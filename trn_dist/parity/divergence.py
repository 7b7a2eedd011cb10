"""The first tensor in which two layouts differ, and what the difference looks like.

The road of ``trn parity --bisect A B``: both layouts' curves give the step → both run again with a recorder in that
step and the one before (a perturbed run of A beside them measures what rounding does to each tensor) → the recorded
tensors are put together and compared in program order. :func:`find_divergence` does the last part alone, for
recordings that a program with a trainer of its own has made. Called by :mod:`trn_dist.cli.parity`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from trn_dist.parity.assemble import CannotAssemble, Key, RecordedStep, Whole, as_real
from trn_dist.parity.cause import Cause, Explanation, explain, explain_replicas
from trn_dist.parity.comparison import (
    ComparisonFailed,
    Mode,
    check_layouts,
    compare,
    perturbation_settings,
    prepare_words,
    scale_factors,
)
from trn_dist.parity.layout import Layout
from trn_dist.parity.recorder import STEPS
from trn_dist.parity.run_queue import RunQueue
from trn_dist.parity.training import RanksDisagree, RunFailed, plan_training
from trn_dist.parity.verdict import QUANTITIES, Curves, Kind, Verdict, first_difference

SPREADS = 16.0
"""A tensor differs if it is farther away than this many times what perturbing by rounding units has moved it."""
_UNMEASURED = 1e-5
"""Relative distance taken for rounding where no perturbed run measured it."""
_FLOOR = 32 * 2.0**-24


@dataclasses.dataclass(frozen=True)
class Finding:
    """One tensor that differs.

    Attributes:
        key: stage, module or parameter, what.
        distance: Euclidean norm of the difference.
        size: Euclidean norm of the tensor in A.
        allowed: distance that rounding may cause.
        explanation: what it looks like.
    """

    key: Key
    distance: float
    size: float
    allowed: float
    explanation: Explanation

    def __str__(self) -> str:
        return f"{describe(self.key)}: {self.explanation.cause.value}: {self.explanation.text}"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where two layouts part.

    Attributes:
        a, b: names of the layouts.
        step: the step in which the finding lies; that looked into last if there is none.
        finding: the first tensor that differs by more than rounding, or None.
        first_bit: the first tensor with any bit different and its relative distance, or None.
        compared: number of tensors compared.
        skipped: what could not be compared, with the reason.
    """

    a: str
    b: str
    step: int
    finding: Finding | None
    first_bit: tuple[Key, float] | None
    compared: int
    skipped: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.finding is None


_STAGES = {
    "start": "before the step",
    "forward": "forward",
    "backward": "backward",
    "gradient": "gradient before clipping",
    "clipped": "after clipping",
    "update": "after the update",
}


def describe(key: Key) -> str:
    stage, name, what = key
    if stage == "backward":
        what = f"gradient of its {what}"
    return f"{_STAGES[stage]}, {name}, {what}"


def find_divergence(
    a: RecordedStep,
    b: RecordedStep,
    *,
    names: tuple[str, str] = ("A", "B"),
    samples: int,
    perturbed: RecordedStep | None = None,
    before: RecordedStep | None = None,
    gradient_scale: tuple[float, float] = (1.0, 1.0),
    factors: Mapping[str, float] | None = None,
) -> Divergence:
    """Compares one recorded step of two runs in program order.

    Args:
        a, b: what is right, best of a single rank, and what is in question.
        samples: of the global batch.
        perturbed: the same step of A moved by rounding units; measures what rounding does to each tensor.
        before: B's step before, to know old values by.
        gradient_scale: factors that make the gradients of activations comparable: a data-parallel layout that averages
            parameters' gradients has activations' gradients too large by its degree.
        factors: sizes that a wrong scale may come from, beside the groups' own.
    """
    groups = {name: b.size(name) for name in ("dp", "tp", "cp", "pp") if b.size(name) > 1}
    first_bit: tuple[Key, float] | None = None
    compared = 0
    skipped: list[str] = []
    norm_error = 0.0  # relative, of the global norm, which clipping brings into all gradients
    for key in a.order:
        if key not in b:
            continue
        count = _missing_calls(a, b, key, samples)
        if count is not None:
            return Divergence(*names, b.step, Finding(key, 0.0, 0.0, 0.0, count), first_bit, compared, tuple(skipped))
        try:
            right = a.whole(key, samples=samples)
            found = b.whole(key, like=right.tensor, samples=samples)
        except CannotAssemble as error:
            skipped.append(f"{describe(key)}: {error}")
            continue
        compared += 1
        x, y = as_real(right.tensor), as_real(found.tensor)
        if key[0] == "backward":
            x, y = x * gradient_scale[0], y * gradient_scale[1]
        size = float(x.norm())
        allowed = _allowed(key, right, perturbed, samples, gradient_scale[0], size)
        if key[2] == "gradient norm":
            # The layout's own kernel calls may be off as far, on the other side.
            norm_error = 2 * _norm_error(a, float(x)) / float(x) if x.any() else 0.0
        if key[0] == "clipped" or key[2].startswith("optimizer state"):
            # Squares of gradients carry it twice.
            allowed += 2 * norm_error * size
        explanation = _compare(key, x, y, found, allowed, size, groups, factors or {}, b, before)
        if first_bit is None and (explanation is not None or not torch.equal(x, y)):
            first_bit = (key, float((y - x).norm()) / size if x.shape == y.shape and size else float("inf"))
        if explanation is not None:
            distance = float((y - x).norm()) if x.shape == y.shape else float("nan")
            finding = Finding(key, distance, size, allowed, explanation)
            return Divergence(*names, b.step, finding, first_bit, compared, tuple(skipped))
    return Divergence(*names, b.step, None, first_bit, compared, tuple(skipped))


def _allowed(key: Key, right: Whole, perturbed: RecordedStep | None, samples: int, scale: float, size: float) -> float:
    if not right.tensor.is_floating_point() and not right.tensor.is_complex():
        return 0.0
    if perturbed is None or key not in perturbed:
        return _UNMEASURED * size
    moved = as_real(perturbed.whole(key, samples=samples).tensor) - as_real(right.tensor)
    return SPREADS * float(moved.norm()) * (scale if key[0] == "backward" else 1.0) + _FLOOR * size


def _norm_error(a: RecordedStep, norm: float) -> float:
    """How far the kernel that adds the squares of gradients is off, on A's gradients."""
    squares = [float(as_real(a.whole(key).tensor).square().sum()) for key in a.order if key[0] == "gradient"]
    return abs(norm - sum(squares) ** 0.5)


def _missing_calls(a: RecordedStep, b: RecordedStep, key: Key, samples: int) -> Explanation | None:
    """A microbatch that was not computed: its samples are on no rank."""
    stage, name, what = key
    if stage not in ("forward", "backward") or what.endswith("as used"):
        return None
    counts = set(b.calls(key).values())
    if len(counts) > 1:
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(b.calls(key).items()))
        return Explanation(Cause.MISSING, f"not as many microbatches on all ranks ({shown})")
    forward = ("forward", name, what)
    if stage == "backward" and forward in b and forward in a:
        mine, expected = counts.pop(), set(b.calls(forward).values()).pop()
        if mine < expected and set(a.calls(key).values()) == set(a.calls(forward).values()):
            return Explanation(Cause.MISSING, f"{mine} microbatches of {expected} in backward: one was dropped")
    if key == ("forward", "model", "input 0"):
        total = sum(b.whole(key).tensor.shape[:1]) if b.size("tp") * b.size("cp") == 1 else samples
        if total < samples:
            return Explanation(Cause.MISSING, f"{total} samples of {samples}: a microbatch was dropped")
    return None


def _compare(
    key: Key,
    x: torch.Tensor,
    y: torch.Tensor,
    found: Whole,
    allowed: float,
    size: float,
    groups: Mapping[str, int],
    factors: Mapping[str, float],
    b: RecordedStep,
    before: RecordedStep | None,
) -> Explanation | None:
    """What is wrong with a tensor, or None if it is right but for rounding."""
    tolerance = allowed / size if size else 0.0
    if found.replicas:
        tensors = [as_real(tensor) for tensor in found.replicas.values()]
        apart = max(
            float((tensor - tensors[0]).norm()) if tensor.shape == tensors[0].shape else float("inf")
            for tensor in tensors
        )
        if apart > allowed or key[2] in ("learning rate", "gradient norm"):
            right = x if key[0] != "backward" else None
            return explain_replicas(right, found.replicas, found.dimension, tolerance=tolerance)
    if x.shape == y.shape and float((y - x).norm()) <= allowed:
        return None
    if key[0] == "forward" and key[2].endswith(" as used"):
        own = b.whole(("start", f"{key[1]}.{key[2].removesuffix(' as used')}", "parameter"))
        if torch.equal(as_real(own.tensor), y):
            return None  # the parameter itself is to blame, and was compared before
        earlier_key = ("start", f"{key[1]}.{key[2].removesuffix(' as used')}", "parameter")
        earlier = as_real(before.whole(earlier_key).tensor) if before is not None and earlier_key in before else None
        return explain(x, y, groups, factors=factors, earlier=earlier, tolerance=tolerance)
    if key[0] == "update" and key[2].startswith("optimizer state"):
        if key[2] == "optimizer state step":
            return Explanation(Cause.STALE, f"the optimizer has made {float(y):g} steps, expected {float(x):g}")
        gradient = ("clipped", key[1], "gradient")
        if (
            gradient in b
            and _parallel(y, as_real(b.whole(gradient).tensor), key[2])
            and not _parallel(x, as_real(b.whole(gradient).tensor), key[2])
        ):
            return Explanation(Cause.STALE, "the optimizer's state holds this step's gradient only: it began anew")
    explanation = explain(x, y, groups, factors=factors, tolerance=tolerance)
    return explanation


def _parallel(state: torch.Tensor, gradient: torch.Tensor, what: str) -> bool:
    """Whether an average of gradients consists of this gradient alone."""
    if "sq" in what:
        gradient = gradient * gradient
    if state.shape != gradient.shape or not gradient.any() or not state.any():
        return False
    return float((state * gradient).sum() / (state.norm() * gradient.norm())) > 1 - 1e-6


# --- The road of `trn parity --bisect`


def bisect_layouts(
    recipe: Path,
    a: Layout,
    b: Layout,
    overrides: Sequence[str] = (),
    *,
    queue: RunQueue,
    steps: int,
    step: int | None = None,
    clipped: bool = False,
) -> Divergence:
    """Finds the first tensor in which layout ``b`` of a recipe differs from layout ``a``.

    Args:
        step: the step to look into, with the recipe's own clipping; None finds it on the curves.
        clipped: without ``step``, whether the curves are those of clipped runs.

    Raises:
        RecipeError, LayoutError, ComparisonFailed: as :func:`trn_dist.parity.comparison.compare`.
    """
    check_layouts(recipe, [a, b], overrides, steps)
    words, global_batch_size, sums = prepare_words(recipe, a, overrides, queue, steps)
    mode: Mode | None = None
    if step is None:
        comparison = compare(recipe, [a, b], overrides, queue=queue, steps=steps, clipping=(clipped,))
        mode = comparison.modes[0]
        for verdict in comparison.verdicts:
            if verdict.kind is Kind.FAILED:
                raise ComparisonFailed(f"{verdict.layout}: {verdict.reason}")
        step = _first_step(mode, comparison.verdicts, a.text, b.text)
        if step is None:
            return Divergence(a.text, b.text, steps, None, None, 0)
        words += ["--training.max_norm", repr(mode.max_norm)]
    if step > steps:
        raise ComparisonFailed(f"--step {step}: the runs have {steps} steps; choose more with --steps")
    # A loss that differs is computed with parameters of the update before.
    recorded_steps = [step - 1, step] if step > 1 else [step]
    settings = ((STEPS, ",".join(map(str, recorded_steps))),)
    runs = {
        f"{a} (recorded)": (a, "observe", settings),
        f"{b} (recorded)": (b, "observe", settings),
        f"{a} (perturbed, recorded)": (
            a,
            "observe_perturbed",
            settings + perturbation_settings(1, sums),
        ),
    }
    trainings = {
        name: plan_training(recipe, words, layout, global_batch_size, f"trn_dist.parity.recorder:{observer}", extra)
        for name, (layout, observer, extra) in runs.items()
    }
    results = queue.run(list(trainings.items()))
    for name, result in results.items():
        # Ranks that disagree have recorded what there is to find.
        if isinstance(result, RunFailed) and not isinstance(result, RanksDisagree):
            raise ComparisonFailed(f"{name}: {result}")
    for layout in (a, b):
        if mode is not None and layout.text in mode.curves:
            _check_unchanged(layout, mode.curves[layout.text], results[f"{layout} (recorded)"])
    folders = [queue.cache / training.key for training in trainings.values()]
    before: RecordedStep | None = None
    divergence: Divergence | None = None
    for number in recorded_steps:
        right, found, moved = (RecordedStep(folder, number) for folder in folders)
        divergence = find_divergence(
            right,
            found,
            names=(a.text, b.text),
            samples=global_batch_size,
            perturbed=moved,
            before=before,
            gradient_scale=(titan_gradient_scale(a), titan_gradient_scale(b)),
            factors=scale_factors(b, global_batch_size, sums.loss),
        )
        if divergence.finding is not None:
            break
        before = found
    assert divergence is not None
    return divergence


def titan_gradient_scale(layout: Layout) -> float:
    """What makes an activation's gradient in TorchTitan's trainer that of the mean over the global batch.

    Up to 0.2.1 each rank takes the mean over its own tokens and the ranks' parameter gradients are averaged; from 0.2.2
    on the loss is divided by the tokens of all ranks at once.
    """
    major, minor, patch = importlib.metadata.version("torchtitan").split(".")[:3]
    if (int(major), int(minor), int(patch)) >= (0, 2, 2):
        return 1.0
    return 1.0 / (layout.dp * layout.cp)


def _first_step(mode: Mode, verdicts: Sequence[Verdict], a: str, b: str) -> int | None:
    """The first step that differs by more than rounding; else the first with any bit different; else None."""
    if a not in mode.curves or b not in mode.curves:  # ranks disagree
        return min(verdict.first_step for verdict in verdicts if verdict.first_step is not None)
    beyond = []
    for quantity in QUANTITIES:
        apart = np.abs(np.asarray(mode.curves[a][quantity]) - np.asarray(mode.curves[b][quantity]))
        outside = ~(apart <= mode.bounds[quantity].total)
        if outside.any():
            beyond.append(int(np.argmax(outside)) + 1)
    if beyond:
        return min(beyond)
    bits = [first_difference(mode.curves[a][quantity], mode.curves[b][quantity]) for quantity in QUANTITIES]
    return min((step for step in bits if step is not None), default=None)


def _check_unchanged(layout: Layout, curves: Curves, steps: object) -> None:
    assert isinstance(steps, list)
    for quantity in QUANTITIES:
        recorded = [getattr(step, quantity) for step in steps]
        step = first_difference(curves[quantity], recorded)
        if step is not None:
            raise ComparisonFailed(
                f"{layout}: run again with a recorder, {quantity} of step {step} is {recorded[step - 1]!r}, without "
                f"{curves[quantity][step - 1]!r}: this layout does not repeat its own numbers"
            )


def divergence_as_json(divergence: Divergence) -> dict[str, Any]:
    """The divergence in plain JSON types (NaN and infinity as text)."""

    def number(value: float) -> float | str:
        return float(value) if math.isfinite(value) else repr(float(value))

    finding = divergence.finding
    return {
        "a": divergence.a,
        "b": divergence.b,
        "equal": divergence.equal,
        "step": divergence.step,
        "compared": divergence.compared,
        "first_bit": None
        if divergence.first_bit is None
        else {"tensor": describe(divergence.first_bit[0]), "relative_distance": number(divergence.first_bit[1])},
        "finding": None
        if finding is None
        else {
            "tensor": describe(finding.key),
            "cause": finding.explanation.cause.value,
            "explanation": finding.explanation.text,
            "distance": number(finding.distance),
            "size": number(finding.size),
            "allowed": number(finding.allowed),
        },
        "skipped": list(divergence.skipped),
    }


def print_divergence(divergence: Divergence, console: Console) -> None:
    d = divergence
    if d.first_bit is None and d.finding is None:
        console.print(f"{d.b} has every bit of {d.a} ({d.compared} tensors compared)", highlight=False)
        return
    if d.first_bit is not None:
        key, distance = d.first_bit
        console.print(
            f"step {d.step}, first bit that differs: {describe(key)} (relative distance {distance:.2g})",
            highlight=False,
            markup=False,
        )
    if d.finding is None:
        console.print(f"no tensor of {d.b} differs from {d.a} by more than rounding ({d.compared} compared)")
    else:
        f = d.finding
        console.print(f"step {d.step}, first tensor that differs by more than rounding:", highlight=False)
        console.print(f"  {describe(f.key)}", highlight=False, markup=False)
        console.print(f"  {f.explanation.cause.value}: {f.explanation.text}", highlight=False, markup=False)
        if f.size:
            console.print(
                f"  distance {f.distance:.3g} of {f.size:.3g}, rounding explains {f.allowed:.2g}", highlight=False
            )
    for line in d.skipped[:5]:
        console.print(f"not compared: {line}", highlight=False, markup=False)
