"""``trn train --timing-only``: the predictions of a run with numbers, for models that no laptop can train."""

import json
import math
from pathlib import Path

import pytest

from trn_dist.titan.train import run

RECIPES = Path(__file__).parents[2] / "recipes"
# With numbers, ranks draw weights a different number of times, which still moves the beginning of the second step.
SMALL = ["--training.seq_len", "32", "--neuron.shuffle_block", "8", "--training.steps", "3"]


def steps_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def layout(pp: int = 1, fsdp: int = 1, tp: int = 1, schedule: str = "1F1B") -> list[str]:
    degrees = {"data_parallel_shard": fsdp, "tensor_parallel": tp, "pipeline_parallel": pp}
    keys = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    return [*keys, f"--parallelism.pipeline_parallel_schedule={schedule}", f"--neuron.ranks={pp * fsdp * tp}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        layout(fsdp=2, tp=2),
        layout(pp=2),
        layout(pp=2, tp=2),
        layout(pp=2, fsdp=2, schedule="Interleaved1F1B"),
        layout(pp=2, fsdp=2, schedule="ZBVZeroBubble"),
        layout(pp=3, schedule="GPipe"),
    ],
    ids=["fsdp2-tp2", "1F1B", "1F1B-tp2", "Interleaved1F1B-fsdp2", "ZBVZeroBubble-fsdp2", "GPipe-3"],
)
def test_a_step_takes_what_it_takes_with_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str]
):
    recipe = RECIPES / "llama3" / "debug_fsdp2_tp2_pp2.toml"
    overrides = [*SMALL, *overrides]
    assert run(recipe, overrides, run_dir=tmp_path / "real") == 0
    capfd.readouterr()
    assert run(recipe, overrides, run_dir=tmp_path / "lone", timing_only=True) == 0
    shown = capfd.readouterr().out
    assert "no numbers were computed" in shown
    assert "aten::mm" in shown
    real, lone = steps_of(tmp_path / "real")[-1], steps_of(tmp_path / "lone")[-1]
    assert math.isnan(lone["loss"]) and not math.isnan(real["loss"])
    for key in ("rank", "parts_s", "step_time_s", "tokens_per_s_per_chip", "mfu_percent", "irreproducible"):
        assert lone["predicted"][key] == real["predicted"][key], key
    for key in ("hbm_reserved_peak_bytes", "hbm_active_peak_bytes"):
        assert lone[key] == real[key], key


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        ("deepseek_v3/debug_fsdp4_ep2.toml", [], "expert_parallel_degree = 2"),
        ("llama3_debug.toml", ["--checkpoint.enable"], "checkpoint.enable"),
    ],
)
def test_what_has_no_meaning_without_numbers_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recipe: str, overrides: list[str], words: str
):
    assert run(RECIPES / recipe, overrides, run_dir=tmp_path / "run", timing_only=True) == 2
    assert words in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_llama3_8b_on_64_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    recipe = RECIPES / "llama3" / "8b_fsdp64.toml"
    assert run(recipe, ["--training.steps", "2"], tmp_path / "run", timing_only=True) == 0
    step = steps_of(tmp_path / "run")[-1]
    # Eight billion parameters, 6 operations for each and token, at 158 TFLOPS a core.
    least_s = 6 * 8.03e9 * 8192 / 158e12
    assert least_s < step["predicted"]["step_time_s"] < 4 * least_s
    assert 8.03e9 * 12 / 64 < step["hbm_reserved_peak_bytes"] < 24 * 2**30
    # With selective recomputation the activations do not fit into a core.
    overrides = ["--training.steps", "1", "--activation_checkpoint.mode", "selective"]
    assert run(recipe, overrides, tmp_path / "larger", timing_only=True) != 0
    assert "neuron out of memory" in capfd.readouterr().err
