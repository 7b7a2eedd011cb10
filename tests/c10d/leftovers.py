"""What ranks may leave behind on a machine: processes, arenas, sockets, files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def find() -> set[str]:
    """What the processes of this session hold of trn_dist, other than this process, and what lies in /dev/shm.

    Ranks are processes of the session of the tests, as long as nobody starts another one.
    """
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "trn" in name}
    sockets = {
        line.split()[6]: line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]
        if "@trn_dist" in line
    }
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with contextlib.suppress(OSError):  # it may be gone by now
            if pid == os.getpid() or os.getsid(pid) != os.getsid(0):
                continue
            if "memfd:trn_dist" in (process / "maps").read_text():
                found.add(f"process {pid} maps an arena")
            for fd in os.listdir(process / "fd"):
                target = os.readlink(process / "fd" / fd)
                inode = target.removeprefix("socket:[").rstrip("]")
                if inode in sockets:
                    found.add(f"process {pid} holds the socket {sockets[inode]}")
                elif "memfd:trn_dist" in target:
                    found.add(f"process {pid} holds an arena")
    return found


def assert_none(before: set[str], patience_s: float = 5.0) -> None:
    """Fails if there is more than ``before``. A process that was killed takes a moment to go."""
    deadline = time.monotonic() + patience_s
    while left := find() - before:
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.05)
