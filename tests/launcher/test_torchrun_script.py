"""launch/torchrun.sh passes on what its variables say. torchrun itself is replaced by echo."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "torchrun.sh"


def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCHRUN": "echo", **variables}
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=10, check=False
    )


def test_one_machine() -> None:
    done = call("train.py", "--steps", "3", NPROC_PER_NODE="4", LOG_DIR="my logs")
    assert done.returncode == 0, done.stderr
    expected = "--nproc-per-node 4 --max-restarts 0 --local-ranks-filter 0 --tee 3 --standalone --log-dir my logs"
    assert done.stdout == f"{expected} train.py --steps 3\n"


def test_several_machines() -> None:
    done = call("train.py", NNODES="2", RDZV_ENDPOINT="first:29500")
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29500 --rdzv-id trn_dist train.py" in done.stdout
    done = call("train.py", NNODES="2")
    assert done.returncode == 2
    assert "needs RDZV_ENDPOINT=host:port" in done.stderr


def test_mistakes() -> None:
    assert "usage:" in call().stderr
    done = call("train.py", TORCHRUN="no-such-torchrun")
    assert done.returncode == 2
    assert "activate the virtual environment" in done.stderr
