"""Which cluster a process simulates: what the environment variable ``TRN_CLUSTER`` names, a shipped name or a path,
with the logical cores that ``NEURON_LOGICAL_NC_CONFIG`` asks for.

The one place that reads these variables. The device (its memory and its cores), virtual time (its rates and links) and
the launcher (ranks on a node) all ask here, so they agree, and the files are read once a process.
"""

from __future__ import annotations

import functools
import os

from trn_dist.hardware.cluster import Cluster, load_cluster
from trn_dist.hardware.config_file import ConfigError

CLUSTER_VARIABLE = "TRN_CLUSTER"
DEFAULT_CLUSTER = "trn2.48xlarge"
LNC_VARIABLES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
"""Physical cores of a logical one, 1 or 2; the first that is set counts."""


def cluster_name() -> str:
    """``TRN_CLUSTER``, or the default where it is not set or empty."""
    return os.environ.get(CLUSTER_VARIABLE) or DEFAULT_CLUSTER


def logical_core_config() -> int | None:
    """Physical cores of a logical one, as the environment says; None where it leaves that to the chip.

    Raises :class:`ConfigError` for anything but 1 and 2.
    """
    for variable in LNC_VARIABLES:
        text = os.environ.get(variable, "").strip()
        if text not in ("", "1", "2"):
            raise ConfigError(f"{variable}={text!r}: must be 1 or 2")
        if text:
            return int(text)
    return None


def named_cluster(name: str = "", units: int = 1) -> Cluster:
    """``units`` of the cluster that ``name`` or else ``TRN_CLUSTER`` names; errors as in :func:`load_cluster`."""
    return _load(name or cluster_name(), units, logical_core_config())


@functools.cache
def _load(name: str, units: int, lnc: int | None) -> Cluster:
    return load_cluster(name, count=units, lnc=lnc)
