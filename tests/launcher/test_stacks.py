"""Where ranks stand, asked for by SIGUSR1 to the launcher and by ``trn stacks``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.launcher.runs import DEADLINE_S, Run, write
from trn_dist.launcher.stacks import RankStacks, grouped

# Rank 2 never comes: the others are blocked in C++, where no Python signal handler would run.
STUCK = """
    import os, pathlib, signal, time
    import torch, torch.distributed as dist
    dist.init_process_group()
    rank = os.environ["RANK"]
    def wait_for_ever():
        pathlib.Path("up" + rank).touch()
        time.sleep(300)
    if rank == "2":
        wait_for_ever()
    if rank == "3":
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        wait_for_ever()
    pathlib.Path("up" + rank).touch()
    dist.all_reduce(torch.ones(1, device="neuron"))
    torch.neuron.synchronize()
"""


def test_stacks_of_ranks_that_hang(tmp_path: Path) -> None:
    write(tmp_path / "stuck.py", STUCK)
    run = Run("run", "-n", 4, "--grace-s", 1, "stuck.py", cwd=tmp_path)
    for rank in range(4):
        run.wait_for(tmp_path / f"up{rank}")
    time.sleep(1)
    command = [sys.executable, "-m", "trn_dist.cli", "stacks", str(run.process.pid)]
    asked = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    answers = json.loads(asked.stdout)
    assert [answer["rank"] for answer in answers] == [0, 1, 2, 3]
    assert 'stuck.py", line 15 in <module>' in answers[0]["text"]
    assert "zygote" not in answers[0]["text"], "frames of the launcher are left out"
    assert "in wait_for_ever" in answers[2]["text"]
    assert answers[3]["problem"] == "the program has reset SIGUSR1"
    assert asked.returncode == 1 and "not every rank has answered" in asked.stderr

    run.process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    assert run.process.poll() is None, "nothing died of it"
    os.kill(run.pid_of("trn:rank3"), signal.SIGKILL)
    result = run.result()
    assert result.code == 1
    assert "trn: ranks 0-1:\nCurrent thread" in result.stderr or "trn: ranks 0-1:\nThread" in result.stderr
    assert "trn: rank 2:\n" in result.stderr
    assert "trn: rank 3:\nthe program has reset SIGUSR1\n" in result.stderr


def test_equal_stacks_are_shown_once() -> None:
    def text(thread: int, line: int) -> str:
        return f'Current thread 0x{thread:016x} (most recent call first):\n  File "a.py", line {line} in f\n'

    groups = grouped([RankStacks(0, 10, text(1, 5)), RankStacks(1, 11, text(2, 6)), RankStacks(2, 12, text(3, 5))])
    assert [ranks for ranks, _ in groups] == [[0, 2], [1]]
    assert groups[0][1] == 'Current thread (most recent call first):\n  File "a.py", line 5 in f'
