"""Costs on a topology: which algorithm, what the siblings do, and what holds whatever the figures are."""

import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trn_dist.collectives import OPERATIONS, Communicator, mesh_groups
from trn_dist.collectives.group import Layout
from trn_dist.hardware import Cluster, ConfigError, LinkFault, RouteError, Topology, load_cluster

MIB = 2**20
TRN2 = Topology(load_cluster("trn2.48xlarge"))
TRN2_TWO = Topology(load_cluster("trn2.48xlarge", nodes=2))
TRN1_TWO = Topology(load_cluster("trn1.32xlarge", nodes=2))
TOPOLOGIES = {
    "trn1.32xlarge": Topology(load_cluster("trn1.32xlarge")),
    "trn2.48xlarge": TRN2,
    "two trn1.32xlarge": TRN1_TWO,
    "two trn2.48xlarge": TRN2_TWO,
    "trn2-ultraserver": Topology(load_cluster("trn2-ultraserver")),
    "trn3-gen1-ultraserver": Topology(load_cluster("trn3-gen1-ultraserver")),
    "two dgx-h100": Topology(load_cluster("dgx-h100", nodes=2)),
}
# Operations whose cost must reach a bound on what enters or leaves a chip, and the bound, in messages, for a group of
# `n` ranks of which `here` are on the chip.
CUTS = {
    "all_reduce": lambda n, here: 1.0,
    "all_gather": lambda n, here: (n - here) / n,
    "reduce_scatter": lambda n, here: (n - here) / n,
    "all_to_all": lambda n, here: here * (n - here) / n,
    "broadcast": lambda n, here: 1.0,
}


