"""A cluster: chips on nodes, how they are linked, and what its collectives library does.

The figures are in ``configs/clusters/*.toml``. A *node* is what torchrun calls one: a server with its own ranks. A
*unit* is what a file describes: one instance, or one UltraServer of several nodes; a cluster is ``count`` units joined
by EFA. Called by ``topology.py``, the collectives' cost, the launcher and the planner. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from trn_dist.hardware.chip import Chip, load_chip
from trn_dist.hardware.config_file import (
    ConfigError,
    Fraction,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    build,
    merge,
    read_config,
)

ALGORITHMS = ("mesh", "rdh", "kangaring", "ring")


class Placement(NamedTuple):
    """Where a rank runs: node of the cluster, chip of the node, logical core of the chip."""

    node: int
    chip: int
    core: int


@dataclass(frozen=True)
class Level:
    """One level of chip-to-chip links: inside a node, or between the nodes of an UltraServer.

    ``torus``: each chip has a link to both neighbours in each dimension of ``shape``, ``bandwidth_gbps`` each way.
    ``switch``: each chip has one link to a switch, ``bandwidth_gbps`` each way. Of the two levels the first joins the
    chips of a node, the second joins chips of different nodes (a torus: those with the same place in their node).
    """

    kind: Annotated[str, Names(("torus", "switch"))]
    shape: tuple[PositiveInt, ...]
    bandwidth_gbps: PositiveFloat
    latency_us: NonNegativeFloat

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Levels:
    """The levels of links, inside out. The size of ``ultraserver`` is the number of nodes in a unit."""

    node: Level
    ultraserver: Level | None = None


@dataclass(frozen=True)
class Efa:
    """The network cards of a node. Card i of every node is on rail i; rails do not block each other."""

    nics_per_node: PositiveInt
    nic_gbit_per_s: PositiveFloat
    # From a chip's HBM to another's, through both cards.
    hop_latency_us: NonNegativeFloat

    @property
    def nic_bandwidth_gbps(self) -> float:
        return self.nic_gbit_per_s / 8


@dataclass(frozen=True)
class LaunchProfile:
    """What a collective costs before and between the hops, in one way of running it."""

    launch_overhead_us: NonNegativeFloat
    # Added to the links' latency in every step of an algorithm.
    step_overhead_us: NonNegativeFloat


@dataclass(frozen=True)
class CollectivesLibrary:
    """The algorithms of the collectives library, when it takes which, and what part of a link's rate it reaches."""

    algorithms: tuple[Annotated[str, Names(ALGORITHMS)], ...]
    # Sizes at which it changes algorithm inside a node with `thresholds_at_ranks` ranks of a group; they scale with the
    # ranks there. The second stands for the first in a group across nodes.
    mesh_below_bytes: NonNegativeInt
    mesh_below_bytes_across_nodes: NonNegativeInt
    rdh_below_bytes: NonNegativeInt
    thresholds_at_ranks: PositiveInt
    # Part of a link's rate that a collective reaches.
    link_efficiency: Fraction
    # What is left of it at a network card that all other nodes send to at once.
    mesh_ingress_efficiency: Fraction
    # A ring inside a node takes this many steps for each rank in the place of one.
    ring_steps_per_rank: PositiveInt
    # HBM accesses of KangaRing in parts of a ring's.
    kangaring_gather_accesses: Fraction
    kangaring_reduce_accesses: Fraction
    launch_profile: str
    launch: dict[str, LaunchProfile]


@dataclass(frozen=True)
class LegalityRules:
    """What the real stack refuses; an empty list or 0 switches a rule off."""

    # Group sizes that work besides multiples of group_size_multiple.
    group_sizes: tuple[PositiveInt, ...]
    group_size_multiple: NonNegativeInt
    communicators_max: NonNegativeInt
    symmetric_across_nodes: bool
    two_rank_all_to_all: bool
    ring_on_torus: bool


@dataclass(frozen=True)
class LinkFault:
    """A link that lost some of its rate, or all of it. Ends are named as in reports: ``"chip 3"``, ``"nic 0"``."""

    source: str
    target: str
    bandwidth_share: Share
    extra_latency_us: NonNegativeFloat = 0.0
    both_ways: bool = True


