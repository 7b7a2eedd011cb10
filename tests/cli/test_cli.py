"""The command line: help, versions, and mistakes answered with a sentence and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from trn_dist import __version__
from trn_dist.cli import _COMMANDS, trn
from trn_dist.cli.train import find_recipe


def call(*arguments: str) -> Result:
    return CliRunner().invoke(trn, arguments)


def test_help_and_mistakes_do_not_import_torch() -> None:
    program = """
import sys
from click.testing import CliRunner
from trn_dist.cli import _COMMANDS, trn
for arguments in (["--help"], ["--version"], ["run", "--help"], ["train", "--help"], ["run", "-n", "2", "missing.py"]):
    CliRunner().invoke(trn, arguments)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_help_names_the_commands_and_the_exit_codes() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for word in ("run", "train", "doctor", "Exit codes", "130: Ctrl-C"):
        assert word in result.stdout
    for command in ("run", "train", "doctor"):
        assert call(command, "--help").exit_code == 0


@pytest.mark.parametrize("name", sorted(set(_COMMANDS) - {"run", "recipe", "completion", "monitor"}))
def test_what_prints_a_table_prints_json_too(name: str) -> None:
    command = trn.get_command(click.Context(trn), name)
    assert command is not None and any("--json" in parameter.opts for parameter in command.params)


def test_version() -> None:
    assert call("--version").stdout == f"trn_dist, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["walk"], "No such command 'walk'"),
        (["run", "a.py"], "how many ranks? Give -n RANKS, or --cluster"),
        (["run", "--cluster", "trn3", "a.py"], "no file of clusters is named 'trn3'"),
        (["stacks", "1"], "1 is no process of `trn run`"),
        (["run", "-n", "2", "--log-dri", "logs", "a.py"], "No such option '--log-dri'"),
        (["run", "-n", "2"], "Missing argument 'PROGRAM'"),
        (["run", "-n", "two", "a.py"], "'two' is not a valid integer"),
        (["run", "-n", "0", "a.py"], "a run needs at least 1 rank"),
        (["run", "-n", "2", "missing.py"], "script 'missing.py' does not exist"),
        (["run", "-n", "2", "--local-ranks-filter", "0;1", "a.py"], "'0;1' is not a list of local ranks such as 0,1"),
        (["run", "-n", "2", "-m", "no_such_package_here"], "no module named 'no_such_package_here'"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "no_such_recipe"], "no recipe file 'no_such_recipe'"),
        (["train", "recipes/llama3_debug.toml", "--show-rank", "-1"], "-1 is not in the range"),
        (["doctor", "--jsn"], "No such option '--jsn'"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_is_wrong(arguments: list[str], words: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("")
    result = call("run", "-n", "2", "--log-dir", str(script / "logs"), str(script))
    assert result.exit_code == 1
    assert f"--log-dir {script / 'logs'}: Not a directory" in result.stderr


def test_recipes_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "llama3_debug.toml"
    shipped = find_recipe("llama3_debug")
    assert shipped.is_file()
    assert find_recipe("recipes/llama3_debug.toml") == shipped
    own.write_text("")
    assert find_recipe("llama3_debug.toml") == Path("llama3_debug.toml"), "a file of the user's comes first"
    with pytest.raises(click.BadParameter, match="is a folder"):
        find_recipe(str(tmp_path))
    with pytest.raises(click.BadParameter, match=r"`trn recipes` lists what ships"):
        find_recipe("recipes/llama4.toml")


def test_train_hands_over_the_recipe_and_the_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import trn_dist.titan.train

    seen = []

    def record(*arguments: object, **options: object) -> int:
        seen.append((arguments, options))
        return 7

    monkeypatch.setattr(trn_dist.titan.train, "run", record)
    result = call("train", "llama3_debug", "--training.steps", "3", "--run-dir", str(tmp_path), "--metrics.log_freq=1")
    assert result.exit_code == 7
    overrides = ["--training.steps", "3", "--metrics.log_freq=1"]
    assert seen == [
        (
            (find_recipe("llama3_debug"), overrides),
            {
                "run_dir": tmp_path,
                "show_rank": None,
                "trace": False,
                "record": False,
                "timing_only": False,
                "faults": (),
                "as_json": False,
            },
        )
    ]


def test_doctor_as_json_holds_every_check() -> None:
    result = call("doctor", "--json")
    rows = {row["subject"]: row for row in json.loads(result.stdout)}
    assert rows["torch"]["verdict"] == "ok"
    assert rows["C++ compiler"]["found"]
    assert {"host cores", "host memory", "shared memory", "open files", "device neuron"} <= rows.keys()
    assert all(row["advice"] or row["verdict"] == "ok" for row in rows.values())
    assert result.exit_code == any(row["verdict"] == "error" for row in rows.values())
