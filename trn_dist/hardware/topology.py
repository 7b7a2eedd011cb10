"""The cluster as a graph of directed links, and the routes through it.

Vertices are ``("core", rank)``, ``("hbm", rank)``, ``("chip", c)``, ``("switch", node)``, ``("ultraswitch", unit)``,
``("nic", n)`` and ``("rail", i)``, numbered over the whole cluster. Nothing is built in advance: a link is worked out
when it is asked for, so 16,384 chips cost no more than one. Routes are dimension-ordered on a torus, the shorter way
round; a route that would cross a broken link goes round it. Called by the collectives' cost, replay and ``trn ls``.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trn_dist.hardware.cluster import Cluster, LinkFault
from trn_dist.hardware.config_file import ConfigError

Vertex = tuple[str, int]
Hop = tuple[Vertex, Vertex]


class RouteError(RuntimeError):
    """Broken links leave no way between two cores."""


class Link(NamedTuple):
    """A directed link; ``kind`` is ``dma`` (core, chip), ``hbm``, ``node``, ``ultraserver``, ``efa`` or ``spine``."""

    source: Vertex
    target: Vertex
    kind: str
    bandwidth_gbps: float
    latency_us: float

    def __str__(self) -> str:
        return f"{name_of(self.source)} -> {name_of(self.target)}"


class Route(NamedTuple):
    """The links from one core to another, in order."""

    links: tuple[Link, ...]

    @property
    def latency_us(self) -> float:
        return sum(link.latency_us for link in self.links)

    @property
    def bandwidth_gbps(self) -> float:
        """Of the slowest link, with nobody else on it."""
        return min(link.bandwidth_gbps for link in self.links)


def name_of(vertex: Vertex) -> str:
    """A vertex as reports and files name it: ``chip 3``."""
    return f"{vertex[0]} {vertex[1]}"


class Topology:
    """The links of a cluster. ``faults`` add to those that the cluster's file names.

    Raises :class:`ConfigError` for a fault on a link that does not exist.
    """

    def __init__(self, cluster: Cluster, faults: Iterable[LinkFault] = ()) -> None:
        self.cluster = cluster
        self.faults = (*cluster.link_faults, *faults)
        self._cores_per_chip = cluster.logical_cores_per_chip
        self._chips_per_node = cluster.chips_per_node
        self._nodes_per_unit = cluster.nodes_per_unit
        node, upper = cluster.levels.node, cluster.levels.ultraserver
        # Torus dimensions as (size, stride in chips), the last one nearest; a switch has none.
        self._node_torus = _strides(node.shape, 1) if node.kind == "torus" else []
        self._upper_torus = _strides(upper.shape, self._chips_per_node) if upper and upper.kind == "torus" else []
        self._fault_of: dict[Hop, tuple[float, float]] = {}
        for fault in self.faults:
            source, target = self._parse(fault.source), self._parse(fault.target)
            for hop in [(source, target), (target, source)][: 2 if fault.both_ways else 1]:
                self.link(*hop)
                self._fault_of[hop] = (fault.bandwidth_share, fault.extra_latency_us)
        self.broken_hops = frozenset(hop for hop, (left, _) in self._fault_of.items() if left == 0)
        # functools caches on the instance, so that a topology and its caches go together.
        self.link = functools.lru_cache(maxsize=None)(self.link)  # type: ignore[method-assign]
        self.chip_route = functools.lru_cache(maxsize=None)(self.chip_route)  # type: ignore[method-assign]

    # Places

    def chip_of(self, rank: int) -> int:
        """The chip of a rank, numbered over the whole cluster."""
        return rank // self._cores_per_chip

    def node_of(self, rank: int) -> int:
        return rank // (self._cores_per_chip * self._chips_per_node)

    def nic_of(self, chip: int) -> int:
        """The network card of a chip, numbered over the whole cluster."""
        if self.cluster.efa is None:
            raise ConfigError(f"cluster {self.cluster.name} has no [efa]")
        return chip * self.cluster.efa.nics_per_node // self._chips_per_node

    def faulty_nodes(self) -> list[int]:
        """Nodes that have a link with a fault, sorted."""
        return sorted(
            {node for hop in self._fault_of for vertex in hop if (node := self._node_of_vertex(vertex)) is not None}
        )

    # Links

    def link(self, source: Vertex, target: Vertex) -> Link:
        """The link from ``source`` to ``target``. A broken one has bandwidth 0. Raises ConfigError if there is none."""
        cluster, kinds = self.cluster, (source[0], target[0])
        core = cluster.chip
        found: tuple[str, float, float] | None = None
        if not (self._exists(source) and self._exists(target)):
            pass
        elif kinds in (("core", "chip"), ("chip", "core")):
            rank, chip = (source[1], target[1]) if kinds[0] == "core" else (target[1], source[1])
            if self.chip_of(rank) == chip:
                found = ("dma", core.dma_bandwidth_gbps_per_logical_core, core.dma.start_latency_us / 2)
        elif kinds == ("core", "hbm") and source[1] == target[1]:
            found = ("hbm", core.hbm_bandwidth_gbps_per_logical_core, 0.0)
        elif self._joined(source, target):
            if "nic" in kinds and cluster.efa is not None:
                on_rail = "rail" in kinds
                found = ("efa", cluster.efa.nic_bandwidth_gbps, cluster.efa.hop_latency_us / 2 if on_rail else 0.0)
            elif kinds == ("rail", "rail") and cluster.efa is not None:  # the spine does not block
                found = ("spine", cluster.efa.nic_bandwidth_gbps * cluster.nodes, 0.0)
            else:
                upper = "ultraswitch" in kinds or (
                    kinds == ("chip", "chip") and source[1] // self._chips_per_node != target[1] // self._chips_per_node
                )
                level = cluster.levels.ultraserver if upper else cluster.levels.node
                assert level is not None
                found = ("ultraserver" if upper else "node", level.bandwidth_gbps, level.latency_us)
        if found is None:
            raise ConfigError(f"{cluster.name} has no link from {name_of(source)} to {name_of(target)}")
        kind, bandwidth_gbps, latency_us = found
        left, extra_us = self._fault_of.get((source, target), (1.0, 0.0))
        return Link(source, target, kind, bandwidth_gbps * left, latency_us + extra_us)

    def _exists(self, vertex: Vertex) -> bool:
        cluster, nics = self.cluster, self.cluster.efa.nics_per_node if self.cluster.efa else 0
        counts = {
            "core": cluster.world_size,
            "hbm": cluster.world_size,
            "chip": cluster.chips,
            "switch": cluster.nodes,
            "ultraswitch": cluster.count,
            "nic": cluster.nodes * nics,
            "rail": nics,
        }
        return 0 <= vertex[1] < counts.get(vertex[0], 0)

    def _joined(self, source: Vertex, target: Vertex) -> bool:
        """Whether a link leads from one to the other; looked up at the end that has fewer."""
        if source[0] == target[0] == "rail":
            return source != target
        many = ("rail", "ultraswitch", "switch")
        return source in self.neighbours(target) if source[0] in many else target in self.neighbours(source)

    def neighbours(self, vertex: Vertex) -> list[Vertex]:
        """Where links lead from a chip, switch, network card or rail; cores are left out."""
        kind, index = vertex
        node_level, upper = self.cluster.levels.node, self.cluster.levels.ultraserver
        per_unit = self._chips_per_node * self._nodes_per_unit
        if kind == "chip":
            around: list[Vertex] = [("chip", chip) for chip in self.connected_chips(index)]
            if node_level.kind == "switch":
                around.append(("switch", index // self._chips_per_node))
            if upper and upper.kind == "switch":
                around.append(("ultraswitch", index // per_unit))
            if self.cluster.efa:
                around.append(("nic", self.nic_of(index)))
            return around
        if kind == "switch":
            return [("chip", index * self._chips_per_node + i) for i in range(self._chips_per_node)]
        if kind == "ultraswitch":
            return [("chip", index * per_unit + i) for i in range(per_unit)]
        if self.cluster.efa is None:
            return []
        nics = self.cluster.efa.nics_per_node
        if kind == "nic":
            per_nic = self._chips_per_node // nics
            return [*(("chip", index * per_nic + i) for i in range(per_nic)), ("rail", index % nics)]
        if kind == "rail":
            others: list[Vertex] = [("rail", rail) for rail in range(nics) if rail != index]
            return others + [("nic", node * nics + index) for node in range(self.cluster.nodes)]
        return []

    def connected_chips(self, chip: int) -> list[int]:
        """The chips at the other ends of a chip's torus links, in neuron-ls' order: up, left, down, right, then the
        UltraServer's ring. Empty behind a switch."""
        found: list[int] = []
        for dimensions in (self._node_torus, self._upper_torus):
            back = [_shifted(chip, size, stride, -1) for size, stride in dimensions]
            ahead = [_shifted(chip, size, stride, 1) for size, stride in dimensions]
            found += [other for other in (*back, *ahead) if other != chip]
        return list(dict.fromkeys(found))

    def links(self, node: int = 0) -> Iterator[Link]:
        """All links that leave a chip, switch or network card of a node, for drawing."""
        first = node * self._chips_per_node
        vertices: list[Vertex] = [("chip", chip) for chip in range(first, first + self._chips_per_node)]
        if self.cluster.levels.node.kind == "switch":
            vertices.append(("switch", node))
        if self.cluster.efa:
            nics = self.cluster.efa.nics_per_node
            vertices += [("nic", node * nics + i) for i in range(nics)]
        for vertex in vertices:
            for target in self.neighbours(vertex):
                yield self.link(vertex, target)

    # Routes

    def route(self, source: int, target: int) -> Route:
        """The way from the core of rank ``source`` to that of rank ``target``; empty for a rank itself.

        Raises :class:`RouteError` when broken links leave no way.
        """
        if source == target:
            return Route(())
        a, b = self.chip_of(source), self.chip_of(target)
        ends = (self.link(("core", source), ("chip", a)), self.link(("chip", b), ("core", target)))
        for link in ends:
            if link.bandwidth_gbps == 0:
                raise RouteError(f"no route from core {source} to core {target}: {link} is broken")
        return Route((ends[0], *self.chip_route(a, b), ends[1]))

    def chip_route(self, a: int, b: int) -> tuple[Link, ...]:
        """The links from chip ``a`` to chip ``b``."""
        hops = self._hops(a, b)
        if self.broken_hops and not self.broken_hops.isdisjoint(hops):
            hops = self._detour(a, b)
        return tuple(self.link(*hop) for hop in hops)

    def _hops(self, a: int, b: int) -> list[Hop]:
        """The way from chip to chip with every link whole."""
        if a == b:
            return []
        per_unit = self._chips_per_node * self._nodes_per_unit
        if a // per_unit != b // per_unit:
            return self._efa_hops(a, b)
        if a // self._chips_per_node == b // self._chips_per_node:
            return self._node_hops(a, b)
        if not self._upper_torus:
            return _path(("chip", a), ("ultraswitch", a // per_unit), ("chip", b))
        landing = a - a % self._chips_per_node + b % self._chips_per_node
        return self._node_hops(a, landing) + _torus_hops(landing, b, self._upper_torus)

    def _node_hops(self, a: int, b: int) -> list[Hop]:
        if a == b:
            return []
        if self._node_torus:
            return _torus_hops(a, b, self._node_torus)
        return _path(("chip", a), ("switch", a // self._chips_per_node), ("chip", b))

    def _efa_hops(self, a: int, b: int) -> list[Hop]:
        assert self.cluster.efa is not None
        nics = self.cluster.efa.nics_per_node
        out, into = self.nic_of(a), self.nic_of(b)
        rails = dict.fromkeys([out % nics, into % nics])
        return _path(("chip", a), ("nic", out), *(("rail", rail) for rail in rails), ("nic", into), ("chip", b))

    def _detour(self, a: int, b: int) -> list[Hop]:
        """The shortest way that avoids broken links; over EFA by way of chips whose network card works."""
        per_unit = self._chips_per_node * self._nodes_per_unit
        if a // per_unit == b // per_unit:
            hops = self._search(a, b)
        else:
            out = next((c for c in self._by_distance(a, reverse=False) if self._card_works(c, out=True)), None)
            into = next((c for c in self._by_distance(b, reverse=True) if self._card_works(c, out=False)), None)
            hops = None
            if out is not None and into is not None:
                before, after = self._search(a, out), self._search(into, b)
                if before is not None and after is not None:
                    hops = before + self._efa_hops(out, into) + after
        if hops is None:
            broken = ", ".join(sorted(f"{name_of(s)} -> {name_of(t)}" for s, t in self.broken_hops))
            raise RouteError(f"no route from chip {a} to chip {b} of {self.cluster.name}: broken are {broken}")
        return hops

    def _card_works(self, chip: int, out: bool) -> bool:
        assert self.cluster.efa is not None
        nic: Vertex = ("nic", self.nic_of(chip))
        rail: Vertex = ("rail", nic[1] % self.cluster.efa.nics_per_node)
        hops = [(("chip", chip), nic), (nic, rail)] if out else [(rail, nic), (nic, ("chip", chip))]
        return self.broken_hops.isdisjoint(hops)

    def _by_distance(self, chip: int, reverse: bool) -> list[int]:
        """The chips of a chip's node, itself first, then by the length of the way to it (``reverse``: from it)."""
        first = chip - chip % self._chips_per_node

        def distance(other: int) -> int:
            hops = self._hops(other, chip) if reverse else self._hops(chip, other)
            return len(hops)

        return sorted(range(first, first + self._chips_per_node), key=lambda other: (distance(other), other))

    def _search(self, a: int, b: int) -> list[Hop] | None:
        """Breadth-first over the chips and switches of a unit."""
        start, goal = ("chip", a), ("chip", b)
        came_from: dict[Vertex, Vertex] = {start: start}
        queue: deque[Vertex] = deque([start])
        while queue and goal not in came_from:
            vertex = queue.popleft()
            for neighbour in self.neighbours(vertex):
                if neighbour[0] != "nic" and neighbour not in came_from and (vertex, neighbour) not in self.broken_hops:
                    came_from[neighbour] = vertex
                    queue.append(neighbour)
        if goal not in came_from:
            return None
        backwards = [goal]
        while backwards[-1] != start:
            backwards.append(came_from[backwards[-1]])
        return _path(*reversed(backwards))

    def _parse(self, text: str) -> Vertex:
        kind, _, number = text.strip().rpartition(" ")
        if kind not in ("core", "chip", "switch", "ultraswitch", "nic", "rail", "hbm") or not number.isdigit():
            raise ConfigError(
                f"link fault at {text!r}: must be a kind and a number, such as 'chip 3', 'nic 0' or 'core 5'"
            )
        return kind, int(number)

    def _node_of_vertex(self, vertex: Vertex) -> int | None:
        kind, index = vertex
        if kind in ("core", "hbm"):
            return self.node_of(index)
        if kind == "chip":
            return index // self._chips_per_node
        if kind == "switch":
            return index
        if kind == "nic" and self.cluster.efa is not None:
            return index // self.cluster.efa.nics_per_node
        return None


def _strides(shape: tuple[int, ...], innermost: int) -> list[tuple[int, int]]:
    strides, stride = [], innermost
    for size in reversed(shape):
        strides.append((size, stride))
        stride *= size
    return strides[::-1]


def _shifted(chip: int, size: int, stride: int, step: int) -> int:
    place = chip // stride % size
    return chip + ((place + step) % size - place) * stride


def _torus_hops(a: int, b: int, dimensions: list[tuple[int, int]]) -> list[Hop]:
    """Dimension by dimension, the shorter way round. Half-way, even places go up and odd ones down, so that both
    directions carry the same load when everyone talks to everyone."""
    hops: list[Hop] = []
    here = a
    for size, stride in reversed(dimensions):
        place = here // stride % size
        ahead = (b // stride - place) % size
        up = 2 * ahead < size or (2 * ahead == size and place % 2 == 0)
        for _ in range(ahead if up else (size - ahead) % size):
            there = _shifted(here, size, stride, 1 if up else -1)
            hops.append((("chip", here), ("chip", there)))
            here = there
    return hops


def _path(*vertices: Vertex) -> list[Hop]:
    return list(itertools.pairwise(vertices))
