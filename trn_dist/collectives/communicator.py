"""What each collective of a group costs on a topology, with its sibling groups at work on the same links.

A group that spans nodes works in stages: inside the nodes, along the lanes that join equal places of an UltraServer's
nodes, along the lanes over EFA. A stage takes its algorithm's transfers, the siblings' too, to ``pricing.py``. Called
by whoever creates a process group, by the planner and by ``trn``; its result, a :class:`CostTable` for each operation,
goes to C++.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trn_dist.collectives import algorithms
from trn_dist.collectives.algorithms import Phase, backwards, with_accesses
from trn_dist.collectives.cost_table import CostTable, Line, LinkPhase, build_table
from trn_dist.collectives.group import Layout, Ranks, sibling_groups
from trn_dist.collectives.pricing import Price, price
from trn_dist.hardware import ConfigError, Link, Topology
from trn_dist.hardware.cluster import LaunchProfile

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "barrier",
)

BARRIER_BYTES = 4  # a barrier is an all-reduce of one element

# The phases of one team (the ranks of a node, or a lane), or None where the algorithm cannot be had.
Plan = Callable[[Ranks], "list[Phase] | None"]
# What a collective costs from a size on: the lines of which the cheapest counts.
Segments = list[tuple[int, list[Line]]]


@dataclass(frozen=True)
class Site:
    """A part of the cluster that is looked at: the group's own teams there, and its siblings' teams."""

    own: list[Ranks]
    others: list[Ranks]


@dataclass(frozen=True)
class Stage:
    """One level of a collective: ``node``, ``lane``, or ``flat`` for a group without order. A team works on ``part`` of
    the message."""

    level: str
    part: float
    sites: list[Site]


class Communicator:
    """The costs of a group of ranks.

    ``siblings`` are the groups that run the same collective at the same time (with or without the group itself); by
    default the groups of the mesh dimension that ``ranks`` seems to be one of. ``launch_profile`` is one of the
    cluster's, by default the one its file names. ``keep_loads`` looks at every node of the group, where otherwise one
    stands for all, and keeps in each piece of a table which links it loads. Raises :class:`ConfigError` for ranks that
    the cluster does not have, and from :meth:`table` :class:`RouteError` when broken links cut the group in two.
    """

    def __init__(
        self,
        topology: Topology,
        ranks: Sequence[int],
        siblings: Iterable[Sequence[int]] | None = None,
        launch_profile: str = "",
        keep_loads: bool = False,
    ) -> None:
        cluster = topology.cluster
        if not ranks or len(set(ranks)) != len(ranks):
            raise ConfigError(f"group {list(ranks)}: must have at least one rank and none twice")
        for rank in (min(ranks), max(ranks)):
            cluster.placement(rank)
        self.topology = topology
        self.ranks: Ranks = tuple(sorted(ranks))
        self.launch = cluster.launch_profile(launch_profile)
        self._layout = Layout.of(self.ranks, cluster)
        nodes = self._layout.node_teams(cluster)
        # One node stands for all, unless a link of another has a fault.
        self._nodes = list(dict.fromkeys([min(nodes), *(node for node in topology.faulty_nodes() if node in nodes)]))
        self._keep_loads = keep_loads
        if keep_loads:
            self._nodes = sorted(nodes)
        self._units = list(dict.fromkeys(node // cluster.nodes_per_unit for node in self._nodes))
        groups = sibling_groups(self.ranks, cluster.world_size) if siblings is None else siblings
        self._siblings = [
            Layout.of(group, cluster)
            for group in map(sorted, groups)
            if tuple(group) != self.ranks and any(self._unit_of(rank) in self._units for rank in group)
        ]
        self._stages = self._make_stages()
        self._tables: dict[str, CostTable] = {}

    def table(self, operation: str) -> CostTable:
        """The cost table of an operation, one of :data:`OPERATIONS`."""
        if operation not in OPERATIONS:
            raise ValueError(f"no collective is named {operation!r}; there are {', '.join(OPERATIONS)}")
        if operation not in self._tables:
            start = [(0, [Line("", self.launch.launch_overhead_us, 0.0)])]
            segments = _add(start, self._segments(operation))
            self._tables[operation] = build_table(operation, len(self.ranks), segments)
        return self._tables[operation]

    def time_ps(self, operation: str, nbytes: int) -> int:
        """Picoseconds of an operation on ``nbytes`` (:class:`CostTable` says what counts)."""
        return self.table(operation).time_ps(nbytes)

    def algorithm(self, operation: str, nbytes: int) -> str:
        return self.table(operation).algorithm(nbytes)

    # Operations

    def _segments(self, operation: str) -> Segments:
        if len(self.ranks) == 1:
            return [(0, [Line("local", 0.0, 0.0)])]
        if operation in ("all_gather", "reduce_scatter", "all_reduce"):
            return self._hierarchy(operation)
        if operation == "broadcast":  # TorchNeuron's process group broadcasts by an all-reduce (accelerate says so)
            return self._hierarchy("all_reduce")
        if operation == "barrier":
            lines = _at(self._hierarchy("all_reduce"), BARRIER_BYTES)
            return [(0, [line._replace(ps_per_byte=0.0) for line in lines])]
        if operation == "reduce":  # reduce-scatter, then the pieces to the root
            return _add(self._hierarchy("reduce_scatter"), self._direct(algorithms.to_root))
        if operation == "all_to_all":
            return self._direct(lambda team: algorithms.to_all(Layout.of(team, self.topology.cluster), self._units))
        plans: dict[str, Plan] = {
            "gather": algorithms.to_root,
            "scatter": algorithms.from_root,
            "send": algorithms.to_next,
        }
        return self._direct(plans[operation])

    def _hierarchy(self, operation: str) -> Segments:
        """Stages, and before them for a small all-reduce one step, as long as what that sends more takes less time than
        the hops that it saves (internode-collective-comm.rst). The library chooses by size: neither a fault nor what a
        launch adds to a step changes the choice."""
        segments = self._staged(operation)
        if operation != "all_reduce":
            return segments
        plain = self._without_faults_and_overhead()
        below = plain._one_step_below(segments if plain is self else plain._staged(operation))
        if below <= 0:
            return segments
        return [(0, self._one_step), *((max(start, below), lines) for start, lines in segments)]

    def _staged(self, operation: str) -> Segments:
        """The stages one after the other; all-reduce is a reduce-scatter up through them and an all-gather down."""
        segments: Segments = [(0, [Line("", 0.0, 0.0)])]
        for stage in self._stages:
            segments = _add(segments, self._stage(stage, operation))
        if len(self._stages) == 1:
            return segments
        return [
            (start, [line._replace(algorithm=f"hierarchical({line.algorithm})") for line in lines])
            for start, lines in segments
        ]

    @functools.cached_property
    def _one_step(self) -> list[Line]:
        """An all-reduce in one step of a mesh of all ranks; none where a stage or the library cannot do it."""
        cluster = self.topology.cluster
        # A lane's own algorithms have it. Over several nodes of an UltraServer it would pay for a few bytes only.
        several_nodes = any(len(nodes) > 1 for nodes in self._layout.places.values())
        if "mesh" not in cluster.collectives.algorithms or self._stages[0].level != "node" or several_nodes:
            return []

        def mesh(team: Ranks) -> list[Phase]:
            ingress = cluster.collectives.mesh_ingress_efficiency
            return algorithms.in_one_step(algorithms.to_all(Layout.of(team, cluster), self._units, ingress), len(team))

        return self._lines(self._flat(), "mesh", [mesh])

    def _one_step_below(self, staged: Segments) -> int:
        """The size from which the first of the stages' algorithms are quicker than one step."""
        sizes = [
            int((line.alpha_us - one_step.alpha_us) * 1e6 / (one_step.ps_per_byte - line.ps_per_byte))
            for one_step in self._one_step
            for line in staged[0][1]
            if one_step.ps_per_byte > line.ps_per_byte
        ]
        return min(sizes, default=staged[-1][0] if self._one_step else 0)

    def _without_faults_and_overhead(self) -> Communicator:
        """The same group where nothing is broken and a launch costs nothing."""
        if not self.topology.faults and self.launch.step_overhead_us == 0:
            return self
        cluster = self.topology.cluster
        library = dataclasses.replace(cluster.collectives, launch={"none": LaunchProfile(0.0, 0.0)})
        topology = Topology(dataclasses.replace(cluster, collectives=library, link_faults=()))
        return Communicator(topology, self.ranks, [layout.ranks for layout in self._siblings], "none")

    def _direct(self, plan: Plan) -> Segments:
        """Every transfer at once, without an algorithm."""
        return [(0, self._lines(self._flat(), "direct", [plan]))]

    def _flat(self) -> Stage:
        """All ranks at once."""
        return Stage("flat", 1.0, [Site([self.ranks], [sibling.ranks for sibling in self._siblings])])

    # Stages

    def _make_stages(self) -> list[Stage]:
        cluster, layout = self.topology.cluster, self._layout
        if not layout.symmetric(cluster):
            return [self._flat()]
        stages = []
        teams = layout.node_teams(cluster)
        per_node = len(teams[self._nodes[0]])
        if per_node > 1:
            beside = [sibling.node_teams(cluster) for sibling in self._siblings]
            sites = [Site([teams[node]], [other[node] for other in beside if node in other]) for node in self._nodes]
            stages.append(Stage("node", 1.0, sites))
        regular = [sibling for sibling in self._siblings if sibling.symmetric(cluster)]
        nodes_in_unit = len(layout.places[self._units[0]])
        if nodes_in_unit > 1:
            sites = [
                Site(layout.unit_lanes(unit), [lane for sibling in regular for lane in sibling.unit_lanes(unit)])
                for unit in self._units
            ]
            stages.append(Stage("lane", 1 / per_node, sites))
        if len(layout.places) > 1:
            lanes = [lane for sibling in regular for lane in sibling.efa_lanes()]
            stages.append(Stage("lane", 1 / (per_node * nodes_in_unit), [Site(layout.efa_lanes(), lanes)]))
        return stages

    def _stage(self, stage: Stage, operation: str) -> Segments:
        """The cost of a stage over the bytes of the whole message."""
        library = self.topology.cluster.collectives
        if stage.level == "flat":
            return [(0, self._lane_lines(stage, "ring", operation))]
        if stage.level == "lane":
            names = [name for name in ("ring", "mesh", "rdh") if name in library.algorithms]
            return [(0, [line for name in names for line in self._lane_lines(stage, name, operation)])]
        team = stage.sites[0].own[0]
        across_nodes = len(self._stages) > 1
        mesh_below = library.mesh_below_bytes_across_nodes if across_nodes else library.mesh_below_bytes
        mesh_below = mesh_below * len(team) // library.thresholds_at_ranks
        rdh_below = library.rdh_below_bytes * len(team) // library.thresholds_at_ranks
        # An algorithm that cannot be had leaves its sizes to the next.
        segments: Segments = []
        start = 0
        for name, end in (("mesh", mesh_below), ("rdh", rdh_below)):
            lines = self._node_lines(stage, name, operation) if name in library.algorithms and end > start else []
            if lines:
                segments.append((start, lines))
                start = end
        large = "kangaring" if "kangaring" in library.algorithms and self._whole_chips(team) else "ring"
        return [*segments, (start, self._node_lines(stage, large, operation))]

    def _whole_chips(self, team: Ranks) -> bool:
        cores = self.topology.cluster.logical_cores_per_chip
        return all(len(on_chip) == cores for on_chip in algorithms.chips_of(self.topology, team).values())

    def _node_lines(self, stage: Stage, name: str, operation: str) -> list[Line]:
        """An algorithm inside a node, in all the ways that the library may lay it."""
        topology = self.topology
        if name == "mesh":
            plans = [_both_ways(lambda team: algorithms.node_mesh(topology, team), operation)]
        elif name == "rdh":
            plans = [_both_ways(lambda team: algorithms.node_rdh(topology, team), operation)]
        else:
            chips = list(algorithms.chips_of(topology, stage.sites[0].own[0]))
            plans = [
                self._ring_plan(name, way, operation) for way in range(len(algorithms.ring_orders(topology, chips)))
            ]
        return self._lines(stage, name, plans)

    def _ring_plan(self, name: str, way: int, operation: str) -> Plan:
        topology, library = self.topology, self.topology.cluster.collectives

        def ring(team: Ranks) -> list[Phase]:
            return algorithms.node_ring(topology, team, way, library.ring_steps_per_rank)

        if name == "ring":
            return _both_ways(ring, operation)

        def kangaring(team: Ranks) -> list[Phase]:
            phases = algorithms.kangaring_steps(ring(team))
            up = with_accesses(backwards(phases), library.kangaring_reduce_accesses)
            down = with_accesses(phases, library.kangaring_gather_accesses)
            return {"all_gather": down, "reduce_scatter": up, "all_reduce": up + down}[operation]

        return kangaring

    def _lane_lines(self, stage: Stage, name: str, operation: str) -> list[Line]:
        ingress = self.topology.cluster.collectives.mesh_ingress_efficiency

        def lane(team: Ranks) -> list[Phase] | None:
            sites = [i for i, rank in enumerate(team) if stage.level == "flat" or self._unit_of(rank) in self._units]
            if name == "ring":
                return algorithms.lane_ring(team, sites)
            if name == "mesh":
                return algorithms.lane_mesh(team, sites, ingress, self._unit_of(team[0]) != self._unit_of(team[-1]))
            return algorithms.lane_rdh(team, sites)

        def one_step(team: Ranks) -> list[Phase] | None:
            gather = lane(team)
            return gather and algorithms.in_one_step(gather, len(team))

        plans = [_both_ways(lane, operation)]
        if name == "mesh" and operation == "all_reduce":
            plans.append(one_step)
        return self._lines(stage, name, plans)

    def _lines(self, stage: Stage, name: str, plans: list[Plan]) -> list[Line]:
        """A line for each plan that can be had, the dearest of the stage's sites counting."""
        lines = []
        for plan in plans:
            prices = []
            for site in stage.sites:
                own = [phases for team in site.own if (phases := plan(team)) is not None]
                if len(own) < len(site.own):
                    break
                others = [phases for team in site.others if len(team) > 1 and (phases := plan(team)) is not None]
                prices.append(price(self.topology, own, others, self.launch.step_overhead_us, self._keep_loads))
            else:
                dearest = max(prices, key=lambda p: p.ps_per_byte)
                latency_us = max(p.latency_us for p in prices)
                loads = _phases(prices, stage.part) if self._keep_loads else ()
                lines.append(Line(name, latency_us, dearest.ps_per_byte * stage.part, str(dearest.busiest), loads))
        return lines

    def _unit_of(self, rank: int) -> int:
        return self.topology.node_of(rank) // self.topology.cluster.nodes_per_unit


