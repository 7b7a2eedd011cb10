"""The training validation: its errors are those of its own figures, no row is off by more than a quarter, and what is
shipped is what fits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "validation" / "training.py"


@pytest.fixture(scope="module")
def printed() -> str:
    return subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=120).stdout


def test_published_training_rows_are_met_within_a_quarter(printed: str) -> None:
    published = [re.findall(r"([\d.]+) \(\d", line) for line in re.findall(r"published (.*)", printed)]
    rows = re.findall(r"predicted ([\d.]+), error ([+-]\d+) %", printed)
    assert len(rows) == len(published) == 4
    for figures, (predicted, error) in zip(published, rows, strict=True):
        mean = sum(map(float, figures)) / len(figures)
        assert abs(100 * (float(predicted) / mean - 1) - int(error)) < 1
        assert abs(int(error)) <= 25


def test_the_shipped_efficiency_is_the_fitted_one_and_holds_for_rows_left_out(printed: str) -> None:
    efficiency = re.search(r"fitted ([\d.]+), shipped ([\d.]+)", printed)
    assert efficiency is not None and efficiency[1] == efficiency[2], printed
    errors = re.findall(r"mean error (\d+) %, worst (\d+) %", printed)
    assert len(errors) == 2  # with the row, and left out of the fit
    for mean, worst in errors:
        assert int(mean) <= 10 and int(worst) <= 25, printed
