"""The first divergence in a program with a trainer of its own, with bugs that TorchTitan's models have no place for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.own_model import SAMPLES
from trn_dist.parity.assemble import RecordedStep
from trn_dist.parity.cause import Cause
from trn_dist.parity.divergence import Divergence, find_divergence

PROGRAM = Path(__file__).parent / "own_model.py"


def train(folder: Path, layout: str, bug: str, ranks: int) -> RecordedStep:
    command = [sys.executable, "-m", "trn_dist.cli", "run", "-n", str(ranks), str(PROGRAM), str(folder), layout, bug]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return RecordedStep(folder, 1)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> RecordedStep:
    return train(tmp_path_factory.mktemp("one"), "dp", "none", 1)


def compared(one: RecordedStep, other: RecordedStep) -> Divergence:
    return find_divergence(one, other, samples=SAMPLES, gradient_scale=(1.0, 1.0 / other.size("dp")))


@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_a_correct_layout_has_no_finding(one: RecordedStep, layout: str, tmp_path: Path):
    divergence = compared(one, train(tmp_path, layout, "none", 2))
    assert divergence.finding is None, str(divergence.finding)
    assert not divergence.skipped
    assert divergence.compared > 20


@pytest.mark.parametrize(
    ("bug", "layout", "cause", "where"),
    [
        ("bias_not_reduced", "tp", Cause.NOT_REDUCED, ("gradient before clipping, bias", "not summed over tp")),
        ("norm_not_reduced", "tp", Cause.NOT_REDUCED, ("gradient before clipping, norm", "not summed over tp")),
        ("same_dropout_over_samples", "dp", Cause.RANDOM, ("forward, dropout, output",)),
        ("other_dropout_over_tp", "tp", Cause.RANDOM, ("forward, dropout, output",)),
    ],
)
def test_planted_bugs_are_named(
    one: RecordedStep, bug: str, layout: str, cause: Cause, where: tuple[str, ...], tmp_path: Path
):
    divergence = compared(one, train(tmp_path, layout, bug, 2))
    assert divergence.finding is not None
    found = str(divergence.finding)
    assert divergence.finding.explanation.cause is cause, found
    for words in where:
        assert words in found, found
