"""What a program asks of virtual time: where it stands, and how a step's time was spent.

A :class:`StepTimes` attributes every picosecond of a step once; ``csrc/timing/Journal.h`` says how. All times are
predictions for the modelled cluster, none was measured. Imports no torch until a function is called.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

PS_PER_US = 1_000_000


@dataclass(frozen=True)
class GroupTimes:
    """The collectives of one process group, or of all groups along one dimension of a device mesh.

    Attributes:
        name: the group's description, such as ``mesh_dp_shard``.
        exposed_ps: transfers that no operator of this rank covers.
        waiting_ps: for a later member, not covered either.
        busy_ps: all transfers, covered or not; overlap is ``busy_ps - exposed_ps``.
        collectives: how many ended in the step.
        bytes: their messages, as :class:`trn_dist.collectives.CostTable` counts them.
    """

    name: str
    exposed_ps: int
    waiting_ps: int
    busy_ps: int
    collectives: int
    bytes: int


@dataclass(frozen=True)
class OperatorTimes:
    """All calls of one operator in a step, launches included.

    Attributes:
        name: such as ``aten::mm``.
        count: calls that started in the step.
        busy_ps: time on the device.
        hbm_bound_ps: the part of it in calls where HBM took longer than the engine.
        bytes: of HBM traffic.
        flops: of the matrix engine, as the shapes say.
    """

    name: str
    count: int
    busy_ps: int
    hbm_bound_ps: int
    bytes: int
    flops: float


@dataclass(frozen=True)
class StepTimes:
    """How one rank spent one step of virtual time.

    ``engines``, ``launch_ps``, ``host_bound_ps``, ``idle_ps`` and each group's ``exposed_ps`` and ``waiting_ps`` add up
    to ``time_ps`` exactly.

    Attributes:
        start_ps, end_ps: on the rank's clock, which starts at 0 with the process.
        engines: the time in which an operator ran, by its engine (tensor, vector, scalar, gpsimd, dma).
        launch_ps: between an operator's launch and its engine's start, nothing else running.
        host_bound_ps: the device waited for the host to launch.
        idle_ps: nothing on the device and the host waiting.
        groups: collectives, by group.
        operators: by name, the longest first.
        hbm_bound_ps: the part of ``engines`` in which HBM, not the engine, set the pace.
        flops: of the matrix engine, as the shapes say.
        hbm_bytes: traffic of all operators.
    """

    start_ps: int
    end_ps: int
    engines: dict[str, int]
    launch_ps: int
    host_bound_ps: int
    idle_ps: int
    groups: tuple[GroupTimes, ...]
    operators: tuple[OperatorTimes, ...]
    hbm_bound_ps: int
    flops: float
    hbm_bytes: int

    @property
    def time_ps(self) -> int:
        return self.end_ps - self.start_ps

    @property
    def compute_ps(self) -> int:
        return sum(self.engines.values())

    @property
    def exposed_ps(self) -> int:
        return sum(group.exposed_ps for group in self.groups)

    @property
    def waiting_ps(self) -> int:
        """For peers: pipeline bubbles and stragglers."""
        return sum(group.waiting_ps for group in self.groups)

    def parts(self) -> dict[str, int]:
        """The parts that add up to ``time_ps``, by name, in picoseconds."""
        parts = {f"compute.{engine}": time for engine, time in self.engines.items()}
        parts["launch"] = self.launch_ps
        for group in self.groups:
            parts[f"exposed.{group.name}"] = group.exposed_ps
        for group in self.groups:
            parts[f"waiting.{group.name}"] = group.waiting_ps
        parts["host_bound"] = self.host_bound_ps
        parts["idle"] = self.idle_ps
        return parts

    def as_json(self, operators: int = 0) -> dict[str, Any]:
        """Plain data for a file, with the ``operators`` longest operators."""
        return {
            "time_ps": self.time_ps,
            "parts_ps": self.parts(),
            "busy_ps": {group.name: group.busy_ps for group in self.groups},
            "hbm_bound_ps": self.hbm_bound_ps,
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            **({"operators": [dataclasses.asdict(o) for o in self.operators[:operators]]} if operators else {}),
        }

    def table(self, operators: int = 10) -> str:
        """For people: the parts with their share of the step, then the longest operators."""
        total = max(self.time_ps, 1)
        lines = [f"{'step':<28} {self.time_ps / PS_PER_US:14,.1f} us"]
        for name, time in self.parts().items():
            if time:
                lines.append(f"  {name:<26} {time / PS_PER_US:14,.1f} us  {100 * time / total:5.1f} %")
        for group in self.groups:
            hidden = group.busy_ps - group.exposed_ps
            lines.append(
                f"  {group.name}: {group.collectives} collectives, {group.bytes / 1e6:,.1f} MB, "
                f"{group.busy_ps / PS_PER_US:,.1f} us, of which {hidden / PS_PER_US:,.1f} us overlapped"
            )
        for times in self.operators[:operators]:
            lines.append(
                f"  {times.name:<58} {times.busy_ps / PS_PER_US:14,.1f} us, {times.count:6} x "
                f"{times.busy_ps / PS_PER_US / max(times.count, 1):10,.2f} us, "
                f"{100 * times.hbm_bound_ps / max(times.busy_ps, 1):3.0f} % by HBM"
            )
        return "\n".join(lines)


def mark_step() -> StepTimes:
    """Ends a step and begins the next; returns how the one that ended, from the previous mark on, was spent.

    The step ends when the host and the calling thread's current stream are both done. Work in flight on other streams
    counts in the next step. Waits for nothing and changes no time.
    """
    from trn_dist import _C

    return step_times(_C._mark_step())


def step_times(raw: dict[str, Any]) -> StepTimes:
    """A step as the C++ side gives it."""
    raw["groups"] = tuple(GroupTimes(**group) for group in raw["groups"])
    operators = (OperatorTimes(**operator) for operator in raw["operators"])
    raw["operators"] = tuple(sorted(operators, key=lambda operator: (-operator.busy_ps, operator.name)))
    return StepTimes(**raw)


def host_time_us() -> float:
    """The host's virtual time since the start of the process, in microseconds."""
    from trn_dist import _C

    return _C._virtual_host_ps() / PS_PER_US


def irreproducible_reason() -> str:
    """Why the times may differ from run to run; empty while they cannot."""
    from trn_dist import _C

    return _C._irreproducible_reason()