@st.composite
def groups(draw: st.DrawFn) -> tuple[str, tuple[int, ...]]:
    """A topology and one group of a dimension of a device mesh that fills it."""
    name = draw(st.sampled_from(sorted(TOPOLOGIES)))
    world = TOPOLOGIES[name].cluster.world_size
    inner = 2 ** draw(st.integers(0, world.bit_length() - 2))
    middle = 2 ** draw(st.integers(1, (world // inner).bit_length() - 1))
    members = draw(st.sampled_from(mesh_groups((world // inner // middle, middle, inner), 1)))
    return name, members


operations = st.sampled_from(OPERATIONS)
launches = st.sampled_from(["", "host"])
sizes = st.one_of(st.integers(0, 2**20), st.integers(0, 2**33))
few = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("nbytes", "algorithm"),
    [
        (4, "mesh"),
        (8192, "mesh"),
        (131072, "mesh"),
        (2 * MIB, "rdh"),
        (32 * MIB, "kangaring"),
        (512 * MIB, "kangaring"),
    ],
)
def test_sixteen_ranks_take_the_published_algorithm(nbytes: int, algorithm: str) -> None:
    """AWS's nccom-test example; its times are in benchmarks/validation."""
    assert Communicator(TRN2, range(16)).algorithm("all_reduce", nbytes) == algorithm


def test_sixteen_ranks_take_the_published_time_when_large() -> None:
    table = Communicator(TRN2, range(16), launch_profile="host").table("all_reduce")
    assert table.time_ps(32 * MIB) / 1e6 == pytest.approx(2754, rel=0.3)
    assert table.time_ps(512 * MIB) / 1e6 == pytest.approx(9690, rel=0.3)


def test_a_whole_node_switches_at_the_documented_sizes() -> None:
    node = Communicator(TRN2, range(64))
    below = [node.algorithm("all_reduce", size) for size in (MIB - 1, MIB, 56 * MIB - 1, 56 * MIB)]
    assert below == ["mesh", "rdh", "rdh", "kangaring"]


def test_a_small_all_reduce_goes_in_one_step() -> None:
    """As long as what it sends more takes less time than the hops that it saves (internode-collective-comm.rst)."""
    table = Communicator(TRN2, range(16)).table("all_reduce")
    one, two = table.pieces[:2]
    assert two.alpha_ps - one.alpha_ps == pytest.approx(
        two.from_bytes * (one.beta_ps_per_mib - two.beta_ps_per_mib) / MIB, rel=1e-3
    )
    assert 8192 < two.from_bytes < 131072  # between these the published time is no longer level
    # More data for each rank to send, and a network to send it through: it ends sooner.
    across = Communicator(TRN1_TWO, range(64)).table("all_reduce")
    assert [piece.algorithm for piece in across.pieces[:2]] == ["mesh", "hierarchical(mesh+mesh)"]
    assert 128 < across.pieces[1].from_bytes < 512
    # One hop over EFA and two DMAs' starts; and with the launch.
    assert across.time_ps(0) / 1e6 == pytest.approx(15 + 0.6 + 1.3)


def test_neither_launch_nor_fault_changes_where_one_step_ends() -> None:
    """The library chooses by size."""
    slow = Topology(TRN1_TWO.cluster, [LinkFault("nic 0", "rail 0", bandwidth_share=0.1, extra_latency_us=100.0)])
    ends = {
        Communicator(topology, range(64), launch_profile=launch).table("all_reduce").pieces[1].from_bytes
        for topology in (TRN1_TWO, slow)
        for launch in ("in_graph", "host")
    }
    assert len(ends) == 1


def test_across_nodes_recursive_doubling_starts_where_its_own_size_says() -> None:
    assert Communicator(TRN1_TWO, range(64)).algorithm("all_reduce", 8191) == "hierarchical(mesh+mesh)"
    assert Communicator(TRN1_TWO, range(64)).algorithm("all_reduce", 8192) == "hierarchical(rdh+mesh)"
    assert Communicator(TRN1_TWO, range(32)).algorithm("all_reduce", MIB - 1) == "mesh"
    # Half of each node's ranks, half the size.
    half = Communicator(TRN1_TWO, [*range(16), *range(32, 48)])
    assert [half.algorithm("all_gather", size).split("+")[0] for size in (4095, 4096)] == [
        "hierarchical(mesh",
        "hierarchical(rdh",
    ]


def test_kangaring_takes_whole_chips_only() -> None:
    assert Communicator(TRN2, range(0, 64, 4)).algorithm("all_gather", 2**30) == "ring"
    assert Communicator(TRN2, range(4)).algorithm("all_gather", 2**30) == "kangaring"
    assert Communicator(TRN2, [0, 1, 4, 5]).algorithm("all_gather", 2**30) == "ring"
    assert Communicator(TRN2_TWO, range(128)).algorithm("all_reduce", 2**30).startswith("hierarchical(kangaring+")


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_group_across_chips_costs_more_than_one_inside_a_chip(operation: str) -> None:
    inside, across = Communicator(TRN2, range(4)), Communicator(TRN2, range(0, 16, 4))
    for nbytes in (1024, MIB, 256 * MIB):
        assert across.time_ps(operation, nbytes) > 1.5 * inside.time_ps(operation, nbytes), nbytes


def test_siblings_share_the_links() -> None:
    crowded, alone = Communicator(TRN2, range(0, 64, 4)), Communicator(TRN2, range(0, 64, 4), siblings=[])
    assert crowded.time_ps("all_gather", 2**30) > 3.5 * alone.time_ps("all_gather", 2**30)
    # The mesh's dimension, named, is what the ranks look like.
    named = Communicator(TRN2, range(0, 64, 4), siblings=mesh_groups((16, 4), 0))
    assert named.table("all_gather") == crowded.table("all_gather")


def test_large_rings_run_at_the_links_rate() -> None:
    """512 GB/s leave each chip of the torus; the whole node's KangaRing uses them all, at the library's efficiency."""
    piece = Communicator(TRN2, range(64)).table("all_gather").pieces[-1]
    rate_gbps = 1000 * 63 / 64 / (piece.beta_ps_per_mib / MIB)
    assert rate_gbps == pytest.approx(512 * TRN2.cluster.collectives.link_efficiency, rel=1e-3)
    assert "chip" in piece.bottleneck
    assert "hbm" in Communicator(TRN2, range(4)).table("all_gather").pieces[-1].bottleneck


def test_nccl_s_ring_on_eight_gpus() -> None:
    """370 GB/s of bus bandwidth: github.com/NVIDIA/nccl-tests issue 212, a maintainer."""
    table = Communicator(Topology(load_cluster("dgx-h100")), range(8)).table("all_reduce")
    nbytes = 2**33
    assert 2 * 7 / 8 * nbytes / (table.time_ps(nbytes) / 1000) == pytest.approx(370, rel=0.01)


def test_efa_lanes_share_each_chip_s_card() -> None:
    """Four ranks of a chip share its 25 GB/s card, whichever algorithm."""
    table = Communicator(TRN2_TWO, [0, 64]).table("all_gather")
    rate = TRN2.cluster.collectives.link_efficiency * 25.0
    assert table.pieces[-1].beta_ps_per_mib / MIB == pytest.approx(1000 * 4 * 0.5 / rate, rel=1e-3)


def test_launch_is_apart_from_the_hops() -> None:
    graph, host = (Communicator(TRN2, range(64), launch_profile=name) for name in ("in_graph", "host"))
    steps = (host.time_ps("barrier", 0) / 1e6 - 237.5) - (graph.time_ps("barrier", 0) / 1e6 - 1.3)
    assert steps == pytest.approx(60.0)  # a mesh in one step
    with pytest.raises(ConfigError, match=r"no launch profile 'gpu'; there are in_graph, host"):
        Communicator(TRN2, range(4), launch_profile="gpu")


def test_broadcast_is_an_all_reduce_and_a_barrier_has_no_bytes() -> None:
    node = Communicator(TRN2, range(64))
    assert node.table("broadcast").pieces == node.table("all_reduce").pieces
    assert node.time_ps("barrier", 2**30) == node.time_ps("barrier", 0) == node.time_ps("all_reduce", 0)


def test_one_rank_only_launches() -> None:
    table = Communicator(TRN2, [7]).table("all_reduce")
    assert table.rows() == [(0, 1_300_000, 0)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], r"group \[\]: must have at least one rank"),
        ([1, 1], r"none twice"),
        ([63, 64], r"rank 64: trn2.48xlarge x 1"),
    ],
)
def test_wrong_groups_are_refused(ranks: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Communicator(TRN2, ranks)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no collective is named 'allreduce'; there are all_reduce, "):
        Communicator(TRN2, range(4)).table("allreduce")


def test_a_group_cut_in_two_is_a_clear_error() -> None:
    faults = [LinkFault("chip 1", f"chip {other}", bandwidth_share=0) for other in TRN2.connected_chips(1)]
    with pytest.raises(RouteError, match=r"no route from chip 1 to chip 0 of trn2.48xlarge: broken are chip 0 -> "):
        Communicator(Topology(TRN2.cluster, faults), range(16)).table("all_reduce")


def test_a_slow_link_on_another_node_counts() -> None:
    slow = Topology(TRN2_TWO.cluster, [LinkFault("nic 21", "rail 5", bandwidth_share=0.1)])
    assert Communicator(slow, range(128)).time_ps("all_reduce", 2**30) > 2 * Communicator(TRN2_TWO, range(128)).time_ps(
        "all_reduce", 2**30
    )


@few
@given(groups(), operations, launches, sizes, sizes)
def test_time_grows_with_bytes(group, operation: str, launch: str, a: int, b: int) -> None:
    name, ranks = group
    assume(not launch or launch in TOPOLOGIES[name].cluster.collectives.launch)
    table = Communicator(TOPOLOGIES[name], ranks, launch_profile=launch).table(operation)
    assert table.time_ps(min(a, b)) <= table.time_ps(max(a, b))
    assert all(type(value) is int for row in table.rows() for value in row)


@few
@given(groups(), operations, launches, sizes, st.one_of(st.just(0.0), st.floats(0.01, 1)), st.floats(0, 50), st.data())
def test_a_slower_or_broken_link_never_helps(
    group, operation: str, launch: str, nbytes: int, share: float, extra_us: float, data: st.DataObject
) -> None:
    name, ranks = group
    topology = TOPOLOGIES[name]
    assume(not launch or launch in topology.cluster.collectives.launch)
    links = [link for link in topology.links(topology.node_of(ranks[0])) if "rail" not in (link.source[0],)]
    link = data.draw(st.sampled_from(links))
    source, target = (f"{end[0]} {end[1]}" for end in (link.source, link.target))
    slow = Topology(topology.cluster, [LinkFault(source, target, share, extra_us)])
    before = Communicator(topology, ranks, launch_profile=launch).time_ps(operation, nbytes)
    try:
        after = Communicator(slow, ranks, launch_profile=launch).time_ps(operation, nbytes)
    except RouteError:
        assert share == 0
    else:
        assert after >= before


def with_rates(cluster: Cluster, between_chips: float = 1, on_chip: float = 1) -> Cluster:
    """The same cluster with its rates multiplied."""
    levels = cluster.levels
    node = dataclasses.replace(levels.node, bandwidth_gbps=between_chips * levels.node.bandwidth_gbps)
    upper = levels.ultraserver
    if upper:
        upper = dataclasses.replace(upper, bandwidth_gbps=between_chips * upper.bandwidth_gbps)
    efa = cluster.efa and dataclasses.replace(cluster.efa, nic_gbit_per_s=between_chips * cluster.efa.nic_gbit_per_s)
    chip = cluster.chip
    chip = dataclasses.replace(
        chip,
        hbm=dataclasses.replace(chip.hbm, bandwidth_gbps=on_chip * chip.hbm.bandwidth_gbps),
        dma=dataclasses.replace(chip.dma, engine_bandwidth_gbps=on_chip * chip.dma.engine_bandwidth_gbps),
    )
    levels = dataclasses.replace(levels, node=node, ultraserver=upper)
    return dataclasses.replace(cluster, levels=levels, chip=chip, efa=efa)


@few
@given(groups(), operations)
def test_twice_the_rates_halve_what_bandwidth_bounds(group, operation: str) -> None:
    name, ranks = group
    topology = TOPOLOGIES[name]
    twice = Topology(with_rates(topology.cluster, between_chips=2, on_chip=2))
    now, fast = (Communicator(t, ranks).table(operation).pieces[-1] for t in (topology, twice))
    assert abs(now.beta_ps_per_mib - 2 * fast.beta_ps_per_mib) <= 2
    assert now.alpha_ps == fast.alpha_ps


# Where a bigger group has no more links than a smaller one: inside a chip, and behind a switch that is each chip's only
# way out. (On a torus every chip brings links of its own, and a group of whole chips may be the cheaper one.)
SAME_LINKS = {
    "trn2.48xlarge": (2, 4),
    "trn3-gen2-ultraserver": (8, 16),
    "dgx-h100": (2, 4, 8),
}


@few
@given(
    st.sampled_from(sorted(SAME_LINKS)),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather"]),
    st.integers(2**26, 2**33),
)
def test_a_bigger_group_on_the_same_links_is_never_cheaper_per_byte(name: str, operation: str, nbytes: int) -> None:
    topology = Topology(load_cluster(name))
    times = [Communicator(topology, range(n), []).time_ps(operation, nbytes) for n in SAME_LINKS[name]]
    assert times == sorted(times)


@few
@given(groups(), st.sampled_from(sorted(CUTS)), sizes)
def test_never_faster_than_the_links_around_a_chip_allow(group, operation: str, nbytes: int) -> None:
    """A bound that knows no algorithm: what must enter a chip, for all sibling groups, over all links into it."""
    name, ranks = group
    topology = TOPOLOGIES[name]
    cluster = topology.cluster
    cores = cluster.logical_cores_per_chip
    chip = topology.chip_of(ranks[0])
    here = sum(topology.chip_of(rank) == chip for rank in ranks)
    assume(here < len(ranks))
    inward = sum(topology.link(v, ("chip", chip)).bandwidth_gbps for v in topology.neighbours(("chip", chip)))
    messages = CUTS[operation](len(ranks), here) * (cores // here)
    bound_ps = nbytes * messages * 1000 / (inward * cluster.collectives.link_efficiency)
    assert Communicator(topology, ranks).time_ps(operation, nbytes) >= bound_ps * (1 - 1e-9)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize("chips", [range(1), range(4), range(8), range(16)], ids=len)
def test_more_ranks_on_the_same_links_are_never_cheaper_per_byte(operation: str, chips: range) -> None:
    """Between chips the links alone: more cores of a chip bring more HBM, which would help."""
    topology = TRN2 if len(chips) == 1 else Topology(with_rates(TRN2.cluster, on_chip=100))
    costs = []
    for per_chip in (1, 2, 4):
        ranks = [chip * 4 + core for chip in chips for core in range(per_chip)]
        if len(ranks) > 1:
            costs.append(Communicator(topology, ranks, siblings=[]).table(operation).pieces[-1].beta_ps_per_mib)
    assert costs == sorted(costs)


def test_more_gpus_behind_a_switch_are_never_cheaper_per_byte() -> None:
    topology = Topology(load_cluster("dgx-h100"))
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        tables = [Communicator(topology, range(n), siblings=[]).table(operation) for n in range(2, 9)]
        rates = [table.pieces[-1].beta_ps_per_mib for table in tables]
        assert rates == sorted(rates)


def test_the_same_in_every_process() -> None:
    """Whatever order the interpreter hashes in."""
    program = (
        "from trn_dist.collectives import Communicator, OPERATIONS\n"
        "from trn_dist.hardware import Topology, load_cluster\n"
        "t = Topology(load_cluster('trn2-ultraserver', count=2))\n"
        "for ranks in (range(0, 512, 4), range(64), [0, 1, 70]):\n"
        "    print([Communicator(t, ranks).table(o).pieces for o in OPERATIONS])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert "hierarchical" in outputs.pop()


def test_neither_package_imports_torch() -> None:
    program = "import sys, trn_dist.hardware, trn_dist.collectives; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_layouts() -> None:
    cluster = load_cluster("trn2-ultraserver", count=2)
    whole = Layout.of(range(512), cluster)
    assert whole.symmetric(cluster)
    assert len(whole.efa_lanes()) == 256
    assert whole.efa_lanes()[5] == (5, 261)
    assert whole.unit_lanes(1)[3] == (259, 323, 387, 451)
    assert not Layout.of([0, 1, 64], cluster).symmetric(cluster)
    assert not Layout.of([0, 64, 256], cluster).symmetric(cluster)
