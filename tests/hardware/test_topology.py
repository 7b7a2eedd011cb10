"""The link graph: neighbours, routes, faults, and that size costs nothing."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn_dist.hardware import ConfigError, LinkFault, RouteError, Topology, list_configs, load_cluster

TRN2 = Topology(load_cluster("trn2.48xlarge", nodes=4))
TOPOLOGIES = {
    name: Topology(load_cluster(name, count=1 if name == "trn2.3xlarge" else 2)) for name in list_configs("clusters")
}


def path(topology: Topology, source: int, target: int) -> str:
    return ", ".join(str(link) for link in topology.route(source, target).links)


def test_neighbours_in_the_order_of_neuron_ls() -> None:
    assert TRN2.connected_chips(0) == [12, 3, 4, 1]
    assert TRN2.connected_chips(5) == [1, 4, 9, 6]
    assert TRN2.connected_chips(4) == [0, 7, 8, 5]
    assert Topology(load_cluster("trn2-ultraserver")).connected_chips(0) == [12, 3, 4, 1, 48, 16]
    assert Topology(load_cluster("dgx-h100")).connected_chips(0) == []


def test_routes() -> None:
    assert path(TRN2, 0, 1) == "core 0 -> chip 0, chip 0 -> core 1"
    assert path(TRN2, 0, 60) == "core 0 -> chip 0, chip 0 -> chip 3, chip 3 -> chip 15, chip 15 -> core 60"
    assert path(TRN2, 3, 64) == (
        "core 3 -> chip 0, chip 0 -> nic 0, nic 0 -> rail 0, rail 0 -> nic 16, nic 16 -> chip 16, chip 16 -> core 64"
    )
    assert "rail 0 -> rail 1" in path(TRN2, 3, 68)
    assert TRN2.route(5, 5).links == ()
    assert TRN2.route(0, 64).bandwidth_gbps == 25.0
    assert TRN2.route(0, 64).latency_us == pytest.approx(15.6)
    switched = Topology(load_cluster("trn3-gen2-ultraserver"))
    assert "chip 0 -> switch 0, switch 0 -> chip 1" in path(switched, 0, 4)
    assert "chip 0 -> ultraswitch 0, ultraswitch 0 -> chip 143" in path(switched, 0, 575)


@pytest.mark.parametrize("name", list(TOPOLOGIES))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_route_is_a_chain_of_links_from_end_to_end(name: str, data: st.DataObject) -> None:
    topology = TOPOLOGIES[name]
    ranks = st.integers(0, topology.cluster.world_size - 1)
    source, target = data.draw(ranks), data.draw(ranks)
    links = topology.route(source, target).links
    if source == target:
        assert links == ()
        return
    assert links[0].source == ("core", source)
    assert links[-1].target == ("core", target)
    assert all(a.target == b.source for a, b in itertools.pairwise(links))
    assert len(set(links)) == len(links)
    assert all(link == topology.link(link.source, link.target) for link in links)


def test_torus_routes_are_shortest_and_load_both_directions_alike() -> None:
    loads: dict[tuple, int] = {}
    for a, b in itertools.permutations(range(16), 2):
        route = TRN2.chip_route(a, b)
        rows, columns = abs(a // 4 - b // 4), abs(a % 4 - b % 4)
        assert len(route) == min(rows, 4 - rows) + min(columns, 4 - columns)
        for link in route:
            loads[link.source, link.target] = loads.get((link.source, link.target), 0) + 1
    assert len(loads) == 64
    assert set(loads.values()) == {8}


def test_a_broken_link_is_gone_round() -> None:
    topology = Topology(load_cluster("trn2.48xlarge"), [LinkFault("chip 0", "chip 1", bandwidth_share=0)])
    route = topology.route(0, 4)
    assert ("chip", 1) not in [link.target for link in route.links if link.source == ("chip", 0)]
    assert len(route.links) == 5  # two ends and three hops in the place of one
    assert route.bandwidth_gbps == 128.0


def test_a_broken_network_card_is_replaced_by_a_neighbour_s() -> None:
    topology = Topology(load_cluster("trn2.48xlarge", nodes=2), [LinkFault("nic 0", "rail 0", bandwidth_share=0)])
    assert "nic 0" not in path(topology, 0, 64)
    assert "nic 1" in path(topology, 0, 64)


def test_a_chip_cut_off_is_a_clear_error() -> None:
    faults = [LinkFault("chip 5", f"chip {other}", bandwidth_share=0) for other in (1, 4, 9, 6)]
    topology = Topology(load_cluster("trn2.48xlarge"), faults)
    with pytest.raises(
        RouteError, match=r"no route from chip 0 to chip 5 of trn2.48xlarge: broken are chip 1 -> chip 5"
    ):
        topology.route(0, 20)
    assert topology.route(0, 24).links


def test_a_degraded_link_keeps_its_routes() -> None:
    fault = LinkFault("chip 0", "chip 1", bandwidth_share=0.25, extra_latency_us=3.0, both_ways=False)
    topology = Topology(load_cluster("trn2.48xlarge"), [fault])
    link = topology.link(("chip", 0), ("chip", 1))
    assert (link.bandwidth_gbps, link.latency_us) == (32.0, pytest.approx(3.9))
    assert topology.link(("chip", 1), ("chip", 0)).bandwidth_gbps == 128.0
    assert link in topology.route(0, 4).links


def test_faults_in_a_file(tmp_path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(
        'extends = "trn2.48xlarge"\n[[link_faults]]\nsource = "chip 0"\ntarget = "chip 1"\nbandwidth_share = 0.5\n'
    )
    assert Topology(load_cluster(path)).link(("chip", 1), ("chip", 0)).bandwidth_gbps == 64.0


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("chip 0", "chip 5", r"trn2.48xlarge has no link from chip 0 to chip 5"),
        ("chip 0", "chip 99", r"no link from chip 0 to chip 99"),
        ("chips", "chip 1", r"link fault at 'chips': must be a kind and a number"),
    ],
)
def test_a_fault_on_no_link_is_refused(source: str, target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(load_cluster("trn2.48xlarge"), [LinkFault(source, target, bandwidth_share=0.5)])


def test_every_link_has_a_link_back() -> None:
    for topology in TOPOLOGIES.values():
        for link in topology.links(node=0):
            assert topology.link(link.target, link.source).bandwidth_gbps == link.bandwidth_gbps


def test_sixteen_thousand_chips_cost_no_more_than_one() -> None:
    started = time.perf_counter()
    topology = Topology(load_cluster("trn2.48xlarge", count=1024))
    assert topology.route(0, 65_535).latency_us > 15
    assert time.perf_counter() - started < 1.0
