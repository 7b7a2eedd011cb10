"""The algorithms of the collectives library, as the transfers that each makes.

An algorithm is a list of phases, one after the other; the transfers of a phase go on at the same time. All are written
as an all-gather (every rank ends with every rank's chunk, 1/N of the message each); a reduce-scatter is the same read
backwards. Sources: AWS Neuron SDK 2.32, "Intra-node" and "Inter-node collective communication". Called by
``communicator.py``, which routes the transfers and counts the links' loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trn_dist.collectives.group import Layout, Ranks
from trn_dist.hardware import Topology


class Transfer(NamedTuple):
    """``share`` of the message goes from a rank to another, summed over the steps of its phase."""

    source: int
    target: int
    share: float


@dataclass(frozen=True)
class Phase:
    """Transfers at the same time, in ``steps`` rounds that wait for each other.

    ``reads`` and ``writes`` are HBM accesses per byte at the source and at the target; ``ingress_efficiency`` is what
    is left of a network card's rate when many send to it at once.
    """

    transfers: list[Transfer]
    steps: int
    reads: float = 1.0
    writes: float = 1.0
    ingress_efficiency: float = 1.0


def backwards(phases: Sequence[Phase]) -> list[Phase]:
    """The reduce-scatter of an all-gather: every transfer the other way, and the target adds what arrives to what it
    has, which is one more HBM access."""
    return [
        replace(
            phase,
            transfers=[Transfer(target, source, share) for source, target, share in phase.transfers],
            writes=phase.writes + 1.0,
        )
        for phase in reversed(phases)
    ]


def in_one_step(gather: Sequence[Phase], members: int) -> list[Phase]:
    """An all-reduce by a mesh in one step, from the mesh's all-gather in one: where everyone sends its chunk,
    1/``members`` of the message, everyone sends all of it, and each adds up alone."""
    return [
        replace(
            phase,
            transfers=[Transfer(source, target, share * members) for source, target, share in phase.transfers],
            writes=phase.writes + 1.0,
        )
        for phase in gather
    ]


# Inside a node


def chips_of(topology: Topology, ranks: Sequence[int]) -> dict[int, Ranks]:
    """The ranks on each chip, both in order."""
    chips: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        chips.setdefault(topology.chip_of(rank), []).append(rank)
    return {chip: tuple(members) for chip, members in chips.items()}


def ring_orders(topology: Topology, chips: Sequence[int]) -> list[list[list[int]]]:
    """Ways to lay rings through chips; a way is a list of cycles that share the message, each used in both directions.

    On a torus: in order, as a snake by rows and by columns, and for a whole square the two Hamiltonian cycles that have
    no link in common. Behind a switch every order is as good.
    """
    ways = [[list(chips)]]
    level = topology.cluster.levels.node
    if level.kind != "torus" or len(level.shape) != 2 or len(chips) < 4:
        return ways
    rows, columns = level.shape
    place = {chip: divmod(chip % level.size, columns) for chip in chips}
    for across, along in ((0, 1), (1, 0)):
        lines = sorted({place[chip][across] for chip in chips})
        snake: list[int] = []
        for number, line in enumerate(lines):
            on_line = sorted((c for c in chips if place[c][across] == line), key=lambda c: place[c][along])
            snake += on_line[::-1] if number % 2 else on_line
        ways.append([snake])
    if len(chips) == rows * columns and rows == columns and rows >= 3:
        # Two edge-disjoint Hamiltonian cycles of a square torus, from a pair of independent Lee-distance Gray codes.
        at = {place[chip]: chip for chip in chips}
        walk = [(i // columns, (i - i // columns) % columns) for i in range(rows * columns)]
        ways.append([[at[x, y] for x, y in walk], [at[y, x] for x, y in walk]])
    return ways


def node_ring(topology: Topology, ranks: Sequence[int], way: int, steps_per_rank: int) -> list[Phase]:
    """Ring: N-1 steps to the neighbour along each cycle, core by core and chip by chip."""
    chips = chips_of(topology, ranks)
    ways = ring_orders(topology, list(chips))
    cycles = ways[way if way < len(ways) else 0]
    members = len(ranks)
    share = (members - 1) / members / (2 * len(cycles))
    transfers = []
    for cycle in cycles:
        order = [rank for chip in cycle for rank in chips[chip]]
        for here, there in zip(order, order[1:] + order[:1], strict=True):
            transfers += [Transfer(here, there, share), Transfer(there, here, share)]
    return [Phase(transfers, steps=members * steps_per_rank - 1)]


def kangaring_steps(ring: Sequence[Phase]) -> list[Phase]:
    """KangaRing: the links' load of a ring in half the steps. Whole chips only; its saved HBM accesses are applied by
    :func:`with_accesses`, for they differ by direction."""
    return [replace(phase, steps=(phase.steps + 1) // 2) for phase in ring]


def with_accesses(phases: Sequence[Phase], factor: float) -> list[Phase]:
    """The same phases with ``factor`` times the HBM accesses."""
    return [replace(phase, reads=phase.reads * factor, writes=phase.writes * factor) for phase in phases]


def node_mesh(topology: Topology, ranks: Sequence[int]) -> list[Phase]:
    """Mesh: each chip's chunks go to every other chip, the cores of a chip sharing the work; then inside each chip."""
    chips = chips_of(topology, ranks)
    total = len(ranks)
    between, received = [], {rank: 1 / total for rank in ranks}
    for a, (chip_a, from_) in enumerate(chips.items()):
        for b, (chip_b, to) in enumerate(chips.items()):
            if chip_a != chip_b:
                transfer = Transfer(from_[b % len(from_)], to[a % len(to)], len(from_) / total)
                received[transfer.target] += transfer.share
                between.append(transfer)
    # The chunks of its own chip reach a core only in the second phase.
    within = [
        Transfer(core, other, received[core])
        for members in chips.values()
        for core in members
        for other in members
        if other != core
    ]
    return [Phase(transfers, steps=1) for transfers in (between, within) if transfers]


