"""Mistakes that are named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trn_dist.launcher import LaunchError, LaunchPlan, Program


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
        ({"world_size": 65}, "65 ranks on a node, but a simulated trn2.48xlarge has 64.*--nodes 2"),
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
