"""From transfers to a cost: routes them, sums each link's load, and takes the busiest link.

Called by ``communicator.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trn_dist.collectives.algorithms import Phase, Transfer
from trn_dist.hardware import Link, RouteError, Topology

# Link kinds that move data inside a chip run at the chip's own efficiencies, all others at the library's.
ON_CHIP = ("dma", "hbm")


class LinkLoad(NamedTuple):
    """What passes a link, in messages (1.0 is as many bytes as the message has), and what that costs."""

    link: Link
    share: float
    ps_per_byte: float


class Price(NamedTuple):
    """Cost of phases: latency, picoseconds for each byte of the message, and the busiest link of the dearest phase."""

    latency_us: float
    ps_per_byte: float
    busiest: Link | None
    # Of each phase, the cost of a byte on every link.
    loads: tuple[dict[Link, float], ...] = ()


def price(
    topology: Topology,
    own: list[list[Phase]],
    others: list[list[Phase]],
    step_overhead_us: float = 0.0,
    keep_loads: bool = False,
) -> Price:
    """The cost of the phases of ``own`` teams, phase k of all teams, own and others, being at work at the same time.

    Only links that an own team uses count; what others put on these links counts fully.
    """
    latency_us = ps_per_byte = dearest = 0.0
    busiest: Link | None = None
    kept: list[dict[Link, float]] = []
    for number in range(max(map(len, own))):
        here = [phases[number] for phases in own if number < len(phases)]
        beside = [phases[number] for phases in others if number < len(phases)]
        loads = link_loads(topology, here, beside)
        slowest = max(loads, key=lambda load: load.ps_per_byte)
        if keep_loads:
            kept.append({load.link: load.ps_per_byte for load in loads})
        ps_per_byte += slowest.ps_per_byte
        if busiest is None or slowest.ps_per_byte > dearest:
            busiest, dearest = slowest.link, slowest.ps_per_byte
        steps = max(phase.steps for phase in here)
        hop_us = max(topology.route(t.source, t.target).latency_us for phase in here for t in phase.transfers)
        latency_us += steps * (hop_us + step_overhead_us)
    return Price(latency_us, ps_per_byte, busiest, tuple(kept))


def link_loads(topology: Topology, own: Sequence[Phase], others: Iterable[Phase] = ()) -> list[LinkLoad]:
    """The load of every link that a phase of ``own`` uses, with that of ``others`` on the same links."""
    shares: dict[Link, float] = {}
    for phase in own:
        for transfer in phase.transfers:
            for link, share in _on_links(topology, phase, transfer):
                shares[link] = shares.get(link, 0.0) + share
    for phase in others:
        for transfer in phase.transfers:
            for link, share in _on_links(topology, phase, transfer):
                if link in shares:
                    shares[link] += share
    return [LinkLoad(link, share, share * ps_per_byte(topology, link)) for link, share in shares.items()]


def ps_per_byte(topology: Topology, link: Link) -> float:
    """Picoseconds for a byte on a link at the rate that collectives reach. Raises RouteError for a broken link."""
    if link.bandwidth_gbps == 0:
        raise RouteError(f"{link} is broken")
    efficiency = topology.cluster.chip.efficiency
    reached = {"dma": efficiency.dma, "hbm": efficiency.hbm}.get(
        link.kind, topology.cluster.collectives.link_efficiency
    )
    return 1000.0 / (link.bandwidth_gbps * reached)


def _on_links(topology: Topology, phase: Phase, transfer: Transfer) -> Iterable[tuple[Link, float]]:
    """The links that a transfer loads: its route, and the HBM of both ends."""
    source, target, share = transfer
    yield topology.link(("core", source), ("hbm", source)), share * phase.reads
    yield topology.link(("core", target), ("hbm", target)), share * phase.writes
    for link in topology.route(source, target).links:
        crowded = link.kind == "efa" and link.source[0] == "rail"
        yield link, share / phase.ingress_efficiency if crowded else share
