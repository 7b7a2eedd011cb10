"""Recipes: what is accepted, and the words for each mistake."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import llama3_args

from trn_dist.titan.build_tokenizer import TOKENIZER_FOLDER
from trn_dist.titan.recipe import Layout, RecipeError, resolve, to_annotated_toml, to_toml

RECIPES = Path(__file__).parents[2] / "recipes"

GOOD = """\
[job]
custom_config_module = "trn_dist.titan.config"

[training]
local_batch_size = 1
global_batch_size = 8
seq_len = 256
steps = 10

[parallelism]
data_parallel_shard_degree = 8

[neuron]
ranks = 8
"""


@pytest.fixture(autouse=True)
def flavors_of_torchtitan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of other tests import a module that adds a flavor, which stays in the process."""
    monkeypatch.delitem(llama3_args, "tiny", raising=False)


@pytest.fixture
def recipe(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        resolve(path, list(overrides))
    return [problem.replace(str(path), path.name) for problem in caught.value.problems]


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_recipes_of_the_package_are_right_and_open_with_a_comment(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(RECIPES / "own_model"))
    recipe = resolve(path, [])
    assert recipe.layout.ranks == recipe.ranks
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("# ") for line in head.splitlines())
    assert "Costs on two cores: " in head


def test_debug_recipes_differ_in_layout_only():
    same = [resolve(path, []) for path in sorted(RECIPES.glob("llama3_debug*.toml"))]
    assert len(same) >= 4
    for recipe in same:
        assert recipe.global_batch_size == 8
        assert recipe.config.training.mixed_precision_param == "float32"
        for section in ("model", "optimizer", "lr_scheduler", "debug", "activation_checkpoint"):
            assert asdict(getattr(recipe.config, section)) == asdict(getattr(same[0].config, section))
        for key in ("dataset", "seq_len", "max_norm", "dtype"):
            assert getattr(recipe.config.training, key) == getattr(same[0].config.training, key)


def test_resolved_recipe_is_the_same_recipe_for_torchtitan(recipe, tmp_path: Path):
    (tmp_path / "text.txt").write_text('quotes " and \\ and \u00fc')
    path = recipe(GOOD.replace("[training]", '[training]\ndataset = "text"\ndataset_path = "text.txt"'))
    resolved = resolve(
        path, ["--training.max_norm", "inf", "--model.converters", "float8,mx", "--job.description", 'a "b"\\']
    )
    written = tmp_path / "resolved.toml"
    written.write_text(to_toml(resolved.config))
    again = ConfigManager().parse_args(["--job.config_file", str(written)])
    again.job.config_file = None
    assert asdict(again) == asdict(resolved.config)
    assert again.training.max_norm == math.inf
    assert again.training.dataset_path == str(tmp_path / "text.txt")
    assert again.model.hf_assets_path == str(TOKENIZER_FOLDER)
    assert tomllib.loads(written.read_text())["job"]["description"] == 'a "b"\\'


def test_torchtitan_reads_a_recipe_by_itself():
    path = RECIPES / "llama3_debug_fsdp4_tp2.toml"
    alone = ConfigManager().parse_args(["--job.config_file", str(path)])
    resolved = resolve(path, []).config
    alone.job.config_file = resolved.job.config_file
    assert asdict(alone) == asdict(resolved)


def test_command_line_wins_and_has_torchtitans_syntax(recipe):
    resolved = resolve(
        recipe(GOOD),
        [
            "--training.steps=3",
            "--optimizer.lr",
            "1e-5",
            "--checkpoint.enable",
            "--checkpoint.no-initial-load-model-only",
            "--parallelism.pipeline-parallel-layers-per-stage",
            "None",
            "--debug.seed",
            "7",
        ],
    )
    assert resolved.config.training.steps == 3
    assert resolved.config.optimizer.lr == 1e-5
    assert resolved.config.checkpoint.enable is True
    assert resolved.config.checkpoint.initial_load_model_only is False
    assert resolved.config.parallelism.pipeline_parallel_layers_per_stage is None
    assert resolved.config.debug.seed == 7


