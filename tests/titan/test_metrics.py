"""The ranks' metrics files: joined while they grow, cut back on resume, contradictions found."""

import json
from pathlib import Path
from typing import Any

import pytest

from trn_dist.titan.metrics import (
    METRICS_FILE,
    InconsistentRanks,
    StepMerger,
    keep_steps_before,
    rank_metrics_file,
    read_steps,
    recover_steps,
)


def line(step: int, **changes: Any) -> str:
    values = {"step": step, "loss": 8.0 - step, "max_loss": 9.0, "grad_norm": 1.5, "lr": 1e-3, "step_time_s": 0.5}
    values |= {"hbm_active_peak_bytes": 10, "hbm_reserved_peak_bytes": 20}
    return json.dumps(values | changes) + "\n"


def write(folder: Path, rank: int, text: str) -> None:
    file = rank_metrics_file(folder, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(text)


def test_a_step_is_yielded_once_all_ranks_have_it(tmp_path: Path):
    merger = StepMerger(tmp_path, ranks=2, tokens_per_step=1024)
    assert list(merger.new_steps()) == []
    write(tmp_path, 0, line(1) + line(2))
    assert list(merger.new_steps()) == []
    half = line(1, step_time_s=2.0, hbm_reserved_peak_bytes=30)
    write(tmp_path, 1, half[:40])
    assert list(merger.new_steps()) == []
    write(tmp_path, 1, half[40:])
    (step,) = merger.new_steps()
    assert (step.step, step.loss, step.grad_norm) == (1, 7.0, 1.5)
    assert (step.hbm_reserved_peak_bytes, step.hbm_active_peak_bytes, step.hbm_peak_rank) == (30, 10, 1)
    assert (step.step_time_s, step.tokens_per_s) == (2.0, 512.0)
    write(tmp_path, 1, line(2))
    (step,) = merger.new_steps()
    assert step.step == 2
    assert list(merger.new_steps()) == []


def test_floats_keep_all_their_digits(tmp_path: Path):
    loss = 7.123456789012345
    write(tmp_path, 0, line(1, loss=loss, grad_norm=0.1 + 0.2))
    (step,) = read_steps(tmp_path, ranks=1, tokens_per_step=1)
    assert (step.loss, step.grad_norm) == (loss, 0.1 + 0.2)
    assert json.loads(step.as_json())["loss"] == loss


def test_under_pipeline_parallel_the_loss_comes_from_the_ranks_that_have_it(tmp_path: Path):
    write(tmp_path, 0, line(1, loss=None, max_loss=None))
    write(tmp_path, 1, line(1, loss=3.25))
    (step,) = read_steps(tmp_path, ranks=2, tokens_per_step=1)
    assert step.loss == 3.25


def test_ranks_that_contradict_each_other_are_named(tmp_path: Path):
    write(tmp_path, 0, line(1) + line(2, loss=float("nan")))
    write(tmp_path, 1, line(1, grad_norm=1.25) + line(2, loss=float("nan")))
    merger = StepMerger(tmp_path, ranks=2, tokens_per_step=1)
    with pytest.raises(InconsistentRanks, match=r"step 1: grad_norm is 1.25 on rank 1, 1.5 before it"):
        list(merger.new_steps())
    # All ranks having NaN is agreement.
    (step,) = merger.new_steps()
    assert step.step == 2
    write(tmp_path, 0, line(3, loss=None))
    write(tmp_path, 1, line(3, loss=None))
    with pytest.raises(InconsistentRanks, match=r"step 3: no rank reports loss"):
        list(merger.new_steps())
    write(tmp_path, 0, line(4))
    write(tmp_path, 1, line(5))
    with pytest.raises(InconsistentRanks, match=r"4 and 5 side by side"):
        list(merger.new_steps())


def test_a_resumed_run_keeps_what_its_checkpoint_had_seen(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    keep_steps_before(file, 3)
    assert not file.exists()
    file.write_text(line(1) + line(2) + line(3) + line(4)[:25])
    keep_steps_before(file, 3)
    assert file.read_text() == line(1) + line(2)
    keep_steps_before(file, 1)
    assert file.read_text() == ""


def test_steps_that_a_killed_launcher_did_not_join_are_recovered(tmp_path: Path):
    file = tmp_path / METRICS_FILE
    recover_steps(tmp_path, ranks=2, tokens_per_step=1024)
    assert not file.exists()
    # That run was resumed itself, at step 3; its launcher had joined one step of it, and written half of another.
    file.write_text(line(1) + line(2) + line(3) + line(4)[:25])
    write(tmp_path, 0, line(3) + line(4) + line(5) + line(6) + line(7))
    write(tmp_path, 1, line(3) + line(4) + line(5) + line(6)[:25])
    recover_steps(tmp_path, ranks=2, tokens_per_step=1024)
    assert [json.loads(text)["step"] for text in file.read_text().splitlines()] == [1, 2, 3, 4, 5]
    # Ranks that contradict each other were that run's error.
    before = file.read_text()
    write(tmp_path, 1, line(6)[25:] + line(7, loss=9.0))
    recover_steps(tmp_path, ranks=2, tokens_per_step=1024)
    assert file.read_text() == before
