"""What a difference between two tensors looks like: a factor, a missing sum, swapped parts, old values, other draws.

Pure computation on two whole tensors, without knowledge of what they are. Called by :mod:`trn_dist.parity.divergence`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import torch

from trn_dist.parity.assemble import as_real

_EQUAL = 1e-4
"""Relative distance below which two tensors are the same but for rounding and what came of it before."""
_LOW_PRECISION = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Cause(enum.Enum):
    ROUNDING = "rounding"
    NOT_FINITE = "not finite"
    SCALE = "wrong scale"
    NOT_REDUCED = "missing reduction"
    REORDERED = "parts in another order"
    REPEATED = "the same part twice"
    MISSING = "missing part"
    SHIFTED = "shifted"
    STALE = "stale values"
    RANDOM = "another random stream"
    LOW_PRECISION = "low precision"
    DISAGREE = "ranks disagree"
    OTHER = "no known pattern"


@dataclasses.dataclass(frozen=True)
class Explanation:
    cause: Cause
    text: str


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|b - a| / |a| in the Euclidean norm; infinite if a is zero and b is not."""
    a, b = as_real(a), as_real(b)
    distance, size = float((b - a).norm()), float(a.norm())
    return distance / size if size else (float("inf") if distance else 0.0)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Mapping[str, int],
    *,
    factors: Mapping[str, float] | None = None,
    earlier: torch.Tensor | None = None,
    tolerance: float = _EQUAL,
) -> Explanation:
    """The likeliest cause of a difference.

    Args:
        a: what is right.
        b: what was found, of the same shape.
        groups: sizes of the groups of ranks, by name (``tp``: 2).
        factors: other sizes that a wrong scale may come from, by what they mean.
        earlier: what ``b`` may be an old value of.
        tolerance: relative distance that rounding may have caused.
    """
    if a.shape != b.shape:
        return Explanation(Cause.MISSING, f"shape {tuple(b.shape)} in place of {tuple(a.shape)}")
    x, y = as_real(a), as_real(b)
    if not torch.isfinite(y).all() and torch.isfinite(x).all():
        count = int((~torch.isfinite(y)).sum())
        return Explanation(Cause.NOT_FINITE, f"{count} of {y.numel()} elements are infinite or not a number")
    distance = relative_distance(x, y)
    if distance <= tolerance:
        return Explanation(Cause.ROUNDING, f"relative distance {distance:.1e}, as rounding makes it")
    if earlier is not None and earlier.shape == b.shape and relative_distance(earlier, y) < distance / 100:
        return Explanation(Cause.STALE, "the values are those from before the last update")
    near = max(_EQUAL, tolerance)
    for found in (
        _reordered(x, y, groups, near),
        _random(x, y),
        _scaled(x, y, groups, factors or {}),
        _in_part(x, y, groups, near),
        _low_precision(x, y, distance),
        _shifted(x, y, groups, near),
    ):
        if found is not None:
            return found
    return Explanation(Cause.OTHER, f"relative distance {distance:.2g}, no pattern found")


