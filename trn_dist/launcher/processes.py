"""What Linux offers to start processes safely and to leave none behind.

Touches only ``prctl``, ``madvise`` and ``/proc``. Called by ``supervisor``, ``zygote`` and ``rank``; imports the
standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25  # Linux 6.1

_HUGE_PAGE_BYTES = 2 << 20

RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
"""In the environment of every process of a run, with a value of the run's own, whatever its parent or session."""

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies. Call right after the fork."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo ``die_with_parent``."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that they can be ended and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_thread_name(name: str) -> None:
    """Name the calling thread as ``ps`` and ``top`` show it (15 bytes)."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]).raw)


def flush_c_streams() -> None:
    """Write out what C code left in the buffers of its open files."""
    _libc.fflush(None)


def use_huge_pages() -> int:
    """Move this process's heap to pages of 2 MiB where the kernel can, so that forks copy 512 times fewer entries.

    Returns the bytes that lie in such pages now, 0 on a kernel without ``MADV_COLLAPSE``. A write in a forked child
    still copies one page of 4 KiB.
    """
    moved = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *path = line.split(maxsplit=5)
        if permissions != "rw-p" or inode != "0" or path not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        length = end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - start
        if length > 0 and _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_COLLAPSE) == 0:
            moved += length
    return moved


def other_threads() -> list[str]:
    """Names of this process's threads beside the calling one, as the kernel knows them."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            try:
                names.append((task / "comm").read_text().strip())
            except OSError:  # it has ended meanwhile
                continue
    return sorted(names)


def stat_fields(pid: int) -> list[str]:
    """What the kernel tells of a process after its name: state, parent, ... Raises OSError when it has ended."""
    # The name in brackets may hold anything, brackets too.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children(parent_pid: int) -> list[int]:
    """Pids of the live processes whose parent is ``parent_pid``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = stat_fields(int(entry.name))
            except OSError:  # ended meanwhile
                continue
            if int(fields[1]) == parent_pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it has ended or belongs to another user."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def state(pid: int) -> str:
    """What the kernel says a process is doing, such as ``S (sleeping)``."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "ended"


def processes_of_run(run_id: str) -> list[int]:
    """Pids of this user's live processes, other than the caller, that were started within the run ``run_id``."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if marker in (entry / "environ").read_bytes().split(b"\0"):  # empty for a zombie
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def kill_run(run_id: str, timeout_s: float = 5.0) -> list[int]:
    """SIGKILL every other process of the run until none is left; returns the pids that outlive ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while remaining := processes_of_run(run_id):
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            return remaining
        time.sleep(0.01)
    return []


def reap_children() -> None:
    """Collect the exit status of every child that has ended, without waiting for any."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
