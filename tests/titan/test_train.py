"""``trn train`` around the ranks: the run folder, what is shown, wrong recipes, interrupted and failing runs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trn_dist.titan.recipe import resolve
from trn_dist.titan.train import run

RECIPES = Path(__file__).parents[2] / "recipes"
# Two ranks, small steps: these tests look at what surrounds the numbers.
SMALL = [
    "--neuron.ranks",
    "2",
    "--training.seq_len",
    "32",
    "--training.global_batch_size",
    "2",
    "--neuron.shuffle_block",
    "8",
]


@contextlib.contextmanager
def started(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """``trn train`` in the background; killed at the end, lest a test that failed leaves it training."""
    command = [
        sys.executable,
        "-m",
        "trn_dist.cli",
        "train",
        str(RECIPES / "llama3_debug.toml"),
        "--run-dir",
        str(folder),
    ]
    with subprocess.Popen(
        [*command, *SMALL, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_run_folder_output_and_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    checkpoints = ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only"]
    # The learning rate depends on the number of steps, which differs here.
    constant_lr = ["--lr_scheduler.warmup_steps", "1", "--lr_scheduler.min_lr_factor", "1.0"]
    recipe = RECIPES / "llama3_debug.toml"
    assert run(recipe, [*SMALL, *constant_lr, *checkpoints, "--training.steps", "3"], run_dir=folder) == 0
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == "llama3 debugmodel on 2 simulated NeuronCores: FSDP2 2"
    assert [line.split("   ")[0] for line in shown if line.startswith("step ")] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "   grad norm " in shown[3] and " tokens/s   HBM peak " in shown[3]
    assert re.fullmatch(r"done in .*: loss 8\.\d+ -> \d\.\d+ from step 1 to 3, HBM peak [\d.]+ MiB", shown[-2])

    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["exit_code"], facts["ranks"], facts["layout"]) == (0, 2, "FSDP2 2")
    assert facts["last"] == {"step": 3, "loss": steps[-1]["loss"]}
    assert len(facts["text"]["fingerprint"]) == 16
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    assert "Training completed" in (folder / "logs" / "rank1.log").read_text()
    assert resolve(folder / "recipe.toml", []).ranks == 2

    # The folder holds a run: refused, unless it is resumed; on another layout, and with the figures of an unbroken run.
    assert run(recipe, [*SMALL, "--training.steps", "5"], run_dir=folder) == 2
    assert "holds a run already" in capfd.readouterr().err
    one_rank = ["--neuron.ranks", "1"]
    assert run(recipe, [*SMALL, *constant_lr, *checkpoints, *one_rank, "--training.steps", "5"], run_dir=folder) == 0
    resumed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert resumed[:3] == steps
    assert [step["step"] for step in resumed] == [1, 2, 3, 4, 5]
    unbroken = tmp_path / "unbroken"
    assert run(recipe, [*SMALL, *constant_lr, "--training.steps", "5"], run_dir=unbroken) == 0
    expected = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    for step, other in zip(resumed, expected, strict=True):
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-3 if step["step"] > 3 else 0)


def test_a_wrong_recipe_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    assert run(RECIPES / "llama3_debug.toml", ["--training.global_batch_size", "9"], run_dir=folder) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "trn train: command line: training.global_batch_size = 9: not a multiple of local_batch_size 1 x 8 "
        "data-parallel ranks = 8\n"
    )
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_readable_files(tmp_path: Path, number: signal.Signals):
    folder = tmp_path / "run"
    with started(folder, "--training.steps", "10000") as process:
        deadline = time.monotonic() + 120
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"ended early (exit code {128 + number})" in output
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert json.loads((folder / "run.json").read_text())["exit_code"] == 128 + number


def test_a_rank_that_fails_ends_the_run_with_its_traceback(tmp_path: Path):
    # Lines that are no JSON objects are met only when the ranks read the text.
    (tmp_path / "text.jsonl").write_text('{"body": 1}\n')
    dataset = ["--training.dataset", "jsonl", "--training.dataset_path", str(tmp_path / "text.jsonl")]
    with started(tmp_path / "run", *dataset) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "no text under 'text'; the keys are 'body' (set neuron.text_field)" in errors
    assert "Traceback" in errors
    assert "ended early (exit code 1)" in output and "no step was completed" in output
