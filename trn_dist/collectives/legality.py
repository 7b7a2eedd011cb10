"""Which groups and collectives the real stack refuses.

The rules and their sources are in each cluster file's ``[legality]``. Called when process groups are made and by the
planner; findings are printed, and in strict mode refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trn_dist.collectives.algorithms import chips_of, ring_orders
from trn_dist.collectives.group import Layout
from trn_dist.hardware import Cluster, Topology


class Finding(NamedTuple):
    """One rule that a group breaks. ``refused``: the real stack fails; otherwise it runs, but slower."""

    rule: str
    message: str
    refused: bool = True


class IllegalGroupError(ValueError):
    """The real stack would refuse a group, and strict mode is on."""


def check_group(topology: Topology, ranks: Sequence[int], name: str = "group") -> list[Finding]:
    """What is wrong with a group of ranks, whatever it is used for."""
    cluster, rules, size = topology.cluster, topology.cluster.legality, len(ranks)
    layout = Layout.of(ranks, cluster)
    who = f"{name} of {size} ranks ({_short(layout.ranks)})"
    findings = []
    multiple = rules.group_size_multiple
    if (rules.group_sizes or multiple) and size not in rules.group_sizes and not (multiple and size % multiple == 0):
        sizes = ", ".join(map(str, rules.group_sizes))
        findings.append(Finding("group_size", f"{who}: sizes that work are {sizes} and multiples of {multiple}"))
    if rules.symmetric_across_nodes and not layout.symmetric(cluster):
        counts = ", ".join(
            f"node {node}: {len(members)}" for node, members in sorted(layout.node_teams(cluster).items())
        )
        findings.append(
            Finding(
                "symmetric_across_nodes",
                f"{who}: every node must hold the same local ranks of a group that spans nodes; ranks by {counts}",
            )
        )
    if rules.ring_on_torus:
        for node, members in sorted(layout.node_teams(cluster).items()):
            chips = list(chips_of(topology, members))
            if not _is_ring(topology, chips):
                findings.append(
                    Finding(
                        "ring_on_torus",
                        f"{who}: its chips on node {node} ({_short(chips)}) are no ring of neighbours on the torus, so "
                        "neither mesh nor hierarchical algorithms are used",
                        refused=False,
                    )
                )
                break
    return findings


def check_collective(topology: Topology, operation: str, ranks: Sequence[int], name: str = "group") -> list[Finding]:
    """What is wrong with an operation on a group, besides the group itself."""
    cluster = topology.cluster
    lnc = cluster.chip.physical_cores_per_logical
    if operation == "all_to_all" and len(ranks) == 2 and not cluster.legality.two_rank_all_to_all:
        message = f"{name} of 2 ranks ({_short(sorted(ranks))}): all_to_all of 2 ranks is not supported with LNC={lnc}"
        return [Finding("two_rank_all_to_all", message)]
    return []


def check_communicators(cluster: Cluster, groups: Iterable[Sequence[int]]) -> list[Finding]:
    """Whether some rank is in more groups than the runtime has communicators for; ``groups`` are all of a program."""
    counts: dict[int, int] = {}
    for group in groups:
        for rank in group:
            counts[rank] = counts.get(rank, 0) + 1
    limit = cluster.legality.communicators_max
    if not limit or not counts:
        return []
    rank = max(counts, key=lambda r: (counts[r], -r))
    if counts[rank] <= limit:
        return []
    return [
        Finding("communicators_max", f"rank {rank} is in {counts[rank]} groups; the runtime has {limit} communicators")
    ]


def refuse(findings: Iterable[Finding]) -> None:
    """Strict mode: raises :class:`IllegalGroupError` with all findings that the real stack would refuse."""
    refused = [finding for finding in findings if finding.refused]
    if refused:
        raise IllegalGroupError("; ".join(f"{finding.message} [{finding.rule}]" for finding in refused))


def _is_ring(topology: Topology, chips: list[int]) -> bool:
    """Whether one of the library's orders goes round the chips by single links (two neighbours count as a ring)."""
    if len(chips) == 1:
        return True
    for way in ring_orders(topology, chips):
        cycle = way[0]
        if all(b in topology.connected_chips(a) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)):
            return True
    return False


def _short(ranks: Sequence[int]) -> str:
    """The first few of a list."""
    shown = ", ".join(map(str, ranks[:6]))
    return shown if len(ranks) <= 6 else f"{shown}, ..., {ranks[-1]}"
