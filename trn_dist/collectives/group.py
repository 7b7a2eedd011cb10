"""Groups of ranks and how they lie on the cluster: which share a node, which mesh dimension they are, their siblings.

Called by ``communicator.py`` and ``legality.py``. Pure arithmetic on ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trn_dist.hardware import Cluster

Ranks = tuple[int, ...]


def mesh_groups(shape: Sequence[int], dimension: int) -> list[Ranks]:
    """The groups along one dimension of a device mesh of ``shape``, ranks in row-major order (the last varies fastest).

    ``mesh_groups((16, 4), 1)`` are sixteen groups of four neighbours.
    """
    stride = math.prod(shape[dimension + 1 :])
    span = stride * shape[dimension]
    return [
        tuple(range(outer + inner, outer + inner + span, stride))
        for outer in range(0, math.prod(shape), span)
        for inner in range(stride)
    ]


def sibling_groups(ranks: Sequence[int], world_size: int) -> list[Ranks]:
    """The groups of the mesh dimension that ``ranks`` is one of, itself included: its translations that tile the world.

    A group that does not tile the world is alone.
    """
    members = sorted(ranks)
    pattern = [rank - members[0] for rank in members]
    taken = bytearray(world_size)
    groups = []
    for first in range(world_size):
        if taken[first]:
            continue
        if first + pattern[-1] >= world_size or any(taken[first + offset] for offset in pattern):
            return [tuple(members)]
        group = tuple(first + offset for offset in pattern)
        for rank in group:
            taken[rank] = 1
        groups.append(group)
    return groups if tuple(members) in groups else [tuple(members)]


@dataclass(frozen=True)
class Layout:
    """Where a group's ranks lie: unit by unit, node by node.

    ``places[unit][node of the unit]`` are the ranks there, sorted; empty units and nodes are left out.
    """

    ranks: Ranks
    places: dict[int, dict[int, Ranks]]

    @staticmethod
    def of(ranks: Sequence[int], cluster: Cluster) -> Layout:
        places: dict[int, dict[int, list[int]]] = {}
        for rank in sorted(ranks):
            unit, node = divmod(rank // cluster.cores_per_node, cluster.nodes_per_unit)
            places.setdefault(unit, {}).setdefault(node, []).append(rank)
        frozen = {u: {n: tuple(members) for n, members in nodes.items()} for u, nodes in places.items()}
        return Layout(tuple(sorted(ranks)), frozen)

    def symmetric(self, cluster: Cluster) -> bool:
        """Whether every node holds the same local ranks, and every unit the same nodes."""
        locals_ = {
            tuple(rank % cluster.cores_per_node for rank in members)
            for nodes in self.places.values()
            for members in nodes.values()
        }
        return len(locals_) == 1 and len({tuple(nodes) for nodes in self.places.values()}) == 1

    def node_teams(self, cluster: Cluster) -> dict[int, Ranks]:
        """Ranks by node of the cluster."""
        return {u * cluster.nodes_per_unit + n: m for u, nodes in self.places.items() for n, m in nodes.items()}

    def unit_lanes(self, unit: int) -> list[Ranks]:
        """For each place in a node, the ranks at it on the nodes of a unit. The group must be symmetric."""
        return list(zip(*self.places.get(unit, {}).values(), strict=True))

    def efa_lanes(self) -> list[Ranks]:
        """For each place in a unit, the ranks at it in all units. The group must be symmetric."""
        whole = [tuple(itertools.chain(*nodes.values())) for nodes in self.places.values()]
        return list(zip(*whole, strict=True))
