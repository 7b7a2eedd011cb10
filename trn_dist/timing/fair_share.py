"""Transfers that are in flight at the same time share the links between them: max-min fairly.

A transfer first takes its latency, which loads no link, then goes through its phases. In a phase that runs at full
speed it takes a certain part of each link's rate; at half speed half of that. At every moment all speeds are raised
together until a link is full; the transfers on that link stay there, and the others are raised further, to full speed
at most. So no transfer could be faster without another that is no faster becoming slower. Imports no torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FULL = 1 + 1e-9
"""Loads of a link up to here are not too much: they are sums of rounded parts."""


@dataclass(frozen=True)
class SharedPhase:
    """``time_ps`` at full speed, taking ``loads`` (0 to 1) of the links' rates meanwhile."""

    time_ps: int
    loads: Mapping[Any, float]


@dataclass(frozen=True)
class LinkUse:
    """What a transfer needs: ``latency_ps``, then ``phases`` one after the other."""

    latency_ps: int
    phases: tuple[SharedPhase, ...]

    @property
    def time_ps(self) -> int:
        """With the links to itself."""
        return self.latency_ps + sum(phase.time_ps for phase in self.phases)


class _Flight:
    """A transfer between its latency and its end."""

    def __init__(self, index: int, use: LinkUse) -> None:
        self.index = index
        self.use = use
        self.phase = 0
        self.left: float = use.phases[0].time_ps  # at full speed; whole picoseconds as long as it never was slower
        self.speed = 1.0

    def next_event(self, now: int) -> int:
        return now + math.ceil(self.left / self.speed - 1e-6)

    def advance(self, time_ps: int) -> None:
        self.left = self.left - time_ps if self.speed == 1.0 else self.left - time_ps * self.speed


def shared_ends(starts: Sequence[int], uses: Sequence[LinkUse]) -> list[int]:
    """When transfers end, in picoseconds, that start at ``starts`` and share their links."""
    ends = [0] * len(starts)
    rows = _LoadRows(uses)
    arrivals: list[tuple[int, int]] = []
    for index, (start, use) in enumerate(zip(starts, uses, strict=True)):
        ends[index] = start + use.latency_ps
        if use.phases:
            arrivals.append((ends[index], index))
    heapq.heapify(arrivals)
    flights: list[_Flight] = []
    now = 0
    while arrivals or flights:
        time = min((flight.next_event(now) for flight in flights), default=None)
        if arrivals and (time is None or arrivals[0][0] < time):
            time = arrivals[0][0]
        assert time is not None
        changed = False
        going = []
        for flight in flights:
            flight.advance(time - now)
            if flight.left > 1e-6:
                going.append(flight)
                continue
            changed = True
            flight.phase += 1
            if flight.phase < len(flight.use.phases):
                flight.left = flight.use.phases[flight.phase].time_ps
                going.append(flight)
            else:
                ends[flight.index] = time
        flights, now = going, time
        while arrivals and arrivals[0][0] == now:
            _, index = heapq.heappop(arrivals)
            flights.append(_Flight(index, uses[index]))
            changed = True
        if changed and flights:
            speeds = fair_speeds(np.stack([rows.of(flight.use, flight.phase) for flight in flights]))
            for flight, speed in zip(flights, speeds, strict=True):
                flight.speed = float(speed)
    return ends


class _LoadRows:
    """The loads of phases as rows over all links."""

    def __init__(self, uses: Sequence[LinkUse]) -> None:
        self._column: dict[Hashable, int] = {}
        for use in uses:
            for phase in use.phases:
                for link in phase.loads:
                    self._column.setdefault(link, len(self._column))
        self._rows: dict[int, NDArray[np.float64]] = {}

    def of(self, use: LinkUse, phase: int) -> NDArray[np.float64]:
        loads = use.phases[phase].loads
        row = self._rows.get(id(loads))
        if row is None:
            row = np.zeros(len(self._column))
            for link, load in loads.items():
                row[self._column[link]] = load
            self._rows[id(loads)] = row  # the uses, and with them the loads, outlive this
        return row


def fair_speeds(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Max-min fair speeds, 0 to 1, of transfers (rows) that load links (columns) by these parts at full speed."""
    speeds = np.ones(len(loads))
    if loads.sum(axis=0).max(initial=0.0) <= _FULL:
        return speeds
    rising = np.ones(len(loads), dtype=bool)
    speeds[:] = 0.0
    level = 0.0
    while rising.any():
        demand = loads[rising].sum(axis=0)
        taken = (loads[~rising] * speeds[~rising, None]).sum(axis=0)
        with np.errstate(divide="ignore"):
            reach = np.where(demand > 0, (1 - taken) / np.where(demand > 0, demand, 1.0), np.inf)
        level = max(level, min(1.0, float(reach.min(initial=np.inf))))
        full = reach <= level * (1 + 1e-12)
        stopped = rising & (loads[:, full] > 0).any(axis=1) if level < 1.0 else rising.copy()
        if not stopped.any():  # nothing but rounding holds them
            stopped = rising.copy()
        speeds[stopped] = level
        rising &= ~stopped
    return speeds
