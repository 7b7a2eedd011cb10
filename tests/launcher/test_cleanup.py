"""Kill -9 of any process of a run, at any moment: everything ends, with an error, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.runs import DEADLINE_S, Run, processes_with, write

# Every rank has descendants of its own: a worker that it forked and a program in a session of its own.
BUSY = """
    import os, pathlib, subprocess, time
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    if os.fork() == 0:
        pathlib.Path("/proc/self/comm").write_text("worker")
        os.setsid()
        pathlib.Path("worker" + os.environ["RANK"]).touch()
        time.sleep(300)
    pathlib.Path("up" + os.environ["RANK"]).touch()
    time.sleep(300)
"""
RANKS = 3
ENDS_WITHIN_S = 10.0


def start(folder: Path) -> Run:
    write(folder / "busy.py", BUSY)
    return Run("run", "-n", RANKS, "--grace-s", 2, "busy.py", cwd=folder)


def wait_until_all_are_up(run: Run, folder: Path) -> None:
    for rank in range(RANKS):
        run.wait_for(folder / f"up{rank}")
        run.wait_for(folder / f"worker{rank}")


def end_after_kill(run: Run) -> tuple[int, str]:
    """Exit code and error output; checks the deadline and that nothing is left."""
    begin = time.monotonic()
    _, stderr = run.process.communicate(timeout=DEADLINE_S)
    run.assert_nothing_left(within_s=ENDS_WITHIN_S)
    assert time.monotonic() - begin < ENDS_WITHIN_S + 2
    return run.process.returncode, stderr


@pytest.mark.parametrize(
    ("victim", "code", "words"),
    [
        ("trn:rank1", 1, "trn: rank 1 failed first"),
        ("trn:zygote", 1, "the warm process that ranks are forked from was killed by SIGKILL"),
        ("trn:store", 1, "the process that hosts the store for rendezvous was killed by SIGKILL"),
    ],
)
def test_kill_of_a_part_ends_the_run(tmp_path: Path, victim: str, code: int, words: str) -> None:
    run = start(tmp_path)
    wait_until_all_are_up(run, tmp_path)
    os.kill(run.pid_of(victim), signal.SIGKILL)
    exit_code, stderr = end_after_kill(run)
    assert exit_code == code
    assert words in stderr


def test_kill_of_the_launcher_ends_the_run(tmp_path: Path) -> None:
    run = start(tmp_path)
    wait_until_all_are_up(run, tmp_path)
    assert len(processes_with(run.marker)) == 3 + 3 * RANKS  # launcher, zygote, store; a rank, its worker and program
    run.process.kill()
    assert end_after_kill(run)[0] == -signal.SIGKILL


def kill_at_a_random_moment(folder: Path, seed: int) -> None:
    """Kill one process of the run, whatever it is, at a moment between its start and shortly after the ranks are up."""
    chance = random.Random(seed)
    run = start(folder)
    time.sleep(chance.uniform(0.0, 4.0))
    victims = sorted(processes_with(run.marker).items())
    assert victims
    pid, name = chance.choice(victims)
    os.kill(pid, signal.SIGKILL)
    if name in ("sleep", "worker"):
        # A descendant of a rank is that rank's affair; the run goes on until the launcher is told to stop.
        run.process.terminate()
    code, stderr = end_after_kill(run)
    assert code != 0, f"seed {seed}: {name} was killed, stderr {stderr}"
    assert "Traceback" not in stderr, f"seed {seed}: {name} was killed"


def test_kill_of_the_launcher_ends_the_imports(tmp_path: Path) -> None:
    write(tmp_path / "slow.py", "import pathlib, time; pathlib.Path('importing').touch(); time.sleep(300)")
    run = Run("run", "-n", 1, "--preload", "slow", "-m", "slow", cwd=tmp_path)
    run.wait_for(tmp_path / "importing")
    run.process.kill()
    code, stderr = end_after_kill(run)
    assert code == -signal.SIGKILL and stderr == ""


@pytest.mark.parametrize("seed", range(2))
def test_kill_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    kill_at_a_random_moment(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_kill_at_many_random_moments(tmp_path: Path, seed: int) -> None:
    kill_at_a_random_moment(tmp_path, seed)
