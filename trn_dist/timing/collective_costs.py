"""What the collectives of a job cost: its ranks placed on a cluster, and the cost tables of its groups there.

A group's siblings, whose collectives load the same links at the same time, are the job's other groups of the same
shape: the rest of its mesh dimension. :func:`cost_rows` serves the C++ side of a running job, :class:`Job` replay.
Imports no torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from trn_dist.collectives import Communicator, sibling_groups
from trn_dist.hardware import Topology
from trn_dist.timing.cluster import cluster, cluster_topology


class Job:
    """``world_size`` ranks on a cluster, ``local_world_size`` a node: rank r of a node on its core r."""

    def __init__(self, topology: Topology, world_size: int, local_world_size: int) -> None:
        self.topology = topology
        self.world_size = world_size
        self.local_world_size = local_world_size
        self._communicators: dict[tuple[tuple[int, ...], bool, bool], Communicator] = {}

    def core_of(self, rank: int) -> int:
        """The logical core of the cluster that a rank of the job runs on."""
        node, local = divmod(rank, self.local_world_size)
        return node * self.topology.cluster.cores_per_node + local

    def communicator(self, ranks: Sequence[int], alone: bool = False, loads: bool = False) -> Communicator:
        """The costs of the group of these ranks; ``alone``: without its siblings; ``loads``: see Communicator."""
        key = (tuple(sorted(ranks)), alone, loads)
        if key not in self._communicators:
            world_size = max(self.world_size, max(ranks) + 1)
            groups = [] if alone else sibling_groups(key[0], world_size)
            siblings = [[self.core_of(rank) for rank in group] for group in groups]
            cores = [self.core_of(rank) for rank in key[0]]
            self._communicators[key] = Communicator(self.topology, cores, siblings, keep_loads=loads)
        return self._communicators[key]


@functools.cache
def this_job() -> Job:
    """The job that this process is a rank of."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or cluster().cores_per_node)
    return Job(cluster_topology(), int(os.environ.get("WORLD_SIZE", "1")), local_world_size)


def core_of(rank: int) -> int:
    """The logical core of the cluster that a rank of this job runs on."""
    return this_job().core_of(rank)


def communicator(ranks: tuple[int, ...]) -> Communicator:
    """The costs of the group of these ranks of this job."""
    return this_job().communicator(ranks)


def cost_rows(ranks: Sequence[int], operation: str) -> list[tuple[int, int, int]]:
    """``(from_bytes, alpha_ps, beta_ps_per_mib)`` of each piece of an operation's table.

    ``operation`` is one of :data:`trn_dist.collectives.OPERATIONS`.
    """
    return communicator(tuple(sorted(ranks))).table(operation).rows()
