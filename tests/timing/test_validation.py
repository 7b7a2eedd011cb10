"""The training validation: it runs, published rows are met, and what is shipped is what fits them."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "validation" / "training.py"


def test_published_training_is_met() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    fitted, left_out = re.findall(r"mean error (\d+) %, worst (\d+) %", done.stdout)
    assert int(fitted[0]) <= 10 and int(fitted[1]) <= 25, done.stdout
    assert int(left_out[0]) <= 10 and int(left_out[1]) <= 25, done.stdout
    efficiency = re.search(r"fitted ([\d.]+), shipped ([\d.]+)", done.stdout)
    assert efficiency is not None and efficiency[1] == efficiency[2], done.stdout
