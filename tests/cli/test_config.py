"""``trn config`` and ``trn completion``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import trn_dist
from trn_dist.cli import trn
from trn_dist.cli.config import VARIABLES

PACKAGE = Path(trn_dist.__file__).parent


def test_every_variable_that_the_package_reads_is_a_setting() -> None:
    read = set()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h")]:
        read |= set(re.findall(r'"((?:TRN|NEURON)_[A-Z_]+)"', path.read_text()))
    internal = {name for name in read if name.startswith(("TRN_OBSERVE", "TRN_PARITY_"))}
    assert read - internal <= {variable.name for variable in VARIABLES}
    assert {variable.name for variable in VARIABLES if variable.name.startswith("TRN_")} <= read | {"TRN_FAULT_REPEATS"}


def test_values_and_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRN_CPU_RNG", "1")
    arguments = ["config", "llama3_debug", "--training.steps", "3", "--json"]
    result = CliRunner().invoke(trn, arguments)
    assert result.exit_code == 0, result.output
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}
    assert rows["TRN_CPU_RNG"] == ("1", "environment")
    assert rows["TRN_STRICT"] == ("0", "default")
    assert rows["training.steps"] == ("3", "command line")
    value, origin = rows["training.seq_len"]
    assert value == "256" and re.fullmatch(r".*llama3_debug\.toml, line \d+", origin)
    assert "checkpoint.enable" not in rows
    everything = CliRunner().invoke(trn, [*arguments, "--all"])
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(everything.stdout)}
    assert rows["checkpoint.enable"] == ("false", "default")


def test_unknown_keys_and_variables_are_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRN_CLUSTR", "x")
    result = CliRunner().invoke(trn, ["config", "llama3_debug", "--training.stps", "3"])
    assert result.exit_code == 2 and result.stdout == ""
    assert "TRN_CLUSTR: no such variable, did you mean TRN_CLUSTER?" in result.stderr
    assert "--training.stps: no such key; did you mean training.steps?" in result.stderr
    assert CliRunner().invoke(trn, ["config", "--training.steps", "3"]).exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = CliRunner().invoke(trn, ["completion", shell])
    assert result.exit_code == 0 and "_TRN_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trn b", "bench"),
        ("trn train llama3_debug_d", "llama3_debug_ddp8"),
        ("trn run --cluster trn2-", "trn2-ultraserver"),
        ("trn bench allr --show-a", "--show-algorithm"),
    ],
)
def test_completion(words: str, expected: str) -> None:
    environment = {**os.environ, "_TRN_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split()) - 1)
    program = "from trn_dist.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert f"plain,{expected}" in done.stdout.splitlines()


def test_the_page_lists_every_variable() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launcher.md").read_text()
    for variable in VARIABLES:
        assert f"| `{variable.name}` | {variable.default} | {variable.meaning} |" in page
