"""One process that has imported torch and TorchTitan and forks the ranks of many runs, one run after the other.

A comparison makes dozens of runs of seconds each, and importing TorchTitan takes longer than most of them. Each run
has a leader, forked from the warm process, which forks the ranks as ``trn run`` does (:mod:`trn_dist.launcher.rank`),
ends them all when one fails, and writes the exit code to the run's folder. When the comparison's process ends,
however it does, the kernel ends the others. Started by :class:`WarmProcess` as ``python -m
trn_dist.parity.warm_process``; called by :mod:`trn_dist.parity.training`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

from trn_dist.launcher import environment, processes
from trn_dist.launcher.plan import Program

EXIT_CODE = "exit_code"
LOGS = "logs"
_GRACE_S = 10.0
"""Between asking the peers of a failed rank to stop and killing them; they name the rank at fault meanwhile."""
# Not trn_dist.titan.observe, which reads its settings from the environment of the rank when it is imported.
_PRELOAD = (
    "trn_dist.titan.config",
    "torchtitan.components.checkpoint",
    "torchtitan.components.ft",
    "torchtitan.tools.profiling",
)


class WarmRun:
    """A run that was asked for, with ``poll`` and ``stop`` of its processes."""

    def __init__(self, folder: Path, leader_pid: int) -> None:
        self.folder = folder
        self.leader_pid = leader_pid

    def poll(self) -> int | None:
        """The exit code, None while the run goes on: that of the first rank that failed, 128 + N for signal N."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder / EXIT_CODE).read_text())
        try:
            os.kill(self.leader_pid, 0)
        except ProcessLookupError:
            with contextlib.suppress(FileNotFoundError):
                return int((self.folder / EXIT_CODE).read_text())
            return 128 + signal.SIGKILL
        return None

    def stop(self) -> None:
        """Kills the leader, and with it the ranks."""
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.leader_pid, signal.SIGKILL)


class WarmProcess:
    """The other end of the warm process, which lives as long as this object."""

    def __init__(self) -> None:
        single_threaded = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trn_dist.parity.warm_process", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **single_threaded},
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)

    def start(self, folder: Path, ranks: int, recipe: Path, settings: dict[str, str]) -> WarmRun:
        """Trains a resolved recipe on so many ranks; they print to ``folder/logs/rankN.log``.

        Raises:
            RuntimeError: the warm process is not there any more.
        """
        request = {"folder": str(folder), "ranks": ranks, "recipe": str(recipe), "environment": settings}
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs are forked from has ended ({self._process.wait()})")
        return WarmRun(folder, json.loads(answer)["leader"])


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


@functools.lru_cache(maxsize=1)
def _shared(working_folder: str, settings: tuple[tuple[str, str], ...]) -> WarmProcess:
    return WarmProcess()


def warm_process() -> WarmProcess:
    """This process's warm process; another one where the working folder or the settings of this package changed."""
    return _shared(os.getcwd(), tuple(sorted(item for item in os.environ.items() if item[0].startswith("TRN_"))))


# --- In the warm process


def _serve() -> NoReturn:
    processes.die_with_parent(int(sys.argv[1]))
    from trn_dist.launcher.zygote import warm_up

    processes.set_thread_name("trn:warm")
    # Requests and answers keep the pipe; what imports print goes to the terminal.
    answers = os.dup(1)
    os.dup2(2, 1)
    warm_up(Program("torchtitan.train", is_module=True), list(_PRELOAD))
    pid = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: processes.reap_children())
    for line in sys.stdin:
        leader = os.fork()
        if leader == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(answers)
            _lead(json.loads(line), pid)
        os.write(answers, json.dumps({"leader": leader}).encode() + b"\n")
    os._exit(0)


def _lead(request: dict[str, Any], warm_pid: int) -> NoReturn:
    """Forks the ranks and waits for them."""
    processes.die_with_parent(warm_pid)
    os.setsid()
    processes.set_thread_name("trn:leader")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    folder = Path(request["folder"])
    (folder / LOGS).mkdir(exist_ok=True)
    code = 128 + signal.SIGKILL
    try:
        code = _wait([_fork_rank(request, rank, folder) for rank in range(request["ranks"])])
    finally:
        part = folder / f"{EXIT_CODE}.part"
        part.write_text(str(code))
        part.replace(folder / EXIT_CODE)
        os._exit(0)


def _fork_rank(request: dict[str, Any], rank: int, folder: Path) -> int:
    from trn_dist.launcher.rank import RankRequest, become

    leader = os.getpid()
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            request["port"] = probe.getsockname()[1]
    pid = os.fork()
    if pid:
        return pid
    ranks = request["ranks"]
    variables = {
        **environment.run_environment({**os.environ, **request["environment"]}, str(leader)),
        **environment.rank_environment(rank, ranks, ranks, request["port"], ""),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 hosts the store
    }
    stdout, stderr = (
        os.open(folder / LOGS / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for _ in range(2)
    )
    channel = socket.socket()
    channel.close()  # nobody listens: an uncaught exception goes to the log
    program = Program("torchtitan.train", ("--job.config_file", request["recipe"]), is_module=True)
    become(RankRequest(rank, program, variables, leader, stdout, stderr, channel))


def _wait(ranks: list[int]) -> int:
    """The exit code of the first rank that fails, or 0 when all have ended."""
    alive, code, kill_at = set(ranks), 0, float("inf")
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG if code else 0)
        if pid == 0:
            if time.monotonic() > kill_at:
                for other in alive:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.02)
            continue
        alive.discard(pid)
        ended = os.waitstatus_to_exitcode(status)
        if ended and not code:
            code, kill_at = (ended if ended > 0 else 128 - ended), time.monotonic() + _GRACE_S
            for other in alive:
                os.kill(other, signal.SIGTERM)
    return code


if __name__ == "__main__":
    _serve()
