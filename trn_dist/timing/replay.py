"""Replay: a recorded run's times on any cluster, in seconds, without running its program.

A run leaves what each rank asked of virtual time (:mod:`trn_dist.timing.program`). The C++ side goes through it with
the clocks of a live run, prices each operator by the new chip, and asks here what the collectives take:

- *static*: as in a live run, from the tables of the new cluster. A collective loads its links together with its sibling
  groups, and with nobody else. On the run's own cluster this gives the run's own times, to the picosecond.
- *shared*: every collective and message in flight shares its links with all others, see
  :mod:`trn_dist.timing.fair_share`. When a transfer becomes slower, what follows it starts later and meets others, so
  both sides are repeated until nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trn_dist.hardware import Cluster, ConfigError, Topology, load_cluster
from trn_dist.timing.chip_rates import chip_rates
from trn_dist.timing.collective_costs import Job
from trn_dist.timing.fair_share import LinkUse, SharedPhase, shared_ends
from trn_dist.timing.program import ACTION, Action, ProgramError, RankProgram, read_programs
from trn_dist.timing.steps import PS_PER_US, StepTimes, step_times

SHARINGS = ("shared", "static")
_ROUNDS = 50


@dataclass(frozen=True)
class ReplayedTransfer:
    """A collective or message; ``description`` names its group as accounts do, ``ranks`` are its members."""

    operation: str
    description: str
    ranks: tuple[int, ...]
    bytes: int
    start_ps: int
    end_ps: int


@dataclass(frozen=True)
class ReplayedRun:
    """A run's times on a cluster.

    Attributes:
        cluster: where.
        sharing: ``shared`` or ``static``.
        ranks: that were recorded, in order.
        steps: of each of these ranks, all its steps.
        transfers: collectives and messages of the whole job that these ranks took part in.
        rounds: how often the program was gone through until nothing changed.
        unsettled_ps: the largest change of a transfer's time in the last round; 0 unless the rounds ran out.
    """

    cluster: Cluster
    sharing: str
    ranks: tuple[int, ...]
    steps: tuple[tuple[StepTimes, ...], ...]
    transfers: tuple[ReplayedTransfer, ...]
    rounds: int
    unsettled_ps: int

    def slowest(self, step: int) -> int:
        """Which of ``ranks`` (its place) has the longest step ``step``, counted from 0."""
        return max(range(len(self.ranks)), key=lambda place: self.steps[place][step].time_ps)

    def collectives(self, place: int, step: int) -> dict[str, tuple[int, int]]:
        """Count and time of a rank's collectives and messages that end in a step, by operation and group."""
        times = self.steps[place][step]
        found: dict[str, tuple[int, int]] = {}
        for transfer in self.transfers:
            if self.ranks[place] in transfer.ranks and times.start_ps < transfer.end_ps <= times.end_ps:
                name = f"{transfer.operation} {transfer.description}".strip()
                count, time = found.get(name, (0, 0))
                found[name] = (count + 1, time + transfer.end_ps - transfer.start_ps)
        return found