def test_layout_batch_and_steps_are_worked_out(recipe):
    path = recipe(GOOD.replace("data_parallel_shard_degree = 8", "tensor_parallel_degree = 2"))
    resolved = resolve(path, [])
    assert resolved.layout == Layout(1, 4, 1, 2, 1, 1)
    assert str(resolved.layout) == "FSDP2 4 x TP 2"
    assert (resolved.global_batch_size, resolved.accumulation_steps) == (8, 2)
    assert resolved.tokens_per_step == 2048
    overrides = ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "2"]
    assert str(resolve(path, overrides).layout) == "HSDP 2 x 2 x TP 2"


def test_ten_mistakes_get_ten_sentences(recipe):
    path = recipe(
        """\
[modle]
name = "llama3"
[model]
flavor = 3
[training]
lr = 1e-3
seq_length = 256
steps = "10"
mixed_precision_param = "float23"
[training.dataloader]
num_worker = 1
[parallelism]
tensor_paralel_degree = 2
fsdp_reshard_after_forward = "allways"
[neuron]
rank = 8
"""
    )
    assert problems(path) == [
        "recipe.toml, line 1: modle: no such table; did you mean model?",
        "recipe.toml, line 4: model.flavor = 3: expected a string",
        "recipe.toml, line 6: training.lr: no such key; did you mean optimizer.lr?",
        "recipe.toml, line 7: training.seq_length: no such key; did you mean training.seq_len?",
        'recipe.toml, line 8: training.steps = "10": expected a whole number',
        'recipe.toml, line 9: training.mixed_precision_param = "float23": expected one of "bfloat16", "float32"; '
        'did you mean "float32"?',
        "recipe.toml, line 11: training.dataloader.num_worker: no such key; did you mean "
        "training.dataloader.num_workers?",
        "recipe.toml, line 13: parallelism.tensor_paralel_degree: no such key; "
        "did you mean parallelism.tensor_parallel_degree?",
        'recipe.toml, line 14: parallelism.fsdp_reshard_after_forward = "allways": expected one of "default", '
        '"always", '
        '"never"; did you mean "always"?',
        "recipe.toml, line 16: neuron.rank: no such key; did you mean neuron.ranks?",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["--neuron.ranks", "6"],
            "command line: neuron.ranks = 6: the degrees in [parallelism] give 8 ranks (data_parallel_shard_degree "
            "8); set "
            "neuron.ranks to 8, change a degree, or let data_parallel_shard_degree = -1 take the rest",
        ),
        (
            ["--parallelism.data_parallel_shard_degree", "-1", "--parallelism.tensor_parallel_degree", "16"],
            "recipe.toml, line 14: neuron.ranks = 8: the degrees in [parallelism] give 16 (tensor_parallel_degree "
            "16), and 8 "
            "ranks are no multiple of it, so data_parallel_shard_degree = -1 cannot take the rest",
        ),
        (
            ["--training.global_batch_size", "12"],
            "command line: training.global_batch_size = 12: not a multiple of local_batch_size 1 x 8 data-parallel "
            "ranks = 8",
        ),
        (
            [
                "--parallelism.data_parallel_shard_degree",
                "4",
                "--parallelism.tensor_parallel_degree",
                "2",
                "--training.seq_len",
                "250",
            ],
            "command line: training.seq_len = 250: not a multiple of 4 = 2 x tensor_parallel_degree 2 x "
            "context_parallel_degree 1, as sequence and context parallel need",
        ),
        (
            ["--neuron.ranks", "24", "--parallelism.tensor_parallel_degree", "3", "--training.seq_len", "252"],
            "command line: parallelism.tensor_parallel_degree = 3: llama3 debugmodel has 16 attention heads, which 3 "
            "ranks "
            "cannot share evenly",
        ),
        (
            [
                "--parallelism.data_parallel_shard_degree",
                "1",
                "--parallelism.data_parallel_replicate_degree",
                "4",
                "--parallelism.tensor_parallel_degree",
                "2",
            ],
            "command line: parallelism.data_parallel_replicate_degree = 4: TorchTitan's DDP cannot be combined with "
            "context, "
            "tensor or pipeline parallel (tp 2); shard the parameters instead (data_parallel_shard_degree)",
        ),
        (
            ["--model.flavor", "debugmodle"],
            'command line: model.flavor = "debugmodle": llama3 has "405B", "70B", "8B", "8B_flex", "8B_varlen", '
            '"debugmodel", '
            '"debugmodel_flex_attn", "debugmodel_varlen_attn"; did you mean "debugmodel"?',
        ),
        (
            ["--training.dataset", "jsonl"],
            "command line: training.dataset = 'jsonl' needs training.dataset_path: a file, a folder or a pattern",
        ),
        (
            ["--training.dataset", "python_stdlb"],
            'command line: training.dataset = "python_stdlb": expected one of "python_stdlib", "text", "jsonl", '
            '"parquet", '
            '"c4", "c4_test", "c4_validation"; did you mean "python_stdlib"?',
        ),
        (
            ["--training.dataloader.num_workers", "2"],
            "command line: training.dataloader.num_workers = 2: training.dataset = 'python_stdlib' is read in the "
            "rank's own "
            "process; leave it at 0",
        ),
        (["--training.steps", "0"], "command line: training.steps = 0: expected 1 or more"),
        (
            ["--training.max_norm", "0"],
            "command line: training.max_norm = 0: expected a positive number; inf switches clipping off",
        ),
        (["--training.stepz", "3"], "command line: --training.stepz: no such key; did you mean training.steps?"),
        (["--training.steps", "ten"], "command line: --training.steps ten: expected a whole number"),
        (["--training.steps"], "command line: --training.steps: no value; expected a whole number"),
        (["training.steps", "3"], "command line: 'training.steps': expected --section.key value"),
        (
            ["--compile.enable", "--compile.backend", "nueron"],
            'command line: compile.backend = "nueron": no such backend; "neuron" (or "inductor", which makes way for '
            'it), "eager" and "aot_eager" work; did you mean "neuron"?',
        ),
        (
            ["--validation.enable", "--validation.dataset", "python_stdlib"],
            "recipe.toml: validation.steps = -1: this text has no end; expected a number of steps",
        ),
        (
            ["--validation.enable", "--validation.dataset", "text", "--validation.dataset_path", "nowhere"],
            "command line: validation.dataset_path = 'nowhere' (for validation.dataset = 'text'): no such file",
        ),
        (
            ["--comm.mode", "fake_backend"],
            'command line: comm.mode = "fake_backend": trn train starts real ranks; expected "default"',
        ),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_path", "nowhere/step-0"],
            'command line: checkpoint.initial_load_path = "nowhere/step-0": no such folder; name one step\'s, such as '
            "checkpoint/step-0",
        ),
        (
            ["--checkpoint.create_seed_checkpoint"],
            "recipe.toml, line 14: neuron.ranks = 8: a seed checkpoint holds the whole model and is made by 1 rank",
        ),
        (
            ["--model.hf_assets_path", "nowhere"],
            'command line: model.hf_assets_path = "nowhere": no such folder; leave the key out for the package\'s own '
            "tokenizer",
        ),
    ],
)
def test_each_mistake_is_explained(recipe, overrides, expected):
    assert any(problem.startswith(expected) for problem in problems(recipe(GOOD), *overrides))


