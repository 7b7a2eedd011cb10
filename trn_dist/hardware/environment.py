"""Which cluster a process simulates: what the environment variable ``TRN_CLUSTER`` names, a shipped name or a path.

The one place that reads the variable. The device (its memory and its cores) and virtual time (its rates and links) both
ask here, so the files are read once a process.
"""

from __future__ import annotations

import functools
import os

from trn_dist.hardware.cluster import Cluster, load_cluster

CLUSTER_VARIABLE = "TRN_CLUSTER"
DEFAULT_CLUSTER = "trn2.48xlarge"


def cluster_name() -> str:
    """``TRN_CLUSTER``, or the default where it is not set or empty."""
    return os.environ.get(CLUSTER_VARIABLE) or DEFAULT_CLUSTER


def named_cluster(lnc: int | None = None) -> Cluster:
    """One unit of the cluster that ``TRN_CLUSTER`` names; ``lnc`` and errors as in :func:`load_cluster`."""
    return _load(cluster_name(), lnc)


@functools.cache
def _load(name: str, lnc: int | None) -> Cluster:
    return load_cluster(name, lnc=lnc)
