"""The algorithms move what they must: every rank ends with everything, and nothing is sent twice."""

import pytest

from trn_dist.collectives import algorithms, mesh_groups, sibling_groups
from trn_dist.collectives.algorithms import Phase, Transfer, backwards
from trn_dist.collectives.group import Layout
from trn_dist.collectives.pricing import link_loads
from trn_dist.hardware import Topology, load_cluster

TRN1 = Topology(load_cluster("trn1.32xlarge"))
TRN2 = Topology(load_cluster("trn2.48xlarge", nodes=2))
GROUPS = {
    "a chip": list(range(4)),
    "a row of chips": list(range(16)),
    "two rows": list(range(32)),
    "the node": list(range(64)),
    "one core a chip of a row": list(range(0, 16, 4)),
    "one core a chip": list(range(0, 64, 4)),
    "two cores a chip": [rank for rank in range(64) if rank % 4 < 2],
    "a column": [rank for rank in range(64) if rank // 4 % 4 == 0],
}


def received(phases: list[Phase], ranks: list[int]) -> dict[int, float]:
    total = dict.fromkeys(ranks, 0.0)
    for phase in phases:
        for transfer in phase.transfers:
            total[transfer.target] += transfer.share
    return total


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("algorithm", ["ring", "mesh", "rdh"])
def test_each_rank_receives_all_other_chunks_once(name: str, algorithm: str) -> None:
    ranks = GROUPS[name]
    if algorithm == "ring":
        choices = [algorithms.node_ring(TRN2, ranks, way, 2) for way in range(4)]
    elif algorithm == "mesh":
        choices = [algorithms.node_mesh(TRN2, ranks)]
    else:
        phases = algorithms.node_rdh(TRN2, ranks)
        assert phases is not None
        choices = [phases]
    for phases in choices:
        expected = (len(ranks) - 1) / len(ranks)
        assert received(phases, ranks) == pytest.approx(dict.fromkeys(ranks, expected))
        scattered = {rank: 0.0 for rank in ranks}
        for phase in backwards(phases):
            for transfer in phase.transfers:
                scattered[transfer.source] += transfer.share
        assert scattered == pytest.approx(dict.fromkeys(ranks, expected))


@pytest.mark.parametrize("name", list(GROUPS))
def test_recursive_doubling_never_sends_what_it_does_not_have(name: str) -> None:
    """Follows the chunks: what a transfer takes is what its source holds."""
    ranks = GROUPS[name]
    phases = algorithms.node_rdh(TRN2, ranks)
    assert phases is not None
    holds = {rank: {rank} for rank in ranks}
    for number, phase in enumerate(phases):
        before = {rank: set(chunks) for rank, chunks in holds.items()}
        for transfer in phase.transfers:
            assert transfer.share == pytest.approx(len(before[transfer.source]) / len(ranks)), number
            assert not before[transfer.source] & before[transfer.target]
            holds[transfer.target] |= before[transfer.source]
    assert all(chunks == set(ranks) for chunks in holds.values())


def test_mesh_sends_each_chip_s_chunks_to_each_other_chip_once() -> None:
    between, within = algorithms.node_mesh(TRN2, list(range(64)))
    pairs = [(TRN2.chip_of(t.source), TRN2.chip_of(t.target)) for t in between.transfers]
    assert len(pairs) == len(set(pairs)) == 16 * 15
    assert {t.share for t in between.transfers} == {4 / 64}
    assert all(TRN2.chip_of(t.source) == TRN2.chip_of(t.target) for t in within.transfers)


@pytest.mark.parametrize("name", ["two rows", "the node", "a column", "a row of chips"])
def test_recursive_doubling_takes_single_links(name: str) -> None:
    """A torus of 4 x 4 is a hypercube of four dimensions: intranode-collective-comm.rst."""
    phases = algorithms.node_rdh(TRN2, GROUPS[name])
    assert phases is not None
    for transfer in (t for phase in phases for t in phase.transfers):
        a, b = TRN2.chip_of(transfer.source), TRN2.chip_of(transfer.target)
        assert a == b or b in TRN2.connected_chips(a)


@pytest.mark.parametrize(("topology", "links_at_once"), [(TRN2, 4), (TRN1, 2)], ids=["four cores", "two cores"])
def test_the_cores_of_a_chip_double_along_different_links(topology: Topology, links_at_once: int) -> None:
    phases = algorithms.node_rdh(topology, range(topology.cluster.cores_per_node))
    assert phases is not None
    for phase in phases[:-1]:
        loads = [load.share for load in link_loads(topology, [phase]) if load.link.kind == "node"]
        assert len(loads) == 16 * links_at_once
        assert loads == pytest.approx([loads[0]] * len(loads))


def test_chips_that_are_no_rectangle_still_double() -> None:
    """They lie on a diagonal."""
    assert algorithms.hypercube_corners(TRN2, [0, 5, 10, 15]) == [0, 1, 2, 3]
    assert algorithms.node_rdh(TRN2, [0, 20, 40, 60]) is not None


def test_rdh_needs_a_power_of_two_of_equal_chips() -> None:
    assert algorithms.node_rdh(TRN2, list(range(12))) is None
    assert algorithms.node_rdh(TRN2, list(range(6))) is None


@pytest.mark.parametrize("chips", [list(range(4)), list(range(8)), list(range(16)), [0, 4, 8, 12], [0, 1, 4, 5]])
def test_some_ring_goes_by_single_links(chips: list[int]) -> None:
    def single(cycle: list[int]) -> bool:
        return all(b in TRN2.connected_chips(a) for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))

    ways = algorithms.ring_orders(TRN2, chips)
    assert all(sorted(cycle) == sorted(chips) for way in ways for cycle in way)
    assert any(all(single(cycle) for cycle in way) for way in ways)