def explain_replicas(
    a: torch.Tensor | None,
    replicas: Mapping[int, torch.Tensor],
    dimension: str,
    *,
    tolerance: float = _EQUAL,
) -> Explanation:
    """Why ranks that should hold the same do not.

    Args:
        a: what they should hold, or None if unknown.
        replicas: what they hold, by rank.
        dimension: the mesh dimension that they differ in.
    """
    ranks = sorted(replicas)
    named = f"ranks {', '.join(map(str, ranks[:8]))} of {dimension}"
    tensors = [as_real(replicas[rank]) for rank in ranks]
    if a is not None and all(tensor.shape == as_real(a).shape for tensor in tensors):
        x, total = as_real(a), torch.stack(tensors).sum(0)
        near = max(tolerance, _EQUAL)
        if relative_distance(x, total) <= near:
            return Explanation(Cause.NOT_REDUCED, f"not summed over {dimension}: the {named} hold addends of it")
        if relative_distance(x, total / len(tensors)) <= near:
            return Explanation(Cause.NOT_REDUCED, f"not averaged over {dimension}: the {named} hold their own values")
        zeros = [tensor == 0 for tensor in tensors]
        share = [float(zero.double().mean()) for zero in zeros]
        if min(share) > 0.01 and not torch.equal(zeros[0], zeros[1]):
            return Explanation(Cause.RANDOM, f"the {named} draw different random numbers for the same activation")
        wrong = [r for r, tensor in zip(ranks, tensors, strict=True) if relative_distance(x, tensor) > near]
        if 0 < len(wrong) < len(ranks):
            return Explanation(
                Cause.DISAGREE, f"the {named} should hold the same; wrong on {', '.join(map(str, wrong))}"
            )
    if tensors[0].numel() == 1:
        values = ", ".join(f"{float(tensor):.6g}" for tensor in tensors[:8])
        return Explanation(Cause.DISAGREE, f"the {named} should hold the same and hold {values}")
    return Explanation(Cause.DISAGREE, f"the {named} should hold the same and do not")


# --- Patterns, each None where it does not fit


