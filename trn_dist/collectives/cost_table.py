"""What a collective costs as a function of its size: a short table of straight pieces in integer picoseconds.

The table is what leaves this package: the process group evaluates it in C++ with two multiplications and no Python.
Called by ``communicator.py``, which fills it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trn_dist.hardware import Link

MIB_SHIFT = 20


class LinkPhase(NamedTuple):
    """A stretch of a transfer: ``ps_per_byte`` of its cost, in which it takes these parts (up to 1) of links' rates."""

    ps_per_byte: float
    loads: dict[Link, float]


class Line(NamedTuple):
    """A straight cost: ``alpha_us`` whatever the size, ``ps_per_byte`` for each byte; ``bottleneck`` names the link
    that sets the latter. ``phases``, if they were asked for, say which links are loaded when."""

    algorithm: str
    alpha_us: float
    ps_per_byte: float
    bottleneck: str = ""
    phases: tuple[LinkPhase, ...] = ()


class CostPiece(NamedTuple):
    """From ``from_bytes`` on (to the next piece), ``alpha_ps + bytes * beta_ps_per_mib / 2^20``, rounded down.
    ``latency_ps`` of it load no link; what follows goes through ``phases``."""

    from_bytes: int
    algorithm: str
    alpha_ps: int
    beta_ps_per_mib: int
    bottleneck: str = ""
    latency_ps: int = 0
    phases: tuple[LinkPhase, ...] = ()

    def time_ps(self, nbytes: int) -> int:
        return self.alpha_ps + (nbytes * self.beta_ps_per_mib >> MIB_SHIFT)


@dataclass(frozen=True)
class CostTable:
    """The cost of one operation on one communicator. ``bytes`` is the larger of a rank's input and output: the whole
    message for all_reduce and broadcast, the gathered one for all_gather, the input for reduce_scatter and all_to_all.

    In C++, with signed 64-bit integers, exact up to 2^44 bytes and as long as beta is below 2^39 (half a ms per KiB):
    ``alpha + (n >> 20) * beta + (((n & 0xFFFFF) * beta) >> 20)``.
    """

    operation: str
    group_size: int
    pieces: tuple[CostPiece, ...]

    def piece(self, nbytes: int) -> CostPiece:
        if nbytes < 0:
            raise ValueError(f"{self.operation} of {nbytes} bytes: the size must be at least 0")
        return self.pieces[bisect.bisect_right(self.pieces, nbytes, key=lambda piece: piece.from_bytes) - 1]

    def time_ps(self, nbytes: int) -> int:
        """Picoseconds from the last member's arrival to the end."""
        return self.piece(nbytes).time_ps(nbytes)

    def algorithm(self, nbytes: int) -> str:
        return self.piece(nbytes).algorithm

    def rows(self) -> list[tuple[int, int, int]]:
        """``(from_bytes, alpha_ps, beta_ps_per_mib)`` of each piece, for the C++ side."""
        return [(piece.from_bytes, piece.alpha_ps, piece.beta_ps_per_mib) for piece in self.pieces]


def build_table(operation: str, group_size: int, segments: Iterable[tuple[int, list[Line]]]) -> CostTable:
    """A table from segments ``(from_bytes, lines)``: in each the cheapest line counts, and over all of them the time
    never falls as the size grows. (Where the library's switch to another algorithm would make a bigger message cheaper,
    the time stays level instead until the new algorithm catches up.)"""
    pieces: list[CostPiece] = []
    bounds = [segment for segment in segments if segment[1]]
    floor_ps = 0
    for number, (start, lines) in enumerate(bounds):
        end = bounds[number + 1][0] if number + 1 < len(bounds) else None
        if end is not None and end <= start:
            continue
        for piece, last in _cheapest(start, end, lines):
            for level in _not_below(piece, last, floor_ps):
                pieces.append(level)
            if last is not None:
                floor_ps = max(floor_ps, pieces[-1].time_ps(last))
    return CostTable(operation, group_size, tuple(pieces))


def _cheapest(start: int, end: int | None, lines: list[Line]) -> list[tuple[CostPiece, int | None]]:
    """The lower envelope of lines on [start, end): pieces, each with its last size (None: no end)."""
    candidates = [
        CostPiece(
            start,
            line.algorithm,
            round(line.alpha_us * 1e6),
            -int(-line.ps_per_byte * 2**20 // 1),
            line.bottleneck,
            round(line.alpha_us * 1e6),
            line.phases,
        )
        for line in lines
    ]
    found: list[tuple[CostPiece, int | None]] = []
    here = start
    current = min(candidates, key=lambda c: (c.time_ps(here), c.beta_ps_per_mib, c.algorithm))
    while True:
        crossings = [
            (_crossing(current, other, here), other.beta_ps_per_mib, i)
            for i, other in enumerate(candidates)
            if other.beta_ps_per_mib < current.beta_ps_per_mib
        ]
        if not crossings or (end is not None and min(crossings)[0] >= end):
            found.append((current._replace(from_bytes=here), None if end is None else end - 1))
            return found
        at, _, index = min(crossings)
        if at > here:
            found.append((current._replace(from_bytes=here), at - 1))
        here, current = at, candidates[index]


def _crossing(current: CostPiece, other: CostPiece, here: int) -> int:
    """The first size, not below ``here``, from which the flatter ``other`` is not dearer than ``current``."""
    rise = (other.alpha_ps - current.alpha_ps) << MIB_SHIFT
    return max(here, -(-rise // (current.beta_ps_per_mib - other.beta_ps_per_mib)))


def _not_below(piece: CostPiece, last: int | None, floor_ps: int) -> list[CostPiece]:
    """``piece``, kept level at ``floor_ps`` as long as it lies below."""
    if piece.time_ps(piece.from_bytes) >= floor_ps:
        return [piece]
    level = piece._replace(alpha_ps=floor_ps, beta_ps_per_mib=0)
    if piece.beta_ps_per_mib == 0:
        return [level]
    catches_up = -(-((floor_ps - piece.alpha_ps) << MIB_SHIFT) // piece.beta_ps_per_mib)
    if last is not None and catches_up > last:
        return [level]
    return [level, piece._replace(from_bytes=catches_up)]
