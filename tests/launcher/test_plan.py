"""Mistakes that are named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trn_dist.launcher import LaunchError, LaunchPlan, Program
from trn_dist.launcher import plan as launch_plan
from trn_dist.launcher.host import usable_memory_bytes, usable_tasks
from trn_dist.launcher.plan import simulated_cluster


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def test_accepts_a_full_node_and_several(script: str) -> None:
    LaunchPlan(Program(script), world_size=64).check()
    LaunchPlan(Program(script), world_size=256, nodes=4).check()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 0}, "-n 0: a run needs at least 1 rank"),
        ({"world_size": -3}, "-n -3"),
        ({"world_size": 65}, "65 ranks on a node, but a node of the simulated trn2.48xlarge has 64.*--nodes 5"),
        ({"world_size": 66}, "66 ranks on a node.*--nodes 2"),
        ({"world_size": 8, "cluster": "trn2.3xlarge"}, "a node of the simulated trn2.3xlarge has 4 logical"),
        ({"world_size": 8, "nodes": 2, "cluster": "trn2.3xlarge"}, "--nodes 2: a trn2.3xlarge has 1 and no network"),
        ({"world_size": 8, "cluster": "trn2.48xlrge"}, "--cluster trn2.48xlrge: .*did you mean 'trn2.48xlarge'"),
        ({"world_size": 8, "cluster": "none.toml"}, "--cluster none.toml: none.toml: no such file"),
        ({"world_size": 8, "fork": False, "preload": ("json",)}, "leave it out with --no-fork"),
        (
            {"world_size": 1 << 20, "nodes": 1 << 14},
            r"1048576 ranks do not fit .*: 350 MiB \+ 1048576 x 12 MiB = 12288.3 GiB .* can be had; at most \d+ ranks",
        ),
        ({"world_size": 260, "nodes": 2}, "130 ranks on a node.*--nodes 5"),
        ({"world_size": 8, "nodes": 3}, "8 ranks do not divide evenly over 3 nodes"),
        ({"world_size": 8, "nodes": 0}, "--nodes 0"),
        ({"world_size": 8, "grace_s": -1.0}, "--grace-s -1: the grace period cannot be negative"),
        (
            {"world_size": 2, "shown_local_ranks": frozenset({0, 2})},
            "names local rank 2, but local ranks go from 0 to 1",
        ),
        ({"world_size": 2, "preload": ("a b",)}, "--preload 'a b' is not a module name"),
    ],
)
def test_refuses_impossible_plans(script: str, change: dict, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        LaunchPlan(Program(script), **change).check()


def test_a_rank_starts_no_ranks(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(LaunchError, match=r"this process is a rank itself \(LOCAL_RANK=3\), .* start 8 more"):
        LaunchPlan(Program(script), world_size=8).check()


def test_logical_cores_of_one_physical_core_double_a_node(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    LaunchPlan(Program(script), world_size=128).check()
    with pytest.raises(LaunchError, match="has 128 logical NeuronCores"):
        LaunchPlan(Program(script), world_size=130).check()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    with pytest.raises(LaunchError, match="NEURON_LOGICAL_NC_CONFIG='3': must be 1 or 2"):
        LaunchPlan(Program(script), world_size=8).check()


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert usable_memory_bytes(tmp_path, tmp_path) == 64 << 10
    for name, text in [("max", "40960"), ("current", "30000"), ("stat", "anon 9\ninactive_file 1000\n")]:
        (tmp_path / f"memory.{name}").write_text(text)
    assert usable_memory_bytes(tmp_path, tmp_path) == 40960 - 30000 + 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory_bytes(tmp_path, tmp_path) == 64 << 10


def test_a_container_s_limit_of_tasks_counts(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sys" / "kernel").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "threads-max").write_text("1000\n")
    (tmp_path / "loadavg").write_text("0.1 0.2 0.3 2/100 4711\n")
    assert usable_tasks(tmp_path, tmp_path) == (900, "kernel.threads-max")
    (tmp_path / "pids.max").write_text("128\n")
    (tmp_path / "pids.current").write_text("28\n")
    assert usable_tasks(tmp_path, tmp_path) == (100, "the container's pids.max")
    monkeypatch.setattr(launch_plan, "usable_tasks", lambda: usable_tasks(tmp_path, tmp_path))
    LaunchPlan(Program(script), world_size=46).check()
    with pytest.raises(LaunchError, match=r"64 ranks need 136 .*\(2 a rank, 8 of the run\), .*leaves 100; at most 46"):
        LaunchPlan(Program(script), world_size=64).check()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    with pytest.raises(LaunchError, match=r"46 ranks need 238 .*2 a rank and 3 for OMP_NUM_THREADS.*at most 18 ranks"):
        LaunchPlan(Program(script), world_size=46).check()


def test_a_hard_limit_of_open_files_counts(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan.resource, "getrlimit", lambda _: (100, 200))
    LaunchPlan(Program(script), world_size=32).check()
    with pytest.raises(LaunchError, match=r"64 ranks need 256 file descriptors \(3 a rank and 64\).*ulimit -Hn 256"):
        LaunchPlan(Program(script), world_size=64).check()


def test_nodes_that_ranks_need() -> None:
    unit = simulated_cluster("trn2-ultraserver")
    assert [unit.nodes_for(ranks) for ranks in (1, 64, 66, 128, 256)] == [1, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "'.*missing.py' does not exist"),
        ("data.bin", b"\x7fELF", "not a Python file: its name does not end in .py"),
        ("tool.sh", b"#!/bin/sh\n", "first line names no python"),
        ("odd.py", b"print(1)\0", "holds null bytes"),
    ],
)
def test_refuses_what_is_no_python_file(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LaunchError, match=words):
        Program(str(path)).check()


def test_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is a folder"):
        Program(str(tmp_path)).check()


def test_accepts_a_console_script_without_suffix(tmp_path: Path) -> None:
    path = tmp_path / "tool"
    path.write_text("#!/usr/bin/env python3\nprint('hello')\n")
    Program(str(path)).check()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("no_such_package_here.train", "no module named 'no_such_package_here'"),
        ("train/llama.py", "not a module name .leave out .py and write dots for slashes."),
        ("a..b", "not a module name"),
    ],
)
def test_refuses_unknown_modules(module: str, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        Program(module, is_module=True).check()


@pytest.mark.parametrize("module", ["json.tool", "sys"])
def test_accepts_known_modules(module: str) -> None:
    Program(module, is_module=True).check()


def test_finds_modules_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_training.py").write_text("")
    Program("my_training", is_module=True).check()