def test_the_node_has_two_rings_without_a_link_in_common() -> None:
    first, second = algorithms.ring_orders(TRN2, list(range(16)))[-1]
    edges = [{frozenset(pair) for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True)} for cycle in (first, second)]
    assert [len(e) for e in edges] == [16, 16]
    assert not edges[0] & edges[1]
    (phase,) = algorithms.node_ring(TRN2, list(range(64)), 3, 2)
    loads = [load.share for load in link_loads(TRN2, [phase]) if load.link.kind == "node"]
    assert len(loads) == 64
    assert loads == pytest.approx([63 / 64 / 4] * 64)


def test_a_reduce_scatter_adds_which_is_one_more_access() -> None:
    (phase,) = backwards([Phase([Transfer(0, 1, 0.5)], steps=3)])
    assert phase.transfers == [Transfer(1, 0, 0.5)]
    assert (phase.reads, phase.writes, phase.steps) == (1.0, 2.0, 3)


def test_in_one_step_everyone_sends_everything() -> None:
    ranks = tuple(range(8))
    (phase,) = algorithms.in_one_step(algorithms.to_all(Layout.of(ranks, TRN2.cluster), [0]), len(ranks))
    assert sorted(phase.transfers) == [Transfer(a, b, 1.0) for a in ranks for b in ranks if a != b]
    assert (phase.steps, phase.reads, phase.writes) == (1, 1.0, 2.0)
    # Of a pair across nodes one step sends what two would.
    lane = algorithms.lane_mesh((0, 64), range(2), 0.5, over_efa=True)
    (pair,) = algorithms.in_one_step(lane, 2)
    assert received([pair], [0, 64]) == received(lane + backwards(lane), [0, 64])


def test_lanes_look_only_at_their_sites() -> None:
    lane = tuple(range(0, 64 * 8, 64))
    (ring,) = algorithms.lane_ring(lane, [0])
    assert {t.source for t in ring.transfers if t.target == 0} == {lane[1], lane[-1]}
    rdh = algorithms.lane_rdh(lane, range(8))
    assert rdh is not None
    assert received(rdh, list(lane)) == pytest.approx(dict.fromkeys(lane, 7 / 8))
    (mesh,) = algorithms.lane_mesh(lane, range(8), 0.5, over_efa=True)
    assert received([mesh], list(lane)) == pytest.approx(dict.fromkeys(lane, 7 / 8))
    assert mesh.ingress_efficiency == 0.5
    assert algorithms.lane_rdh(lane[:6], range(6)) is None
    (pair,) = algorithms.lane_ring(lane[:2], range(2))
    assert received([pair], list(lane[:2])) == pytest.approx(dict.fromkeys(lane[:2], 0.5))


def test_groups_of_a_mesh_and_their_siblings() -> None:
    assert mesh_groups((2, 3), 1) == [(0, 1, 2), (3, 4, 5)]
    assert mesh_groups((2, 3), 0) == [(0, 3), (1, 4), (2, 5)]
    for shape in [(16, 4), (4, 16), (2, 4, 8), (64,)]:
        for dimension in range(len(shape)):
            groups = mesh_groups(shape, dimension)
            assert sorted(sibling_groups(groups[-1], 64)) == sorted(groups)
    # Two dimensions flattened into one, with a third between them.
    assert sibling_groups([0, 1, 4, 5], 8) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    # Not a dimension of anything.
    assert sibling_groups([1, 2], 8) == [(1, 2)]
    assert sibling_groups([0, 3], 8) == [(0, 3)]
