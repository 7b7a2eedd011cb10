"""The cost tables of a process group, for the C++ side, on the cluster of this job.

A group's siblings, whose collectives load the same links at the same time, are the job's other groups of the same
shape: the rest of its mesh dimension. Imports no torch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

from trn_dist.collectives import Communicator, sibling_groups
from trn_dist.timing.cluster import cluster, cluster_topology


def core_of(rank: int) -> int:
    """The logical core of the cluster that a rank of the job runs on: rank r of a node on its core r."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or cluster().cores_per_node)
    node, local = divmod(rank, local_world_size)
    return node * cluster().cores_per_node + local


@functools.cache
def communicator(ranks: tuple[int, ...]) -> Communicator:
    """The costs of the group of these ranks of the job."""
    world_size = max(int(os.environ.get("WORLD_SIZE", "1")), max(ranks) + 1)
    siblings = [[core_of(rank) for rank in group] for group in sibling_groups(ranks, world_size)]
    return Communicator(cluster_topology(), [core_of(rank) for rank in ranks], siblings)


def cost_rows(ranks: Sequence[int], operation: str) -> list[tuple[int, int, int]]:
    """``(from_bytes, alpha_ps, beta_ps_per_mib)`` of each piece of an operation's table.

    ``operation`` is one of :data:`trn_dist.collectives.OPERATIONS`.
    """
    return communicator(tuple(sorted(ranks))).table(operation).rows()
