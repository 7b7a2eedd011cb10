"""Hardware files: what is refused, in which words, and how a file inherits."""

import re
from pathlib import Path

import pytest

from trn_dist.hardware import ConfigError, configs_directory, list_configs, load_chip, load_cluster

CHIP_ERRORS = [
    ("[hbm]\nbandwith_gbps = 1.0", r"\[hbm\].*unknown key, did you mean 'bandwidth_gbps'\?; legal keys are"),
    ("[hbm]\nbandwidth_tbps = 2.9", r"key 'bandwidth_tbps' in \[hbm\].*wrong unit, the key is 'bandwidth_gbps' \(GB/s"),
    ("[dma]\nstart_latency_ns = 600", r"wrong unit, the key is 'start_latency_us' \(microseconds\)"),
    (
        "[hbm]\nbandwidth_gbps = -1.0",
        r"key 'bandwidth_gbps' in \[hbm\] = -1.0: must be a number greater than 0, in GB/s",
    ),
    (
        "[hbm]\ncapacity_bytes = 1.5",
        r"'capacity_bytes' in \[hbm\] = 1.5: must be a whole number greater than 0, in bytes",
    ),
    ("[hbm]\nbandwidth_gbps = nan", r"= nan: must be a number greater than 0"),
    ("[hbm]\nbandwidth_gbps = true", r"= True: must be a number"),
    ("[efficiency]\nhbm = 1.2", r"'hbm' in \[efficiency\] = 1.2: must be a number greater than 0 and at most 1"),
    ("[efficiency]\nhbm = 0", r"= 0: must be a number greater than 0 and at most 1"),
    ("[allocator]\npolicy = 'buddy'", r"'policy' in \[allocator\] = 'buddy': must be one of 'segment', 'cuda'"),
    ("[engines.tensor.tflops]\nbf16 = 1.0", r"key 'bf16' in \[engines.tensor.tflops\]: unknown key.*bfloat16"),
    ("physical_cores_per_logical = 3", r"'physical_cores_per_logical' = 3: must divide physical_cores = 8"),
    ("hbm = 4", r"key 'hbm' = 4: must be a table"),
    ("x = [", r"not valid TOML"),
]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "message"), CHIP_ERRORS)
def test_a_wrong_key_is_named_with_its_file_and_what_would_be_right(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "mine.toml", 'extends = "trainium2"\n' + text)
    with pytest.raises(ConfigError, match=message) as error:
        load_chip(path)
    assert str(path) in str(error.value) or "chip trainium2" in str(error.value)


def test_a_missing_figure_is_named(tmp_path: Path) -> None:
    text = (configs_directory() / "chips" / "trainium2.toml").read_text(encoding="utf-8")
    path = write(tmp_path / "mine.toml", re.sub(r"(?m)^bandwidth_gbps.*$", "", text, count=1))
    with pytest.raises(
        ConfigError, match=r"key 'bandwidth_gbps' in \[hbm\]: missing; must be a number greater than 0, in GB/s"
    ):
        load_chip(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[levels.node]\nshape = [4, 0]",
            r"'shape\[1\]' in \[levels.node\] = 0: must be a whole number greater than 0",
        ),
        ("[levels.node]\nkind = 'ring'", r"must be one of 'torus', 'switch'"),
        ("[efa]\nnic_gbps = 25.0", r"wrong unit, the key is 'nic_gbit_per_s' \(Gbit/s"),
        ("[efa]\nnics_per_node = 5", r"'nics_per_node' in \[efa\] = 5: must divide the 16 chips"),
        ("[collectives]\nlaunch_profile = 'x'", r"no launch profile 'x'; there are in_graph, host"),
        (
            "[collectives]\nalgorithms = ['tree']",
            r"'algorithms\[0\]' in \[collectives\] = 'tree': must be one of 'mesh'",
        ),
        ("chip = 'trainium4'", r"no file of chips is named 'trainium4', did you mean 'trainium"),
        ("profile = 'x'", r"key 'profile' = 'x': no such profile; the file has none"),
        ("without = ['eva']", r"key 'without' names 'eva', which 'trn2.48xlarge' does not have; it has"),
    ],
)
def test_a_wrong_cluster_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "mine.toml", 'extends = "trn2.48xlarge"\n' + text)
    with pytest.raises(ConfigError, match=message):
        load_cluster(path)


def test_a_file_inherits_and_changes_a_few_keys(tmp_path: Path) -> None:
    write(tmp_path / "fast.toml", 'extends = "trainium2"\nname = "fast"\n[hbm]\nbandwidth_gbps = 5800')
    path = write(tmp_path / "mine.toml", 'extends = "trn2.48xlarge"\nname = "mine"\nchip = "fast.toml"')
    cluster, shipped = load_cluster(path), load_cluster("trn2.48xlarge")
    assert (cluster.name, cluster.chip.name) == ("mine", "fast")
    assert cluster.chip.hbm.bandwidth_gbps == 5800.0
    assert cluster.chip.hbm.capacity_bytes == shipped.chip.hbm.capacity_bytes
    assert cluster.levels == shipped.levels


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'extends = "b.toml"')
    write(tmp_path / "b.toml", 'extends = "a.toml"')
    with pytest.raises(ConfigError, match=r"runs in a circle: a.toml -> b.toml -> a.toml"):
        load_chip(tmp_path / "a.toml")


def test_a_name_that_is_no_file_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'trn2.48xlrge', did you mean 'trn2.48xlarge'\?; shipped are dgx-h100"):
        load_cluster("trn2.48xlrge")
    with pytest.raises(ConfigError, match=r"nowhere.toml: no such file"):
        load_cluster("nowhere.toml")


@pytest.mark.parametrize("kind", ["chips", "clusters"])
def test_every_figure_has_its_source_beside_it(kind: str) -> None:
    """A figure's source is a comment on its line, or on a line of its own in the same table."""
    for name in list_configs(kind):
        text = (configs_directory() / kind / f"{name}.toml").read_text(encoding="utf-8")
        assert text.startswith("# "), name
        _, *tables = re.split(r"(?m)^(?=name = |\[)", text)
        for table in tables:
            lines = table.splitlines()
            for line in lines:
                if re.match(r"\w+ = [-\d\[]", line) and "#" not in line:
                    assert any(other.startswith("# ") for other in lines), f"{name}.toml: {lines[0]}: {line}"