class Replay:
    """A recorded run that can be gone through on one cluster after another.

    Raises :class:`ProgramError` for a record that is missing or cannot be replayed.
    """

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        import torch  # noqa: F401  (the extension needs its libraries)

        from trn_dist import _C

        self.programs = [_with_a_step(program) for program in programs]
        first = self.programs[0]
        self.world_size, self.local_world_size, self.lone = first.world_size, first.local_world_size, first.lone
        try:
            self._native = _C._Replay([program.as_dict() for program in self.programs], self.lone)
        except (ValueError, IndexError, RuntimeError) as error:
            raise ProgramError(_first_line(error)) from None

    @staticmethod
    def of(folder: str | Path) -> Replay:
        """The run whose record lies in ``folder`` or, for a run folder of ``trn train``, in its ``program/``."""
        folder = Path(folder)
        return Replay(read_programs(folder / "program" if (folder / "program").is_dir() else folder))

    def own_cluster(self) -> Cluster:
        """The cluster of the run. Raises :class:`ConfigError` when its file is no more."""
        return self.cluster(self.programs[0].cluster, self.programs[0].lnc)

    def cluster(self, name: str | Path, lnc: int | None = None) -> Cluster:
        """As many units of a cluster as the run's ranks need, one logical core each."""
        unit = load_cluster(name, lnc=lnc)
        nodes = math.ceil(self.world_size / self._local_world_size(unit))
        units = math.ceil(nodes / unit.nodes_per_unit)
        return load_cluster(name, count=units, lnc=lnc) if units > 1 else unit

    def _local_world_size(self, cluster: Cluster) -> int:
        return min(self.local_world_size, cluster.cores_per_node)

    def on(self, cluster: Cluster, sharing: str = "shared") -> ReplayedRun:
        """The run's times on ``cluster``, which must have cores for all ranks.

        Raises:
            ConfigError: it has not.
            ProgramError: the records do not fit together, as after a run that failed.
        """
        if sharing not in SHARINGS:
            raise ValueError(f"sharing {sharing!r}: must be one of {', '.join(SHARINGS)}")
        local = self._local_world_size(cluster)
        nodes = math.ceil(self.world_size / local)
        if nodes > cluster.nodes:
            raise ConfigError(
                f"{self.world_size} ranks, {local} a node, need {nodes} nodes; {cluster.name} x {cluster.count} has "
                f"{cluster.nodes}"
            )
        job = Job(Topology(cluster), self.world_size, local)
        rates = chip_rates(cluster.chip)
        rows = self._native.transfers()
        durations = [self._static_ps(job, row) for row in rows]
        steps = self._run(rates, durations)
        rounds, unsettled = 1, 0
        if sharing == "shared":
            profiles: dict[Any, LinkUse] = {}
            uses = [self._link_use(job, row, profiles) for row in rows]
            # From the times without any contention.
            durations = [use.time_ps for use in uses]
            rounds = 0
            unsettled = 1
            while unsettled and rounds < _ROUNDS:
                rounds += 1
                steps = self._run(rates, durations)
                starts = [row[6] for row in self._native.transfers()]
                ends = shared_ends(starts, uses)
                shared = [end - start for start, end in zip(starts, ends, strict=True)]
                unsettled = max((abs(a - b) for a, b in zip(shared, durations, strict=True)), default=0)
                durations = shared
        transfers = tuple(
            ReplayedTransfer(
                operation, description, tuple(ranks) if source < 0 else (source, target), nbytes, start, end
            )
            for operation, description, ranks, source, target, nbytes, start, end in self._native.transfers()
        )
        ranks = tuple(program.rank for program in self.programs)
        return ReplayedRun(cluster, sharing, ranks, steps, transfers, rounds, unsettled)

    def _run(self, rates: dict[str, Any], durations: list[int]) -> tuple[tuple[StepTimes, ...], ...]:
        try:
            raw = self._native.run(rates, durations)
        except (ValueError, IndexError) as error:
            raise ProgramError(_first_line(error)) from None
        return tuple(tuple(step_times(step) for step in steps) for steps in raw)

    def _static_ps(self, job: Job, row: tuple[Any, ...]) -> int:
        operation, _, ranks, _, _, nbytes, _, _ = row
        return job.communicator(ranks).time_ps(operation, nbytes)

    def _link_use(self, job: Job, row: tuple[Any, ...], known: dict[Any, LinkUse]) -> LinkUse:
        """What a transfer needs of the links. In a lone rank's program its siblings, which no record speaks of, are
        taken to load them at the same time."""
        operation, _, ranks, source, target, nbytes, _, _ = row
        if source >= 0 and source != target:
            ranks = [source, target]  # its own way
        key = (operation, tuple(ranks), nbytes)
        if key not in known:
            piece = job.communicator(ranks, alone=not self.lone, loads=True).table(operation).piece(nbytes)
            total = piece.time_ps(nbytes)
            weight = sum(phase.ps_per_byte for phase in piece.phases)
            transfer_ps = total - min(piece.latency_ps, total) if weight else 0
            times = [int(transfer_ps * phase.ps_per_byte / weight) for phase in piece.phases]
            phases = tuple(
                SharedPhase(time, phase.loads) for time, phase in zip(times, piece.phases, strict=True) if time
            )
            known[key] = LinkUse(total - sum(times), phases)
        return known[key]


def _with_a_step(program: RankProgram) -> RankProgram:
    """The program; one that marks no steps is one step."""
    if Action.MARK_STEP in program.actions[:: ACTION.size]:
        return program
    return replace(program, actions=program.actions + ACTION.pack(Action.MARK_STEP, 0, 0, 0, 0))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


@dataclass(frozen=True)
class Difference:
    """One line of a comparison: picoseconds in both replays, and how many calls."""

    name: str
    first_count: int
    first_ps: int
    second_count: int
    second_ps: int

    @property
    def change_ps(self) -> int:
        return self.second_ps - self.first_ps


