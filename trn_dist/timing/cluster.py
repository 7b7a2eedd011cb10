"""The cluster that this process is a rank of: ``TRN_CLUSTER``, a shipped name or a path, with as many nodes as the job.

Read once, at the first use of virtual time. Imports no torch.
"""

from __future__ import annotations

import functools
import math
import os

from trn_dist.faults import faults_of_environment
from trn_dist.hardware import Cluster, ConfigError, Topology
from trn_dist.hardware.environment import CLUSTER_VARIABLE, cluster_name, named_cluster


@functools.cache
def cluster() -> Cluster:
    """The cluster of this job: as many units of ``TRN_CLUSTER`` as ``WORLD_SIZE`` ranks need, ``LOCAL_WORLD_SIZE`` a
    node at most.

    Raises :class:`ConfigError` for a wrong file, or for more ranks on a node than it has cores.
    """
    name = cluster_name()
    unit = named_cluster()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(min(world_size, unit.cores_per_node))))
    if local_world_size > unit.cores_per_node:
        raise ConfigError(
            f"{CLUSTER_VARIABLE}={name}: LOCAL_WORLD_SIZE={local_world_size} ranks on a node, but a node of "
            f"{unit.name} has {unit.cores_per_node} logical cores"
        )
    nodes = math.ceil(world_size / local_world_size)
    units = math.ceil(nodes / unit.nodes_per_unit)
    return named_cluster(units=units) if units > 1 else unit


@functools.cache
def cluster_topology() -> Topology:
    """The graph of that cluster's links, with the faults that TRN_FAULTS asks for."""
    links = [fault.link_fault() for fault in faults_of_environment()]
    return Topology(cluster(), [link for link in links if link is not None])