@dataclass(frozen=True)
class Cluster:
    """``count`` units of one kind, ready to be asked for sizes and places."""

    name: str
    device_name: str
    chip: Chip
    levels: Levels
    efa: Efa | None
    collectives: CollectivesLibrary
    legality: LegalityRules
    link_faults: tuple[LinkFault, ...] = ()
    count: int = 1
    profile: str = ""

    @property
    def logical_cores_per_chip(self) -> int:
        return self.chip.logical_cores

    @property
    def chips_per_node(self) -> int:
        return self.levels.node.size

    @property
    def nodes_per_unit(self) -> int:
        return self.levels.ultraserver.size if self.levels.ultraserver else 1

    @property
    def nodes(self) -> int:
        return self.count * self.nodes_per_unit

    @property
    def chips(self) -> int:
        return self.nodes * self.chips_per_node

    @property
    def cores_per_node(self) -> int:
        """Ranks of a node, one a logical core."""
        return self.chips_per_node * self.logical_cores_per_chip

    @property
    def world_size(self) -> int:
        return self.nodes * self.cores_per_node

    def nodes_for(self, ranks: int) -> int:
        """The smallest number of nodes that so many ranks (at least 1) divide evenly over."""
        return next(n for n in range(-(-ranks // self.cores_per_node), ranks + 1) if ranks % n == 0)

    def placement(self, rank: int) -> Placement:
        """Rank r of a node runs on its logical core r, core by core and chip by chip, as neuron-ls numbers them."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank}: {self.name} x {self.count} has ranks 0 to {self.world_size - 1}")
        node, local = divmod(rank, self.cores_per_node)
        return Placement(node, *divmod(local, self.logical_cores_per_chip))

    def launch_profile(self, name: str = "") -> LaunchProfile:
        """The launch costs of a profile, by default of the one that the file names."""
        name = name or self.collectives.launch_profile
        if name not in self.collectives.launch:
            raise ConfigError(
                f"cluster {self.name}: no launch profile {name!r}; there are {', '.join(self.collectives.launch)}"
            )
        return self.collectives.launch[name]


@dataclass(frozen=True)
class _ClusterFile:
    """A cluster file's own keys, before the chip is read and a profile is laid on top."""

    name: str
    chip: str
    levels: Levels
    collectives: CollectivesLibrary
    legality: LegalityRules
    device_name: str = ""
    efa: Efa | None = None
    link_faults: tuple[LinkFault, ...] = ()


def load_cluster(
    name: str | Path,
    *,
    count: int | None = None,
    nodes: int | None = None,
    profile: str | None = None,
    lnc: int | None = None,
) -> Cluster:
    """A cluster of a shipped file (``"trn2.48xlarge"``) or of a file of your own (a path ending in ``.toml``).

    ``count`` is the number of units, ``nodes`` the number of nodes (whole units; an UltraServer has several),
    ``profile`` one of the file's ``[profiles]`` in place of its default, ``lnc`` the physical cores of a logical core.
    Raises :class:`ConfigError` with file, key, value and legal range.
    """
    table, path = read_config("clusters", name)
    table.setdefault("name", path.stem)
    profiles = table.pop("profiles", {})
    chosen = profile or table.get("profile", "")
    table.pop("profile", None)
    if chosen and chosen not in profiles:
        known = f"the file has {', '.join(profiles)}" if profiles else "the file has none"
        raise ConfigError(f"{path}: key 'profile' = {chosen!r}: no such profile; {known}")
    if chosen:
        table = merge(table, profiles[chosen])

    file: _ClusterFile = build(_ClusterFile, table, path)
    chip = load_chip(file.chip, near=path.parent)
    if lnc is not None:
        if lnc < 1 or chip.physical_cores % lnc:
            raise ConfigError(f"lnc={lnc}: must divide the {chip.physical_cores} physical cores of a {chip.name}")
        chip = dataclasses.replace(chip, physical_cores_per_logical=lnc)
    cluster = Cluster(
        name=file.name,
        device_name=file.device_name or chip.device_name,
        chip=chip,
        levels=file.levels,
        efa=file.efa,
        collectives=file.collectives,
        legality=file.legality,
        link_faults=file.link_faults,
        profile=chosen,
    )
    cluster.launch_profile()
    if file.efa and cluster.chips_per_node % file.efa.nics_per_node:
        raise ConfigError(
            f"{path}: key 'nics_per_node' in [efa] = {file.efa.nics_per_node}: "
            f"must divide the {cluster.chips_per_node} chips of a node"
        )
    units = _units(cluster, path, count, nodes)
    if units > 1 and cluster.efa is None:
        raise ConfigError(
            f"{path}: count={units}: {cluster.name} has no [efa], so it cannot be joined to others; count must be 1"
        )
    return dataclasses.replace(cluster, count=units)


def _units(cluster: Cluster, path: Path, count: int | None, nodes: int | None) -> int:
    per_unit = cluster.nodes_per_unit
    if nodes is not None:
        if nodes < 1 or nodes % per_unit:
            raise ConfigError(f"{path}: nodes={nodes}: must be a multiple of the {per_unit} nodes of a {cluster.name}")
        if count is not None and count * per_unit != nodes:
            raise ConfigError(
                f"{path}: nodes={nodes} and count={count}: {count} x {per_unit} nodes are {count * per_unit}"
            )
        return nodes // per_unit
    if count is None:
        return 1
    if count < 1:
        raise ConfigError(f"{path}: count={count}: must be at least 1")
    return count
