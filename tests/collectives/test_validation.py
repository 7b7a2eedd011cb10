"""The validation script: it runs, and large published rows are met."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "validation" / "collectives.py"


def test_published_rows_from_32_mib_on_are_met() -> None:
    printed = subprocess.run(
        [sys.executable, str(SCRIPT), "--no-fit"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    rows = re.findall(r"(?m)^ *(\d+) +([\d.]+) +([\d.]+) +([+-]?\d+)%  (\S+)(?: \((\w+)\))?$", printed)
    assert len(rows) == 26
    for nbytes, published, predicted, error, algorithm, named in rows:
        assert abs(100 * (float(predicted) / float(published) - 1) - int(error)) < 1
        assert not named or algorithm == named
        if int(nbytes) >= 32 * 2**20:
            assert abs(int(error)) <= 30, nbytes
