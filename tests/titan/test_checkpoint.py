"""Kill -9 while an asynchronous checkpoint is being written: those before it are as they were, and the run that goes on
from them ends with the bits of one that was never broken."""

import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.launcher.runs import DEADLINE_S, Run

RECIPE = Path(__file__).parents[2] / "recipes" / "llama3_debug.toml"
STEPS = 12
INTERVAL = 2
SETTINGS = ["--neuron.ranks", "2", "--training.seq_len", "32", "--training.global_batch_size", "2"]
SETTINGS += ["--neuron.shuffle_block", "8", "--training.steps", STEPS]
SETTINGS += ["--checkpoint.enable", "--checkpoint.interval", INTERVAL, "--checkpoint.no-last-save-model-only"]
ENDS_WITHIN_S = 30.0


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder with a short name: the process that writes pinned checkpoints listens on a socket below it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def start(folder: Path, mode: str) -> Run:
    return Run("train", RECIPE, "--run-dir", folder, *SETTINGS, "--checkpoint.async_mode", mode, cwd=folder.parent)


def finish(run: Run) -> None:
    stdout, stderr = run.process.communicate(timeout=2 * DEADLINE_S)
    assert run.process.returncode == 0, stdout + stderr
    run.assert_nothing_left(within_s=0)


def saved(folder: Path) -> dict[int, Path]:
    """The folders of checkpoints, whole or not, by step."""
    found = {int(path.name.removeprefix("step-")): path for path in (folder / "checkpoint").glob("step-*")}
    return dict(sorted(found.items()))


def is_whole(checkpoint: Path) -> bool:
    return (checkpoint / ".metadata").exists()  # written last, by its final name


def wait_for_half_a_checkpoint(run: Run, folder: Path) -> int | None:
    """The step of a checkpoint that has data and is not whole, with a whole one before it; None if the run ended."""
    deadline = time.monotonic() + 2 * DEADLINE_S
    while run.process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint and no end"
        checkpoints = saved(folder)
        if len(checkpoints) > 1:
            step, last = checkpoints.popitem()
            if not is_whole(last) and any(file.stat().st_size for file in last.glob("*.distcp")):
                return step
        time.sleep(0.002)
    return None


def digests(folder: Path) -> dict[str, str]:
    """Of every file of every whole checkpoint."""
    whole = [path for path in saved(folder).values() if is_whole(path)]
    files = [file for path in whole for file in path.iterdir()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def content(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    dcp_to_torch_save(checkpoint, scratch)
    return torch.load(scratch, weights_only=False)


def assert_same(one: Any, other: Any, where: str = "checkpoint") -> None:
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "victim"), [("async", "trn:rank1"), ("async_with_pinned_mem", "launcher")])
def test_a_kill_in_an_asynchronous_checkpoint_loses_none_before_it(base: Path, mode: str, victim: str):
    unbroken, broken = base / "unbroken", base / "broken"
    finish(start(unbroken, mode))

    # A kill that came too late has met a whole checkpoint: the run goes on, and the next is tried.
    while True:
        run = start(broken, mode)
        pid = run.process.pid if victim == "launcher" else run.pid_of(victim)
        step = wait_for_half_a_checkpoint(run, broken)
        assert step is not None, "no checkpoint was met half written"
        os.kill(pid, signal.SIGKILL)
        before = digests(broken)
        run.process.communicate(timeout=ENDS_WITHIN_S)
        assert run.process.returncode != 0
        run.assert_nothing_left(within_s=ENDS_WITHIN_S)
        if not is_whole(saved(broken)[step]):
            break
    whole = [number for number, path in saved(broken).items() if is_whole(path)]
    assert whole == list(range(INTERVAL, step, INTERVAL))
    assert digests(broken) == before

    finish(start(broken, mode))
    assert f"Loading the checkpoint from {broken}/checkpoint/step-{whole[-1]}." in (
        broken / "logs" / "rank0.log"
    ).read_text(encoding="utf-8")
    figures = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, file.read_text().splitlines())]
        for file in (unbroken / "metrics.jsonl", broken / "metrics.jsonl")
    ]
    assert figures[0] == figures[1]
    assert [step for step, _, _ in figures[0]] == list(range(1, STEPS + 1))
    scratch = base / "content.pt"
    assert_same(*(content(saved(folder)[STEPS], scratch) for folder in (unbroken, broken)))
