"""Timing mode: shapes, memory and virtual time without numbers, and a world larger than the processes that live.

``TRN_TIMING_ONLY=1`` switches it on for a process, which stands for rank ``RANK`` of ``WORLD_SIZE``: its peers are
taken to do what it does, at the same time. The stages of a pipeline do different things: then there is a process for
each, which stands for the ranks from its own to the next process's, and all of them meet in virtual time. Read by the
device (``csrc/device/TimingOnly.h``), the process group and :mod:`trn_dist.timing.program`;
:mod:`trn_dist.timing.lone_rank` starts such a process.
"""

from __future__ import annotations

import os

TIMING_ONLY_VARIABLE = "TRN_TIMING_ONLY"
_live_ranks: list[int] = []


def timing_only() -> bool:
    """Whether this process computes no numbers."""
    return os.environ.get(TIMING_ONLY_VARIABLE, "") not in ("", "0")


def live_ranks() -> list[int]:
    """The ranks that have a process, ascending; empty when this one stands for all."""
    return _live_ranks


def enter_world(world_size: int, nodes: int | None = None, stages: int = 1) -> None:
    """Makes this process a rank of ``world_size`` ranks, by default on the fewest nodes that they divide evenly over.

    Args:
        stages: how many processes there are, of which this is number ``RANK``: each stands for ``world_size / stages``
            consecutive ranks, a pipeline stage, as the first of them. A single one is rank 0 and needs no ``RANK``.

    Raises:
        ValueError: the ranks do not divide evenly over ``nodes`` or ``stages``, or there is no process ``RANK``.
    """
    from trn_dist.hardware.environment import named_cluster

    if nodes is None:
        nodes = named_cluster().nodes_for(world_size)
    if nodes < 1 or world_size % nodes:
        raise ValueError(f"{world_size} ranks do not divide evenly over {nodes} nodes")
    if stages < 1 or world_size % stages:
        raise ValueError(f"{world_size} ranks do not divide evenly over {stages} pipeline stages")
    number = 0
    if stages > 1:
        text = os.environ.get("RANK", "")
        if not text.isdigit() or int(text) >= stages:
            raise ValueError(f"RANK={text}: must be 0 to {stages - 1}, for each pipeline stage is a process")
        number = int(text)
        _live_ranks[:] = range(0, world_size, world_size // stages)
    rank = number * (world_size // stages)
    local_world_size = world_size // nodes
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }
