"""The recipes trained for a few steps on eight ranks: layouts agree, torchrun gives the same bits, the loss falls.

Every run trains the debug model on the standard library's text, float32 throughout. No seed checkpoint: the device's
generator draws FSDP's shards as slices of the whole.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trn_dist.titan.metrics import Step, read_steps
from trn_dist.titan.train import run

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = 4
SEQ_LEN = 64
SHORT = ["--training.steps", str(STEPS), "--training.seq_len", str(SEQ_LEN)]
# The gradient norm of the first steps is 0.5 to 1: this limit bites in every step.
CLIPPED = ["--training.max_norm", "0.25"]
UNCLIPPED = ["--training.max_norm", "inf"]
ONE_RANK = ["--neuron.ranks", "1", "--parallelism.data_parallel_shard_degree", "1"]

# Relative tolerance of the norm of equal gradients: the recipes sum its squares in float64 (norm_accumulation).
NORM = 1e-6
# The same where the gradients themselves differ by rounding.
ROUNDED_NORM = 1e-5

Train = Callable[..., list[Step]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains a recipe as ``trn train`` does and returns its steps; equal arguments train once."""
    done: dict[tuple[str, ...], list[Step]] = {}

    def train(name: str, *overrides: str) -> list[Step]:
        key = (name, *overrides)
        if key not in done:
            folder = tmp_path_factory.mktemp(name)
            assert run(RECIPES / f"{name}.toml", [*SHORT, *overrides], run_dir=folder) == 0
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            done[key] = [Step(**json.loads(line)) for line in lines]
            assert [step.step for step in done[key]] == list(range(1, STEPS + 1))
        return done[key]

    return train


def figures(steps: list[Step]) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in steps]


def assert_close(one: list[Step], other: list[Step], loss: float, grad_norm: float) -> None:
    """Compares step by step, to relative tolerances."""
    for a, b in zip(one, other, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=loss), a.step
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=grad_norm), a.step


def test_ddp_and_fsdp_have_the_same_losses_bit_for_bit_without_clipping(train: Train):
    ddp = train("llama3_debug_ddp8", *UNCLIPPED)
    fsdp = train("llama3_debug_fsdp8", *UNCLIPPED)
    assert [step.loss for step in ddp] == [step.loss for step in fsdp]
    assert_close(ddp, fsdp, loss=0, grad_norm=NORM)


@pytest.mark.slow  # in an ordinary run tests/parity compares clipped layouts of a smaller model
def test_ddp_and_fsdp_have_the_same_losses_to_six_digits_with_clipping(train: Train):
    ddp = train("llama3_debug_ddp8", *CLIPPED)
    fsdp = train("llama3_debug_fsdp8", *CLIPPED)
    assert_close(ddp, fsdp, loss=1e-6, grad_norm=NORM)
    assert all(step.grad_norm > 0.25 for step in fsdp)


def test_one_rank_with_eight_microbatches_agrees_within_rounding(train: Train):
    eight = train("llama3_debug_fsdp8", *UNCLIPPED)
    one = train("llama3_debug_fsdp8", *UNCLIPPED, *ONE_RANK)
    # The first step differs in the order of two sums of eight terms, of losses and of gradients.
    assert_close(one[:1], eight[:1], loss=8 * 2**-24, grad_norm=ROUNDED_NORM)
    # AdamW's first updates are near lr in size whatever the gradient's, so where a gradient is nearly zero its rounding
    # reaches the weights. A wrong scale of the gradients does not show in the loss; it changes the norm by a factor.
    assert_close(one, eight, loss=1e-5, grad_norm=ROUNDED_NORM)


def test_two_dimensions_from_a_seed_checkpoint_agree_with_one_rank(train: Train, tmp_path: Path):
    # Tensor parallel shards would draw other initial weights.
    seed = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    assert run(RECIPES / "llama3_debug_fsdp8.toml", [*ONE_RANK, *seed], run_dir=tmp_path) == 0
    start = ["--checkpoint.enable", "--checkpoint.load_only"]
    start += ["--checkpoint.initial_load_path", str(tmp_path / "checkpoint" / "step-0")]
    two_dimensions = train("llama3_debug_fsdp4_tp2", *UNCLIPPED, *start)
    one = train("llama3_debug_fsdp8", *UNCLIPPED, *ONE_RANK, *start)
    assert_close(two_dimensions, one, loss=1e-5, grad_norm=ROUNDED_NORM)


def test_the_loss_falls(train: Train):
    steps = train("llama3_debug_fsdp8", *UNCLIPPED)
    losses = [step.loss for step in steps]
    assert losses[0] == pytest.approx(math.log(2048), rel=0.1)
    assert losses[-1] < losses[0] - 0.3


def test_sharding_shows_in_the_memory_of_the_fullest_rank(train: Train):
    ddp = train("llama3_debug_ddp8", *UNCLIPPED)
    fsdp = train("llama3_debug_fsdp8", *UNCLIPPED)
    # 6.16 M parameters in float32 with gradient and two moments are 94 MiB a rank under DDP, an eighth under FSDP.
    assert ddp[-1].hbm_active_peak_bytes > 94 * 2**20 > 2 * fsdp[-1].hbm_active_peak_bytes


def test_plain_torchrun_and_unmodified_torchtitan_give_the_same_bits(train: Train, tmp_path: Path):
    recipe = RECIPES / "llama3_debug_fsdp8.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", "-m", "torchtitan.train"]
    command += ["--job.config_file", str(recipe), "--job.dump_folder", str(tmp_path), *SHORT, *CLIPPED]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-5000:]
    steps = read_steps(tmp_path, ranks=8, tokens_per_step=8 * SEQ_LEN)
    assert figures(steps) == figures(train("llama3_debug_fsdp8", *CLIPPED))
