"""The validation script: it runs, and the published rows are met."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "validation" / "collectives.py"


def printed(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True, timeout=600
    ).stdout


def test_published_rows_are_met() -> None:
    rows = re.findall(r"(?m)^ *(\d+) +([\d.]+) +([\d.]+) +([+-]?\d+)%  (\S+)(?: \((\w+)\))?$", printed("--no-fit"))
    assert len(rows) == 41
    for nbytes, published, predicted, error, algorithm, named in rows:
        assert abs(100 * (float(predicted) / float(published) - 1) - int(error)) < 1
        assert not named or algorithm == named
        assert abs(int(error)) <= 25, nbytes
    assert statistics.fmean(abs(int(row[3])) for row in rows) <= 8.5
    assert statistics.fmean(abs(int(row[3])) for row in rows if int(row[0]) >= 32 * 2**20) <= 9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_shipped_parameters_are_the_fitted_ones_and_hold_for_rows_left_out() -> None:
    text = printed()
    fitted, shipped = (re.search(rf"(?m)^{name}: +(.*)$", text) for name in ("fitted", "shipped"))
    assert fitted is not None and shipped is not None
    assert fitted[1] == shipped[1]
    left_out = [int(error) for error in re.findall(r"%\s+([+-]\d+)%  ", text)]
    assert len(left_out) == 41
    assert max(map(abs, left_out)) <= 25
    assert statistics.fmean(map(abs, left_out)) <= 9.5