def _blocks(tensor: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    return list(tensor.chunk(count, dim=dim))


def _reordered(x: torch.Tensor, y: torch.Tensor, groups: Mapping[str, int], near: float) -> Explanation | None:
    """Parts of y that are other parts of x."""
    for name, size in groups.items():
        for dim in range(x.dim()):
            for count in (size, 2 * size):
                if size < 2 or x.shape[dim] % count or x.shape[dim] < count:
                    continue
                theirs, found = _blocks(x, dim, count), []
                for block in _blocks(y, dim, count):
                    match = [i for i, other in enumerate(theirs) if relative_distance(other, block) <= near]
                    found.append(match)
                if any(not match for match in found):
                    continue
                # A part that equals its own place is in its place, though another may be equal too.
                places = [i if i in match else match[0] for i, match in enumerate(found)]
                if places == list(range(count)):
                    continue
                where = f"dimension {dim} in {count} parts over {name}"
                if len(set(places)) < count:
                    twice = next(place for place in places if places.count(place) > 1)
                    who = [i for i, place in enumerate(places) if place == twice]
                    return Explanation(
                        Cause.REPEATED, f"{where}: parts {' and '.join(map(str, who))} both hold part {twice}"
                    )
                moved = [f"{i} holds {place}" for i, place in enumerate(places) if place != i]
                return Explanation(Cause.REORDERED, f"{where}: part {', '.join(moved[:4])}")
    return None


def _random(x: torch.Tensor, y: torch.Tensor) -> Explanation | None:
    """Dropout leaves zeros; as many of them elsewhere is another draw."""
    zero_x, zero_y = x == 0, y == 0
    share_x, share_y = float(zero_x.double().mean()), float(zero_y.double().mean())
    if min(share_x, share_y) < 0.01 or share_x > 0.99 or abs(share_x - share_y) > 0.2 * share_x:
        return None
    both = float((zero_x & zero_y).double().mean())
    if both > 0.9 * share_x:
        return None
    return Explanation(Cause.RANDOM, f"{share_x:.0%} zeros in both, in other places: drawn from another random stream")


def _scaled(
    x: torch.Tensor, y: torch.Tensor, groups: Mapping[str, int], factors: Mapping[str, float]
) -> Explanation | None:
    square = float((x * x).sum())
    if square == 0:
        return None
    factor = float((x * y).sum()) / square
    if factor == 0:
        return Explanation(Cause.MISSING, "all zero") if not y.any() else None
    if float((y - factor * x).norm()) > 0.01 * float(y.norm()) or abs(factor - 1) < 1e-3:
        return None
    for name, size in [*((f"the size of the group {name}", size) for name, size in groups.items()), *factors.items()]:
        if size <= 1:
            continue
        if abs(factor / size - 1) < 0.01:
            return Explanation(
                Cause.SCALE, f"{factor:.4g} times too large: {name}; a reduction is doubled, or an average is a sum"
            )
        if abs(factor * size - 1) < 0.01:
            return Explanation(
                Cause.SCALE, f"{factor:.4g} = 1/{size:g} of what it should be: {name}; averaged twice, or not summed"
            )
    return Explanation(Cause.SCALE, f"{factor:.4g} times what it should be, near no group's size")


def _in_part(x: torch.Tensor, y: torch.Tensor, groups: Mapping[str, int], near: float) -> Explanation | None:
    """A difference that is confined to some ranks' parts. Of several ways to cut, that with the least part wrong."""
    fits: list[tuple[float, str, torch.Tensor, torch.Tensor]] = []
    for name, size in groups.items():
        for dim in range(x.dim()):
            if size < 2 or x.shape[dim] % size:
                continue
            pairs = list(zip(_blocks(x, dim, size), _blocks(y, dim, size), strict=True))
            wrong = [i for i, (a, b) in enumerate(pairs) if relative_distance(a, b) > near]
            if wrong and len(wrong) < size:
                where = f"only in part {', '.join(map(str, wrong))} of dimension {dim} cut in {size} as {name} cuts it"
                fits.append((len(wrong) / size, where, *pairs[wrong[0]]))
    if not fits:
        return None
    _, where, a, b = min(fits, key=lambda fit: fit[0])
    if not b.any():
        return Explanation(Cause.MISSING, f"{where}: zero there")
    inner = _scaled(a, b, {}, {}) or _shifted(a, b, groups, near)
    if inner is not None:
        return Explanation(inner.cause, f"{where}: {inner.text}")
    return Explanation(Cause.OTHER, f"{where}: relative distance {relative_distance(a, b):.2g} there")


def _low_precision(x: torch.Tensor, y: torch.Tensor, distance: float) -> Explanation | None:
    for name, dtype in _LOW_PRECISION.items():
        if distance > 2 * torch.finfo(dtype).eps:
            continue
        # Values that went through the type are representable in it, up to a factor that a later average brings in.
        representable = float((y.float().to(dtype).double() == y).double().mean())
        if representable > 0.99 and float((x.float().to(dtype).double() == x).double().mean()) < 0.9:
            return Explanation(Cause.LOW_PRECISION, f"every value is a {name} number; computed or reduced in {name}")
    moved = (y - x).abs() / x.abs().clamp_min(float(x.abs().mean()) * 1e-3 + 1e-300)
    middle = float(moved.flatten().median()) if moved.numel() < 2**24 else float(moved.flatten()[:: 2**4].median())
    eps = torch.finfo(torch.bfloat16).eps
    if eps / 32 < middle < eps and distance < 2 * eps:
        return Explanation(Cause.LOW_PRECISION, f"each value is off by about {middle:.1e}, the rounding of bfloat16")
    return None


def _shifted(x: torch.Tensor, y: torch.Tensor, groups: Mapping[str, int], near: float) -> Explanation | None:
    for dim in range(x.dim()):
        length = x.shape[dim]
        if length < 8:
            continue
        shifts = {s for size in groups.values() if size > 1 for s in (length // size, length // (2 * size))}
        for shift in sorted({1, 2, 3, 4} | shifts):
            for signed in (shift, -shift):
                if not 0 < shift <= length // 2:
                    continue
                kept = length - shift
                moved, fixed = (y.narrow(dim, shift, kept), x.narrow(dim, 0, kept))
                if signed < 0:
                    moved, fixed = y.narrow(dim, 0, kept), x.narrow(dim, shift, kept)
                if fixed.norm() > 0 and relative_distance(fixed, moved) <= near:
                    return Explanation(Cause.SHIFTED, f"shifted by {signed} along dimension {dim}")
    return None
