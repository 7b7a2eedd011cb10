"""What the ranks of a running job do with their cores: two looks at each rank's figures, and the difference.

Utilisation and rates are of the modelled cluster, on virtual time; the host's CPU time and memory are measured. Called
by ``trn top`` and ``trn monitor``; imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from trn_dist import telemetry
from trn_dist.launcher import processes
from trn_dist.launcher.running import RunningRank, running_ranks

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class NoSuchRun(Exception):
    """No run that figures can be had of; the text says which there are."""


@dataclasses.dataclass(frozen=True)
class Look:
    """One rank at one moment.

    Attributes:
        time_s: on this host's monotonic clock.
        user_s, system_s: CPU time of this host since the start of the process.
        host_bytes: of this host's memory, without files and simulated HBM. Ranks that were forked from one process
            count the pages that they share with it; telling those apart takes the kernel 0.1 s a rank.
        figures: what the rank tells, see :func:`trn_dist.neuron.telemetry.figures`; None with ``problem``.
        problem: why it tells nothing.
    """

    rank: RunningRank
    time_s: float
    user_s: float
    system_s: float
    host_bytes: int
    figures: dict[str, Any] | None
    problem: str


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a rank did between two looks; without an earlier one since its start.

    Attributes:
        period_s: between the looks, on this host's clock; 0 without an earlier one.
        virtual_s: how far virtual time went meanwhile.
        parts: shares of that, by name; they add up to 1, or to 0 when virtual time stood still.
        flops_per_s: of the matrix engine, in virtual time.
        launched: operators.
        collectives: that ended.
        user_percent, system_percent: CPU time of this host, of one core.
    """

    look: Look
    period_s: float
    virtual_s: float
    parts: dict[str, float]
    flops_per_s: float
    launched: int
    collectives: int
    user_percent: float
    system_percent: float

    @property
    def utilization(self) -> float:
        """The share of virtual time in which an engine worked, 0 to 1."""
        return sum(share for name, share in self.parts.items() if name.startswith("compute."))

    @property
    def communication(self) -> float:
        """The share of transfers that no operator covers."""
        return self.parts.get("exposed", 0.0)

    @property
    def waiting(self) -> float:
        """The share of waits for other ranks."""
        return self.parts.get("waiting", 0.0)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of HBM by kind, of all cores that the rank uses; empty when it tells nothing."""
        total: dict[str, int] = {}
        for core in (self.look.figures or {}).get("memory", {}).values():
            for kind, nbytes in core.items():
                total[kind] = total.get(kind, 0) + nbytes
        return total


def find_run(pid: int | None) -> int:
    """The launcher's pid of the run that is meant: ``pid``, or the only one that runs. Raises NoSuchRun."""
    running = {rank.launcher: rank.command for rank in running_ranks()}
    if pid is None and len(running) == 1:
        return next(iter(running))
    if pid is not None and pid in running:
        return pid
    names = ", ".join(f"{launcher} ({command[-40:]})" for launcher, command in sorted(running.items()))
    known = f"running: {names}" if running else "no rank runs"
    if pid is None:
        raise NoSuchRun(f"several runs, give the pid of one: {names}" if running else known)
    raise NoSuchRun(f"{pid} is no process of `trn run`, `trn train`, torchrun or a program that has ranks; {known}")


def look_at(launcher: int, timeout_s: float = 2.0) -> list[Look]:
    """Every rank of a run, by rank; empty when the run is over."""
    ranks = sorted((rank for rank in running_ranks() if rank.launcher == launcher), key=lambda rank: rank.rank)
    answers = telemetry.ask({rank.pid: rank.rank for rank in ranks}, timeout_s)
    looks = []
    for rank in ranks:
        try:
            fields = processes.stat_fields(rank.pid)
            resident, shared = map(int, Path(f"/proc/{rank.pid}/statm").read_text().split()[1:3])
        except OSError:  # ended meanwhile
            continue
        answer = answers[rank.pid]
        refused = isinstance(answer, telemetry.NoFigures)
        looks.append(
            Look(
                rank=rank,
                time_s=time.monotonic(),
                user_s=int(fields[11]) / _TICKS_PER_S,
                system_s=int(fields[12]) / _TICKS_PER_S,
                host_bytes=(resident - shared) * _PAGE_BYTES,
                figures=None if refused else answer,  # type: ignore[arg-type]
                problem=f"{answer}; {processes.state(rank.pid)}" if refused else "",
            )
        )
    return looks


def usage(now: Look, before: Look | None) -> Usage:
    """What happened between two looks at the same process."""
    if before is not None and (before.rank.pid != now.rank.pid or before.figures is None):
        before = None
    times = (now.figures or {}).get("times", {})
    earlier = (before.figures or {}).get("times", {}) if before is not None else {}
    period_s = 0.0 if before is None else now.time_s - before.time_s
    virtual_ps = max(0, times.get("end_ps", 0) - earlier.get("end_ps", 0))
    # A look ends in the middle of things, so that a later one may know better what the last moments were spent on.
    before_parts = _parts(earlier)
    parts = {name: max(0, part - before_parts.get(name, 0)) for name, part in _parts(times).items()}
    whole = sum(parts.values())
    return Usage(
        look=now,
        period_s=period_s,
        virtual_s=virtual_ps / 1e12,
        parts={name: part / whole if whole else 0.0 for name, part in parts.items()},
        flops_per_s=max(0.0, times.get("flops", 0.0) - earlier.get("flops", 0.0)) * 1e12 / virtual_ps
        if virtual_ps
        else 0.0,
        launched=max(0, times.get("launched", 0) - earlier.get("launched", 0)),
        collectives=max(0, times.get("collectives", 0) - earlier.get("collectives", 0)),
        user_percent=100 * (now.user_s - before.user_s) / period_s if before is not None and period_s else 0.0,
        system_percent=100 * (now.system_s - before.system_s) / period_s if before is not None and period_s else 0.0,
    )


def usages(now: list[Look], before: list[Look]) -> list[Usage]:
    """Of all ranks of a run."""
    earlier = {look.rank.pid: look for look in before}
    return [usage(look, earlier.get(look.rank.pid)) for look in now]


def _parts(times: dict[str, Any]) -> dict[str, int]:
    """Picoseconds by what they were spent on; collectives of all groups together."""
    parts: dict[str, int] = {}
    for name, spent in times.get("parts", {}).items():
        kind = name if name.startswith("compute.") else name.partition(".")[0]
        parts[kind] = parts.get(kind, 0) + spent
    if parts:  # a rank without groups has these two as well
        parts.setdefault("exposed", 0)
        parts.setdefault("waiting", 0)
    return parts