def _both_ways(gather: Plan, operation: str) -> Plan:
    """The phases of an operation from those of its all-gather."""

    def plan(team: Ranks) -> list[Phase] | None:
        down = gather(team)
        if down is None or operation == "all_gather":
            return down
        return backwards(down) if operation == "reduce_scatter" else backwards(down) + down

    return plan


def _add(first: Segments, second: Segments) -> Segments:
    """One after the other: from each size on, every line of the first with every line of the second."""
    starts = sorted({start for start, _ in itertools.chain(first, second)})
    return [(start, [_joined(a, b) for a in _at(first, start) for b in _at(second, start)]) for start in starts]


def _at(segments: Segments, size: int) -> list[Line]:
    """The lines that count at a size."""
    return [lines for start, lines in segments if start <= size][-1]


def _joined(a: Line, b: Line) -> Line:
    name = "+".join(name for name in (a.algorithm, b.algorithm) if name)
    bottleneck = a.bottleneck if a.ps_per_byte >= b.ps_per_byte and a.bottleneck else b.bottleneck
    return Line(name, a.alpha_us + b.alpha_us, a.ps_per_byte + b.ps_per_byte, bottleneck, a.phases + b.phases)


def _phases(prices: Sequence[Price], part: float) -> tuple[LinkPhase, ...]:
    """The phases of a stage, on the links of all its sites."""
    phases = []
    for number in range(max(len(site.loads) for site in prices)):
        costs: dict[Link, float] = {}
        for site in prices:
            for link, ps_per_byte in site.loads[number].items() if number < len(site.loads) else ():
                costs[link] = max(costs.get(link, 0.0), ps_per_byte)
        slowest = max(costs.values())
        if slowest > 0:
            phases.append(LinkPhase(slowest * part, {link: cost / slowest for link, cost in costs.items()}))
    return tuple(phases)
