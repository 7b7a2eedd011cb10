"""Shipped chips and clusters: sizes, places, counts, profiles."""

import dataclasses

import pytest

from trn_dist.hardware import ConfigError, list_configs, load_chip, load_cluster

GIB = 2**30


def test_all_shipped_files_load() -> None:
    assert list_configs("chips") == ["h100", "trainium1", "trainium2", "trainium3"]
    assert list_configs("clusters") == [
        "dgx-h100",
        "trn1.32xlarge",
        "trn2-ultraserver",
        "trn2.3xlarge",
        "trn2.48xlarge",
        "trn3-gen1-ultraserver",
        "trn3-gen2-ultraserver",
    ]


@pytest.mark.parametrize(
    ("name", "chips", "nodes", "ranks", "hbm_gib", "device"),
    [
        ("trn1.32xlarge", 16, 1, 32, 16, "trn1"),
        ("trn2.3xlarge", 1, 1, 4, 24, "trn2"),
        ("trn2.48xlarge", 16, 1, 64, 24, "trn2"),
        ("trn2-ultraserver", 64, 4, 256, 24, "trn2u"),
        ("trn3-gen1-ultraserver", 64, 4, 256, 36, "trn3u"),
        ("trn3-gen2-ultraserver", 144, 36, 576, 36, "trn3u"),
        ("dgx-h100", 8, 1, 8, 80, "NVIDIA H100 80GB HBM3"),
    ],
)
def test_sizes(name: str, chips: int, nodes: int, ranks: int, hbm_gib: int, device: str) -> None:
    cluster = load_cluster(name)
    assert (cluster.chips, cluster.nodes, cluster.world_size) == (chips, nodes, ranks)
    assert cluster.chip.hbm_bytes_per_logical_core == hbm_gib * GIB
    assert cluster.device_name == device


def test_published_totals_of_trn2() -> None:
    """The instance's own totals, which no key of the files states."""
    cluster = load_cluster("trn2.48xlarge")
    chip = cluster.chip
    assert cluster.chips * chip.hbm.capacity_bytes == 1536 * GIB
    assert cluster.chips * chip.hbm.bandwidth_gbps == pytest.approx(46_400)
    assert chip.torchtitan_peak_tflops == chip.tensor_tflops_per_logical_core("bfloat16")
    tensor = chip.engines.tensor
    assert tensor.tflops["bfloat16"] == pytest.approx(tensor.clock_ghz * tensor.rows * tensor.columns * 2e-3, rel=0.01)
    assert cluster.efa is not None
    assert cluster.efa.nics_per_node * cluster.efa.nic_gbit_per_s == 3200


def test_placement_follows_neuron_ls() -> None:
    cluster = load_cluster("trn2.48xlarge", nodes=4)
    assert cluster.placement(0) == (0, 0, 0)
    assert cluster.placement(19) == (0, 4, 3)
    assert cluster.placement(64 * 3 + 63) == (3, 15, 3)
    with pytest.raises(ConfigError, match=r"rank 256: trn2.48xlarge x 4 has ranks 0 to 255"):
        cluster.placement(256)


def test_counts() -> None:
    assert load_cluster("trn2.48xlarge", count=1024).chips == 16_384
    assert load_cluster("trn2-ultraserver", nodes=8).count == 2
    with pytest.raises(ConfigError, match=r"nodes=6: must be a multiple of the 4 nodes of a trn2-ultraserver"):
        load_cluster("trn2-ultraserver", nodes=6)
    with pytest.raises(ConfigError, match=r"count=0: must be at least 1"):
        load_cluster("trn2.48xlarge", count=0)
    with pytest.raises(
        ConfigError, match=r"trn2.3xlarge has no \[efa\], so it cannot be joined to others; count must be 1"
    ):
        load_cluster("trn2.3xlarge", count=2)


def test_one_physical_core_a_rank() -> None:
    cluster = load_cluster("trn2.48xlarge", lnc=1)
    assert cluster.world_size == 128
    assert cluster.chip.hbm_bytes_per_logical_core == 12 * GIB
    with pytest.raises(ConfigError, match=r"lnc=3: must divide the 8 physical cores"):
        load_cluster("trn2.48xlarge", lnc=3)


def test_contradicting_link_rates_are_profiles() -> None:
    rates = {
        profile: load_cluster("trn3-gen1-ultraserver", profile=profile).levels.node.bandwidth_gbps
        for profile in ("link_table", "quoted_2560", "quoted_2048")
    }
    assert rates == {"link_table": 256.0, "quoted_2560": 1280.0, "quoted_2048": 1099.5}
    assert load_cluster("trn3-gen1-ultraserver").profile == "link_table"
    with pytest.raises(ConfigError, match=r"no such profile; the file has link_table, quoted_2560, quoted_2048"):
        load_cluster("trn3-gen1-ultraserver", profile="quoted")


def test_dataclasses_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_chip("trainium2").name = "other"  # type: ignore[misc]


def test_element_rates_by_dtype() -> None:
    vector = load_chip("trainium3").engines.vector
    assert vector.gelements_per_s("bfloat16") == 4 * vector.gelements_per_s("float32")
    assert vector.gelements_per_s("int8") == vector.gelements_per_s("float32")
