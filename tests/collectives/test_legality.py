"""The rules of the real stack, in words."""

import pytest

from trn_dist.collectives import (
    IllegalGroupError,
    check_collective,
    check_communicators,
    check_group,
    mesh_groups,
    refuse,
)
from trn_dist.hardware import Topology, load_cluster

TRN2 = Topology(load_cluster("trn2.48xlarge", nodes=2))


def rules(ranks) -> list[str]:
    return [finding.rule for finding in check_group(TRN2, list(ranks))]


@pytest.mark.parametrize(
    "ranks", [range(4), range(8), range(16), range(64), range(128), range(0, 64, 4), range(0, 16, 4)]
)
def test_legal_groups(ranks) -> None:
    assert rules(ranks) == []


def test_group_sizes() -> None:
    (finding,) = check_group(TRN2, [0, 1], name="tp")
    assert finding.message == "tp of 2 ranks (0, 1): sizes that work are 1, 4, 8, 16 and multiples of 32"
    assert rules(range(6)) == ["group_size"]
    assert rules(range(96)) == ["symmetric_across_nodes"]


def test_asymmetric_groups_say_where_the_ranks_are() -> None:
    (finding,) = check_group(TRN2, [0, 1, 2, 64])
    assert finding.rule == "symmetric_across_nodes"
    assert "ranks by node 0: 3, node 1: 1" in finding.message
    assert rules([0, 1, 66, 67]) == ["symmetric_across_nodes"]


def test_a_group_that_is_no_ring_is_slower_but_not_refused() -> None:
    findings = check_group(TRN2, [0, 20, 40, 60])
    assert [finding.rule for finding in findings] == ["ring_on_torus"]
    assert "its chips on node 0 (0, 5, 10, 15) are no ring of neighbours" in findings[0].message
    refuse(findings)


def test_pairs_cannot_do_all_to_all_with_two_cores_a_rank() -> None:
    (finding,) = check_collective(TRN2, "all_to_all", [0, 1])
    assert "all_to_all of 2 ranks is not supported with LNC=2" in finding.message
    assert check_collective(TRN2, "all_reduce", [0, 1]) == []
    assert check_collective(Topology(load_cluster("dgx-h100")), "all_to_all", [0, 1]) == []


def test_communicators_are_counted_by_rank() -> None:
    groups = [group for dimension in range(3) for group in mesh_groups((4, 4, 4), dimension)]
    assert check_communicators(TRN2.cluster, groups) == []
    (finding,) = check_communicators(TRN2.cluster, [[0, 1]] * 17)
    assert finding.message == "rank 0 is in 17 groups; the runtime has 16 communicators"


def test_strict_mode_tells_all_at_once() -> None:
    findings = check_group(TRN2, [0, 1, 64]) + check_communicators(TRN2.cluster, [[0, 1]] * 17)
    with pytest.raises(
        IllegalGroupError, match=r"group of 3 ranks .*\[group_size\]; .*\[symmetric.*\]; rank 0 is in 17"
    ):
        refuse(findings)


def test_other_clusters_have_other_rules() -> None:
    assert check_group(Topology(load_cluster("dgx-h100", nodes=2)), [0, 1, 2, 8]) == []
