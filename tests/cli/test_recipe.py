"""``trn recipes``, ``trn recipe show`` and ``trn recipe new``."""

import tomllib
from pathlib import Path

from click.testing import CliRunner, Result

from trn_dist.cli import trn
from trn_dist.shipped import shipped_folder


def call(*arguments: str) -> Result:
    return CliRunner().invoke(trn, list(arguments))


def test_recipes_are_listed_with_what_they_show():
    shown = call("recipes").output.splitlines()
    (line,) = [line for line in shown if line.startswith("llama3_debug_ddp8.toml ")]
    assert "llama3 debugmodel" in line and "8 ranks" in line and "DDP on 8: every rank holds the whole model" in line
    assert len(shown) == len(list(shipped_folder("recipes").rglob("*.toml")))
    assert call("recipes", "--model", "llama9").output.startswith("Error: no recipe of model 'llama9' in ")


def test_show_says_where_values_come_from():
    result = call("recipe", "show", "llama3_debug", "--training.steps", "3")
    assert result.exit_code == 0
    path = shipped_folder("recipes") / "llama3_debug.toml"
    assert any(
        line.startswith("steps = 3 ") and line.endswith("  # command line") for line in result.output.splitlines()
    )
    number = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if line.startswith("seq_len"))
    assert f"  # {path}, line {number}\n" in result.output
    assert tomllib.loads(result.output)["training"]["steps"] == 3


def test_show_refuses_a_wrong_recipe(tmp_path: Path):
    path = tmp_path / "wrong.toml"
    path.write_text("[training]\nstepz = 3\n")
    result = call("recipe", "show", str(path))
    assert result.exit_code == 2
    assert result.output == f"trn recipe: {path}, line 2: training.stepz: no such key; did you mean training.steps?\n"


def test_new_writes_a_recipe_that_is_right(tmp_path: Path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "words"}\n')
    path = tmp_path / "mine.toml"
    arguments = ["--layout", "pp=2,fsdp=2,tp=2", "--global-batch", "8", "--seq-len", "64", "--text", str(text)]
    result = call("recipe", "new", str(path), *arguments)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"trn train {path}"
    written = tomllib.loads(path.read_text())
    assert written["neuron"]["ranks"] == 8
    assert written["parallelism"]["pipeline_parallel_degree"] == 2
    assert written["training"]["dataset"] == "jsonl"
    assert call("recipe", "show", str(path)).exit_code == 0


def test_new_leaves_nothing_behind_when_the_answers_do_not_fit(tmp_path: Path):
    path = tmp_path / "mine.toml"
    for arguments, words in (
        (["--model", "lama3"], 'did you mean "llama3"?'),
        (["--layout", "fsdp=3"], "choose a degree that divides 8"),
        (["--layout", "fspd=2"], "did you mean fsdp?"),
        (["--text", "nowhere"], "no such file or folder"),
    ):
        result = call("recipe", "new", str(path), *arguments)
        assert result.exit_code == 2 and words in result.output
        assert list(tmp_path.iterdir()) == []
    path.write_text("")
    assert "exists; name another file" in call("recipe", "new", str(path)).output