@dataclass(frozen=True)
class Comparison:
    """A step of two replays, of one run or of two, of the slowest rank of each.

    ``parts`` add up to the step's times exactly; ``operators`` and ``collectives`` are busy times, of which a part may
    be hidden behind others. All sorted by how much they change.
    """

    step: int
    first: ReplayedRun
    second: ReplayedRun
    first_rank: int
    second_rank: int
    first_ps: int
    second_ps: int
    parts: tuple[Difference, ...]
    operators: tuple[Difference, ...]
    collectives: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""

        def lines(differences: tuple[Difference, ...]) -> list[dict[str, Any]]:
            return [vars(difference) | {"change_ps": difference.change_ps} for difference in differences]

        def run(run: ReplayedRun, rank: int, time_ps: int) -> dict[str, Any]:
            cluster = run.cluster
            return {
                "cluster": cluster.name,
                "units": cluster.count,
                "lnc": cluster.chip.physical_cores_per_logical,
                "sharing": run.sharing,
                "slowest_rank": rank,
                "step_ps": time_ps,
                "rounds": run.rounds,
                "unsettled_ps": run.unsettled_ps,
            }

        return {
            "step": self.step + 1,
            "first": run(self.first, self.first_rank, self.first_ps),
            "second": run(self.second, self.second_rank, self.second_ps),
            "parts": lines(self.parts),
            "operators": lines(self.operators),
            "collectives": lines(self.collectives),
        }

    def table(self, operators: int = 15, labels: tuple[str, str] = ("", "")) -> str:
        """For people: parts, then collectives, then the ``operators`` that change most; ``labels`` name the runs."""
        lncs = [run.cluster.chip.physical_cores_per_logical for run in (self.first, self.second)]
        names = [
            f"{label}{': ' if label else ''}{run.cluster.name}{f' at LNC={lnc}' if len(set(lncs)) > 1 else ''} "
            f"({run.sharing}), rank {rank}"
            for label, run, rank, lnc in zip(
                labels, (self.first, self.second), (self.first_rank, self.second_rank), lncs, strict=True
            )
        ]
        shown = [*self.parts, *self.collectives, *self.operators[:operators]]
        width = 2 + max(30, *(len(line.name) for line in shown))
        lines = [
            f"step {self.step + 1}, predicted",
            f"A: {names[0]}",
            f"B: {names[1]}",
            f"{'':<{width}} {'A':>14} {'B':>14} {'B - A':>14}   us",
        ]

        def add(name: str, first: int, second: int, note: str = "") -> None:
            a, b, c = (time / PS_PER_US for time in (first, second, second - first))
            lines.append(f"{name:<{width}} {a:14,.1f} {b:14,.1f} {c:+14,.1f}{note}")

        def counts(line: Difference) -> str:
            if line.first_count == line.second_count:
                return f"   {line.first_count} x"
            return f"   {line.first_count} x, {line.second_count} x"

        add("step", self.first_ps, self.second_ps)
        for part in self.parts:
            if part.first_ps or part.second_ps:
                add("  " + part.name, part.first_ps, part.second_ps)
        lines.append("collectives and messages, busy")
        for line in self.collectives:
            add("  " + line.name, line.first_ps, line.second_ps, counts(line))
        lines.append("operators, busy")
        for line in self.operators[:operators]:
            add("  " + line.name, line.first_ps, line.second_ps, counts(line))
        if len(self.operators) > operators:
            rest = self.operators[operators:]
            first, second = sum(line.first_ps for line in rest), sum(line.second_ps for line in rest)
            add(f"  {len(rest)} others", first, second)
        for name, run in zip("AB", (self.first, self.second), strict=True):
            if run.unsettled_ps:
                lines.append(
                    f"{name}: after {run.rounds} rounds a transfer still changes by "
                    f"{run.unsettled_ps / PS_PER_US:,.1f} us from one to the next"
                )
        return "\n".join(lines)


def compare(first: ReplayedRun, second: ReplayedRun, step: int = -1) -> Comparison:
    """Two replays, of one run or of two, operator by operator, of step ``step`` (counted from 0; -1 is the last).

    Raises IndexError when there is no such step in both.
    """
    count = min(len(steps) for run in (first, second) for steps in run.steps)
    if not -count <= step < count:
        raise IndexError(f"step {step + 1}: the run has steps 1 to {count}")
    step %= count
    places = first.slowest(step), second.slowest(step)
    times = first.steps[places[0]][step], second.steps[places[1]][step]
    operators = [{o.name: (o.count, o.busy_ps) for o in t.operators} for t in times]
    collectives = [run.collectives(place, step) for run, place in zip((first, second), places, strict=True)]
    parts = [{name: (1, time) for name, time in t.parts().items()} for t in times]
    return Comparison(
        step=step,
        first=first,
        second=second,
        first_rank=first.ranks[places[0]],
        second_rank=second.ranks[places[1]],
        first_ps=times[0].time_ps,
        second_ps=times[1].time_ps,
        parts=_differences(*parts),
        operators=_differences(*operators),
        collectives=_differences(*collectives),
    )


def _differences(first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]]) -> tuple[Difference, ...]:
    names = dict.fromkeys([*first, *second])
    lines = [Difference(name, *first.get(name, (0, 0)), *second.get(name, (0, 0))) for name in names]
    return tuple(sorted(lines, key=lambda line: (-abs(line.change_ps), -line.first_ps, line.name)))