def hypercube_corners(topology: Topology, chips: Sequence[int]) -> list[int]:
    """Each chip's corner of a hypercube, a binary digit for each dimension.

    A torus of 4 x 4 is a hypercube of four dimensions: with the corners in Gray code along rows and columns, chips
    whose corners differ in one digit are neighbours. Chips that are no rectangle are numbered in order.
    """
    level = topology.cluster.levels.node
    if level.kind == "torus" and len(level.shape) == 2:
        places = [divmod(chip % level.size, level.shape[1]) for chip in chips]
        rows, columns = (sorted(set(line)) for line in zip(*places, strict=True))
        if len(rows) * len(columns) == len(chips):
            order = [(rows.index(row), columns.index(column)) for row, column in places]
            return [(row ^ (row >> 1)) * len(columns) + (column ^ (column >> 1)) for row, column in order]
    return list(range(len(chips)))


def node_rdh(topology: Topology, ranks: Sequence[int]) -> list[Phase] | None:
    """Recursive doubling over the chips as a hypercube, one hypercube for each core of a chip, then inside each chip.

    The hypercubes take the dimensions in different order, so that as many links work at once as there are cores. None
    unless the chips are a power of two with as many ranks each.
    """
    on_chip = chips_of(topology, ranks)
    chips = list(on_chip.values())
    count, per_chip, total = len(chips), len(chips[0]), len(ranks)
    if count & (count - 1) or any(len(members) != per_chip for members in chips):
        return None
    dimensions = count.bit_length() - 1
    cores = topology.cluster.logical_cores_per_chip
    corners = hypercube_corners(topology, list(on_chip))
    at = dict(zip(corners, chips, strict=True))
    phases = []
    for step in range(dimensions):
        transfers = []
        for corner, members in at.items():
            for lane, rank in enumerate(members):
                dimension = (step + rank % cores * dimensions // cores) % dimensions
                transfers.append(Transfer(rank, at[corner ^ (1 << dimension)][lane], (1 << step) / total))
        phases.append(Phase(transfers, steps=1))
    within = [Transfer(a, b, count / total) for members in chips for a in members for b in members if a != b]
    return [*phases, Phase(within, steps=1)] if within else phases


# Along a lane: one rank a node (or a unit), all lanes of a group at the same time. `sites` are the positions in the
# lane whose links are looked at; the others do the same and are left out.


def lane_ring(lane: Ranks, sites: Sequence[int]) -> list[Phase]:
    """Ring along a lane, both directions sharing the message."""
    members = len(lane)
    share = (members - 1) / members / 2
    pairs = dict.fromkeys(
        pair
        for i in sites
        for j in ((i + 1) % members, (i - 1) % members)
        for pair in ((lane[i], lane[j]), (lane[j], lane[i]))
    )
    # Two members are each other's neighbour on both sides, so both directions of the ring use the same way.
    weight = 2 if members == 2 else 1
    return [Phase([Transfer(a, b, share * weight) for a, b in pairs], steps=members - 1)]


def lane_mesh(lane: Ranks, sites: Sequence[int], ingress_efficiency: float, over_efa: bool) -> list[Phase]:
    """Everyone to everyone along a lane in one step; many arrive at a network card at once.

    Over EFA all that leaves a rank goes through its own card whoever it is for, so it is counted as one transfer.
    """
    members = len(lane)
    if over_efa:
        away = (members - 1) / members
        transfers = [Transfer(lane[i], lane[(i + 1) % members], away) for i in sites]
        transfers += [Transfer(lane[i - 1], lane[i], away) for i in sites if (i - 1) % members not in sites]
    else:
        pairs = dict.fromkeys(
            pair for i in sites for j in range(members) if i != j for pair in ((lane[i], lane[j]), (lane[j], lane[i]))
        )
        transfers = [Transfer(a, b, 1 / members) for a, b in pairs]
    return [Phase(transfers, steps=1, ingress_efficiency=ingress_efficiency if members > 2 else 1.0)]


def lane_rdh(lane: Ranks, sites: Sequence[int]) -> list[Phase] | None:
    """Recursive doubling along a lane; None unless its length is a power of two."""
    members = len(lane)
    if members & (members - 1):
        return None
    phases = []
    for step in range(members.bit_length() - 1):
        pairs = dict.fromkeys(
            pair for i in sites for j in (i ^ (1 << step),) for pair in ((lane[i], lane[j]), (lane[j], lane[i]))
        )
        phases.append(Phase([Transfer(a, b, (1 << step) / members) for a, b in pairs], steps=1))
    return phases


# Without an algorithm: every transfer at once


def to_root(ranks: Ranks) -> list[Phase]:
    """Everyone's chunk to the first rank."""
    return [Phase([Transfer(rank, ranks[0], 1 / len(ranks)) for rank in ranks[1:]], steps=1)]


def from_root(ranks: Ranks) -> list[Phase]:
    """A chunk from the first rank to everyone."""
    return [Phase([Transfer(ranks[0], rank, 1 / len(ranks)) for rank in ranks[1:]], steps=1)]


def to_next(ranks: Ranks) -> list[Phase]:
    """The whole message from each rank to the next, as pipeline stages do, all at the same time."""
    return [Phase([Transfer(a, b, 1.0) for a, b in itertools.pairwise(ranks)], steps=1)]


def to_all(layout: Layout, units: Sequence[int], ingress_efficiency: float = 1.0) -> list[Phase]:
    """A chunk from each rank to each other. What leaves a unit goes through the ranks' own cards whoever it is for, so
    it is counted as one transfer to the next unit; only the links of ``units`` are looked at."""
    total = len(layout.ranks)
    transfers = []
    places = {unit: tuple(itertools.chain(*nodes.values())) for unit, nodes in layout.places.items()}
    order = list(places)
    for unit in (unit for unit in units if unit in places):
        ranks = places[unit]
        transfers += [Transfer(a, b, 1 / total) for a in ranks for b in ranks if a != b]
        if len(order) > 1:
            at = order.index(unit)
            ahead, behind = order[(at + 1) % len(order)], order[at - 1]
            away = (total - len(ranks)) / total
            transfers += [Transfer(a, b, away) for a, b in zip(ranks, itertools.cycle(places[ahead]), strict=False)]
            if behind not in units:  # else counted there, as what leaves it
                transfers += [
                    Transfer(a, b, away) for a, b in zip(places[behind], itertools.cycle(ranks), strict=False)
                ]
    return [Phase(transfers, steps=1, ingress_efficiency=ingress_efficiency)]
