"""TorchTitan 0.2.2 has two faults that its loss curves hide (torchtitan#2318, #2972); the parity tool names both
factors.

`make nightly` puts that version into a folder of its own, which is all that this test needs beside the package.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TITAN = Path(os.environ.get("TORCHTITAN_0_2_2") or ROOT / "build" / "torchtitan-0.2.2")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_faults_of_torchtitan_0_2_2_are_found_and_their_factors_named(tmp_path: Path):
    if not (TITAN / "torchtitan").is_dir():
        pytest.skip(f"no torchtitan 0.2.2 in {TITAN}: make {ROOT.name}'s nightly, or pip install --no-deps --target")
    layouts = "1; ddp=2; fsdp=2; pp=2"
    command = [sys.executable, "-m", "trn_dist.cli", "parity", str(ROOT / "recipes" / "llama3_debug.toml")]
    command += ["--layouts", layouts, "--steps", "3", "--clipping", "off", "--members", "2", "--training.seq_len", "64"]
    command += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(TITAN)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = {v["layout"]: v for v in json.loads((tmp_path / "parity.json").read_text())["verdicts"]}
    assert verdicts["fsdp=2"]["verdict"] == "within rounding", verdicts["fsdp=2"]["reason"]
    assert verdicts["ddp=2"]["verdict"] == verdicts["pp=2"]["verdict"] == "different"
    assert verdicts["ddp=2"]["first_step"] == verdicts["pp=2"]["first_step"] == 1
    assert "1/2: the data-parallel group's size" in verdicts["ddp=2"]["reason"]
    assert "512: the tokens of a step, so gradients are not divided by them" in verdicts["pp=2"]["reason"]
