"""Python tracebacks of ranks that run or hang: what each of their threads is doing at this moment.

A rank registers C code (``faulthandler``) for SIGUSR1 that writes the tracebacks of all threads to a file of its own,
whatever the rank is doing, blocked in a collective too. The supervisor asks for them when it gets SIGUSR1 itself, and
``trn stacks`` from another terminal. Nothing is sent to a process that would die of the signal.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

from trn_dist.launcher import processes

_FILE_NAME = re.compile(r"/rank(\d+)\.stacks$")
_POLL_S = 0.05
_LAUNCHER_FRAME = re.compile(rf'  File "({re.escape(str(Path(__file__).parent))}/(rank|zygote)\.py|<frozen runpy>)"')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class RankStacks:
    """The answer of one rank: the tracebacks of its threads, or why there are none."""

    rank: int
    pid: int
    text: str = ""
    problem: str = ""


def register(folder: str, rank: int) -> None:
    """Make the calling process, the rank ``rank``, answer to SIGUSR1 with a file in ``folder``."""
    try:
        fd = os.open(f"{folder}/rank{rank}.stacks", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:  # the disk is full; the rank runs without
        return
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)


def collect(zygote_pid: int, timeout_s: float = 3.0) -> list[RankStacks]:
    """Ask all ranks of a zygote and wait until they have answered, at most ``timeout_s``. Sorted by rank."""
    asked: dict[int, tuple[int, Path, int]] = {}  # rank -> pid, file, its size before
    problems: dict[int, RankStacks] = {}
    for pid in processes.children(zygote_pid):
        file = file_of(pid)
        if file is None:
            number = processes.environment_of(pid).get("RANK", "")
            if number.isdigit():
                problems[int(number)] = RankStacks(int(number), pid, problem="started with --no-fork, does not answer")
            continue
        rank = int(_FILE_NAME.search(str(file))[1])  # type: ignore[index]
        if not _catches(pid):
            problems[rank] = RankStacks(rank, pid, problem="the program has reset SIGUSR1")
            continue
        try:
            asked[rank] = (pid, file, file.stat().st_size)
            os.kill(pid, signal.SIGUSR1)
        except OSError:  # it ended meanwhile
            asked.pop(rank, None)
    deadline = time.monotonic() + timeout_s
    sizes: dict[int, int] = {}
    while True:  # until two looks in succession see the same, and something from everybody
        time.sleep(_POLL_S)
        now = {rank: _size(file) for rank, (_, file, _) in asked.items()}
        if now == sizes and all(now[rank] > before for rank, (_, _, before) in asked.items()):
            break
        if time.monotonic() > deadline:
            break
        sizes = now
    for rank, (pid, file, before) in asked.items():
        try:
            with file.open("rb") as answer:
                answer.seek(before)
                text = answer.read().decode(errors="backslashreplace")
        except OSError:
            text = ""
        text = "".join(line for line in text.splitlines(keepends=True) if not _LAUNCHER_FRAME.match(line))
        why = "" if text else f"no answer within {timeout_s:g} s ({processes.state(pid)})"
        problems[rank] = RankStacks(rank, pid, text, why)
    return [problems[rank] for rank in sorted(problems)]


def grouped(stacks: list[RankStacks]) -> list[tuple[list[int], str]]:
    """Ranks whose threads all stand at the same lines, with what they said; identifiers of threads do not count."""
    groups: dict[str, list[int]] = {}
    for answer in stacks:
        text = answer.problem or _THREAD.sub(r"\1", answer.text).strip()
        groups.setdefault(text, []).append(answer.rank)
    return [(ranks, text) for text, ranks in groups.items()]


def file_of(pid: int) -> Path | None:
    """The file that a rank writes its stacks to, as its open descriptors show it."""
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(entry.path)
            if _FILE_NAME.search(target):
                return Path(target)
    except OSError:  # it ended meanwhile
        return None
    return None


def _catches(pid: int) -> bool:
    """Whether a process handles SIGUSR1, instead of dying of it."""
    try:
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # the run has ended
        return 0