def test_a_temporary_folder_too_long_for_pinned_checkpoints(recipe, monkeypatch: pytest.MonkeyPatch):
    listen = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX').close()"
    options = ["--checkpoint.enable", "--checkpoint.async_mode", "async_with_pinned_mem"]
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for length in (75, 76):
            folder = Path(base, "t" * (length - len(base) - 1))
            folder.mkdir()
            environment = {**os.environ, "TMPDIR": str(folder)}
            listens = subprocess.run([sys.executable, "-c", listen], env=environment, capture_output=True, text=True)
            monkeypatch.setattr(tempfile, "tempdir", str(folder))
            if length == 75:
                assert listens.returncode == 0, listens.stderr
                resolve(recipe(GOOD), options)
            else:
                assert "AF_UNIX path too long" in listens.stderr
                (problem,) = problems(recipe(GOOD), *options)
                assert problem.endswith("set TMPDIR to a folder of at most 75 characters")


def test_a_model_that_does_not_exist(recipe):
    (problem,) = problems(recipe(GOOD), "--model.name", "lama3")
    assert 'model.name = "lama3": no such model; TorchTitan\'s language models are "deepseek_v3"' in problem
    assert problem.endswith('did you mean "llama3"?')


def test_a_tokenizer_with_more_tokens_than_the_model_has(recipe, tmp_path: Path):
    from tokenizers import Tokenizer

    folder = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER_FOLDER, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["onetoomany"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (problem,) = problems(recipe(GOOD), "--model.hf_assets_path", str(folder))
    assert problem.endswith(
        "its tokenizer has 2049 tokens, but llama3 debugmodel has a vocabulary of 2048; take a larger flavor or a "
        "smaller "
        "tokenizer"
    )


def test_files_that_are_no_recipes(recipe, tmp_path: Path):
    path = recipe(GOOD)
    (problem,) = problems(tmp_path / "recipy.toml")
    assert problem == f"recipy.toml: no such recipe; did you mean {path}?"
    (problem,) = problems(recipe("[training]\nsteps = = 3\n"))
    assert problem == "recipe.toml: not TOML: Invalid value (at line 2, column 9)"
    (problem,) = problems(recipe("job = 3\n"))
    assert problem == "recipe.toml, line 1: job is not a table; write [job]"
    (problem,) = problems(recipe('[job]\ncustom_config_module = "no.such.module"\n'))
    assert problem == "recipe.toml, line 2: job.custom_config_module = 'no.such.module': No module named 'no'"
    (problem,) = problems(recipe('[job]\ncustom_config_module = "torchtitan.config"\n'))
    assert "its JobConfig has no table `neuron`; derive it from trn_dist.titan.config.JobConfig" in problem


def extending(folder: Path, text: str, name: str = "child.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_recipe_extends_another_and_wins_key_by_key(recipe, tmp_path: Path):
    base = recipe(GOOD)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "words.txt").write_text("words")
    middle = extending(
        tmp_path / "deep",
        'extends = "../recipe.toml"\n[training]\ndataset = "text"\ndataset_path = "words.txt"\nsteps = 7\n',
    )
    top = extending(
        tmp_path, 'extends = "deep/child.toml"\n[optimizer]\nlr = 1e-4\n[training]\nsteps = 9\n', "top.toml"
    )
    resolved = resolve(top, ["--training.seq_len", "64"])
    assert resolved.config.training.steps == 9
    assert resolved.config.training.global_batch_size == 8
    assert resolved.config.training.dataset_path == str(tmp_path / "deep" / "words.txt")  # from the file that says it
    lines = [line.split("  # ") for line in to_annotated_toml(resolved).splitlines() if "  # " in line]
    origins = {key.split(" = ")[0].strip(): origin for key, origin in lines}
    assert origins["lr"] == f"{top}, line 3"
    assert origins["dataset_path"] == f"{middle}, line 4"
    assert origins["global_batch_size"] == f"{base}, line 6"
    assert origins["seq_len"] == "command line"


def test_a_shown_recipe_is_a_recipe_for_torchtitan(recipe, tmp_path: Path):
    recipe(GOOD)
    resolved = resolve(extending(tmp_path, 'extends = "recipe.toml"\n[training]\nsteps = 3\n'), [])
    for defaults in (False, True):
        written = tmp_path / "shown.toml"
        written.write_text(to_annotated_toml(resolved, defaults))
        again = ConfigManager().parse_args(["--job.config_file", str(written)])
        again.job.config_file = None
        assert asdict(again) == asdict(resolved.config)


def test_mistakes_in_what_is_extended(recipe, tmp_path: Path):
    base = recipe(GOOD.replace("steps = 10", "stepz = 10"))
    child = extending(tmp_path, 'extends = "recipe.toml"\n')
    assert problems(child) == [f"{base}, line 8: training.stepz: no such key; did you mean training.steps?"]
    child.write_text('extends = "recipy.toml"\n')
    (problem,) = problems(child)
    assert problem.startswith('child.toml, line 1: extends = "recipy.toml": ')
    assert problem.endswith(f"recipy.toml: no such recipe; did you mean {base}?")
    child.write_text("extends = 3\n")
    assert problems(child) == ['child.toml, line 1: extends = 3: expected the path of one recipe, as in "other.toml"']
    base.write_text('extends = "child.toml"\n')
    child.write_text('extends = "recipe.toml"\n')
    (problem,) = problems(child)
    assert "the recipes extend each other in a ring" in problem
