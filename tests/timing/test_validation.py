"""The training validation: it runs, its errors are those of its own figures, no row is off by more than a quarter."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "validation" / "training.py"


def test_published_training_rows_are_met_within_a_quarter() -> None:
    printed = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    published = [re.findall(r"([\d.]+) \(\d", line) for line in re.findall(r"published (.*)", printed)]
    rows = re.findall(r"predicted ([\d.]+), error ([+-]\d+) %", printed)
    assert len(rows) == len(published) == 4
    for figures, (predicted, error) in zip(published, rows, strict=True):
        mean = sum(map(float, figures)) / len(figures)
        assert abs(100 * (float(predicted) / mean - 1) - int(error)) < 1
        assert abs(int(error)) <= 25
