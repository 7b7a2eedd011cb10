"""The example of a user's own model: a package outside ours trains by recipe, and layouts agree."""

import json
from pathlib import Path

import pytest

from trn_dist.parity.layout import parse_layout
from trn_dist.titan.train import run

OWN_MODEL = Path(__file__).parents[2] / "recipes" / "own_model"
STEPS = 3
GLOBAL_BATCH = 8
SHORT = ["--training.steps", str(STEPS), "--training.seq_len", "32", "--neuron.shuffle_block", "8"]
SHORT += ["--training.max_norm", "inf"]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    """Trains a layout from the same weights and returns loss and gradient norm of every step."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(OWN_MODEL))
    patch.setenv("PYTHONPATH", str(OWN_MODEL))
    recipe = OWN_MODEL / "plain_gpt.toml"
    seed = tmp_path_factory.mktemp("seed")
    one_rank = parse_layout("1").recipe_overrides(GLOBAL_BATCH)
    save = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    assert run(recipe, [*SHORT, *one_rank, *save], run_dir=seed) == 0
    start = ["--checkpoint.enable", "--checkpoint.load_only"]
    start += ["--checkpoint.initial_load_path", str(seed / "checkpoint" / "step-0")]
    done: dict[str, list[tuple[float, float]]] = {}

    def train(text: str) -> list[tuple[float, float]]:
        if text not in done:
            folder = tmp_path_factory.mktemp("run")
            layout = parse_layout(text).recipe_overrides(GLOBAL_BATCH)
            assert run(recipe, [*SHORT, *start, *layout], run_dir=folder) == 0
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            done[text] = [(line["loss"], line["grad_norm"]) for line in lines]
            assert len(done[text]) == STEPS
        return done[text]

    yield train
    patch.undo()


@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,fsdp=2,tp=2",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "ddp=4",
                "fsdp=4",
                "hsdp=2x2",
                "tp=4",
                "cp=2",
                "pp=2,schedule=Interleaved1F1B",
                "pp=2,schedule=ZBVZeroBubble",
                "fsdp=2,cp=2,tp=2",
                "fsdp=2,tp=2 --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op",
                "fsdp=2 --activation_checkpoint.mode full",
                "fsdp=2 --compile.enable --compile.backend neuron",
            )
        ),
    ],
)
def test_layouts_train_the_same_model(train, layout: str):
    for (loss, norm), (expected_loss, expected_norm) in zip(train(layout), train("1"), strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
