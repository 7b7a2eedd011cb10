"""Starts ``trn run`` as a user does and sees what is left of it. Used by the tests of this folder and of tests/cli."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

MARKER = "TRN_TEST_RUN"
DEADLINE_S = 90.0


def processes_with(marker: str) -> dict[int, str]:
    """Pid and name of every live process that carries the marker in its environment, whatever its parent or session."""
    needle = f"{MARKER}={marker}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:
                continue
    return found


@dataclasses.dataclass
class Result:
    code: int
    stdout: str
    stderr: str


class Run:
    """One launcher process in the background."""

    def __init__(self, *arguments: object, cwd: Path, environment: dict[str, str] | None = None) -> None:
        self.marker = uuid.uuid4().hex
        self.temporary = cwd / f"tmp-{self.marker}"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trn_dist.cli", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **(environment or {}), MARKER: self.marker, "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a CI job in the background ignores it
        )

    def pid_of(self, name: str) -> int:
        """Wait for the process of the run with this name, for example ``trn:rank3``."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for pid, found in processes_with(self.marker).items():
                if found == name:
                    return pid
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"no process {name} within {DEADLINE_S} s: {processes_with(self.marker)}")

    def wait_for(self, path: Path) -> None:
        """Wait for a file that the program makes."""
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{path} did not appear"
            time.sleep(0.02)

    def result(self) -> Result:
        """Wait for the end and check that nothing of the run is left: no process and no temporary file."""
        stdout, stderr = self.process.communicate(timeout=DEADLINE_S)
        self.assert_nothing_left(within_s=0.0)
        return Result(self.process.returncode, stdout, stderr)

    def assert_nothing_left(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while left := processes_with(self.marker):
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"left behind: {left}")
            time.sleep(0.02)
        while files := list(self.temporary.glob("trn_dist_*")):
            assert time.monotonic() < deadline, f"left behind: {files}"
            time.sleep(0.02)


def trn(*arguments: object, cwd: Path, environment: dict[str, str] | None = None) -> Result:
    """Run ``trn`` to its end."""
    return Run(*arguments, cwd=cwd, environment=environment).result()


def write(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    return path
