"""Timing mode: shapes, memory and virtual time without numbers, and a world larger than the processes that live.

``TRN_TIMING_ONLY=1`` switches it on for a process, which stands for rank ``RANK`` of ``WORLD_SIZE``: its peers are
taken to do what it does, at the same time. Read by the device (``csrc/device/TimingOnly.h``), the process group and
:mod:`trn_dist.timing.program`; :mod:`trn_dist.timing.lone_rank` starts such a process.
"""

from __future__ import annotations

import os

TIMING_ONLY_VARIABLE = "TRN_TIMING_ONLY"


def timing_only() -> bool:
    """Whether this process computes no numbers."""
    return os.environ.get(TIMING_ONLY_VARIABLE, "") not in ("", "0")


def enter_world(world_size: int, nodes: int | None = None) -> None:
    """Makes this process rank 0 of ``world_size`` ranks, by default on the fewest nodes that they divide evenly over.

    Raises ValueError when they do not divide evenly over ``nodes``.
    """
    from trn_dist.hardware.environment import named_cluster

    if nodes is None:
        nodes = named_cluster().nodes_for(world_size)
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks do not divide evenly over {nodes} nodes")
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // nodes),
    }
