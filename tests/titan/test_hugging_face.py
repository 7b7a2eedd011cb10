"""Weights written as Hugging Face safetensors and read again, on another layout too, have the bits they had."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launcher.runs import DEADLINE_S, Run
from tests.titan.test_checkpoint import RECIPE, SETTINGS, content, saved

MODEL_ONLY = ["--checkpoint.last_save_model_only", "--checkpoint.export_dtype", "float32"]


def train(folder: Path, steps: int, *options: object) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    settings = [*SETTINGS, "--checkpoint.interval", 1000, "--training.steps", steps]
    run = Run("train", RECIPE, "--run-dir", folder, *settings, *MODEL_ONLY, *options, cwd=folder.parent)
    stdout, stderr = run.process.communicate(timeout=2 * DEADLINE_S)
    assert run.process.returncode == 0, stdout + stderr
    run.assert_nothing_left(within_s=0)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_safetensors_out_and_in(tmp_path: Path):
    by_pytorch, by_hugging_face = tmp_path / "pytorch", tmp_path / "hugging_face"
    assert train(by_pytorch, 2) == train(by_hugging_face, 2, "--checkpoint.last_save_in_hf")

    written = load_file(next(saved(by_hugging_face)[2].glob("*.safetensors")))
    weights = content(saved(by_pytorch)[2], tmp_path / "content.pt")
    # Llama's names. Queries and keys have another order of rows there; what has none must have the bits.
    assert torch.equal(written["model.embed_tokens.weight"], weights["tok_embeddings.weight"])
    assert torch.equal(written["lm_head.weight"], weights["output.weight"])
    assert torch.equal(written["model.layers.1.mlp.down_proj.weight"], weights["layers.1.feed_forward.w2.weight"])
    assert sum(tensor.numel() for tensor in written.values()) == sum(tensor.numel() for tensor in weights.values())

    layout = ["--parallelism.tensor_parallel_degree", 2, "--checkpoint.initial_load_path"]
    resumed = train(tmp_path / "from_pytorch", 2, *layout, saved(by_pytorch)[2])
    figures = train(
        tmp_path / "from_hugging_face", 2, *layout, saved(by_hugging_face)[2], "--checkpoint.initial_load_in_hf"
    )
    assert figures == resumed
    assert figures[0][0] < train(tmp_path / "from_scratch", 1, *layout[:2])[0][0]
