"""launch/check_against_cpu.py: that it passes, and that it can fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "check_against_cpu.py"


@pytest.mark.slow
def test_devices_agree_under_both_launchers() -> None:
    command = [sys.executable, SCRIPT, "--ranks", "4", "--launcher", "both"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("cpu and neuron agree\n")
    for mode in ("ddp", "fsdp2", "tp"):
        for launcher in ("trn", "torchrun"):
            assert f"{mode} under {launcher}, 4 ranks" in done.stdout


def test_differences_are_found(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("check_against_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    good = {"step 1: output": torch.ones(3), "step 1: gradient of w": torch.ones(3), "weight w": torch.ones(3)}
    eps = torch.finfo(torch.float32).eps

    def differences(mode: str, **changed: torch.Tensor) -> list[str]:
        names = dict(zip(("output", "gradient", "weight"), good, strict=True))
        torch.save(good, tmp_path / "cpu-0.pt")
        torch.save({**good, **{names[key]: value for key, value in changed.items()}}, tmp_path / "neuron-0.pt")
        return script.compare(mode, 1, tmp_path)

    assert differences("ddp") == []
    assert differences("ddp", gradient=torch.ones(3) + 8 * eps) == []
    assert "step 1: gradient of w: off by" in differences("ddp", gradient=torch.ones(3) + 64 * eps)[0]
    assert "step 1: output: off by 1.2e-07, allowed 0" in differences("ddp", output=torch.ones(3) + eps)[0]
    assert differences("tp", output=torch.ones(3) + eps) == []
    assert "not finite" in differences("ddp", weight=torch.full((3,), float("nan")))[0]
    assert "misshapen" in differences("ddp", weight=torch.ones(4))[0]


def test_it_refuses_to_be_started_as_a_rank() -> None:
    environment = {**os.environ, "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "call it with python, without a launcher" in done.stderr
