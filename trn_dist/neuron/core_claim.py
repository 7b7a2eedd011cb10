"""A job that names its cores has them for itself, as under the Neuron runtime.

A process that sets ``NEURON_RT_VISIBLE_CORES`` claims these cores with its first operator (a rank the one that
``LOCAL_RANK`` picks) and holds them until it ends; another job that names one of them gets the runtime's "not
available". Jobs that name no cores claim none, so that several can run side by side on one machine. A claim is a lock
on a file in a folder that is private to the user; it goes with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
from pathlib import Path

VARIABLE = "NEURON_RT_VISIBLE_CORES"
_held: list[int] = []  # descriptors, open as long as the process lives


def claim_folder() -> Path:
    """Where the claims lie. Raises RuntimeError when another user owns it."""
    folder = Path(tempfile.gettempdir()) / f"trn_dist-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise RuntimeError(f"neuron: {folder} belongs to somebody else; set TMPDIR to a folder of your own")
    return folder


def own_cores(chosen: list[int]) -> list[int]:
    """Of the cores that the job named, those of this process."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdigit() and int(local_rank) < len(chosen):
        return [chosen[int(local_rank)]]
    return chosen


def claim_cores(cores: list[int]) -> None:
    """Claims these cores of the node for the life of the process; without effect when it has them.

    Raises:
        RuntimeError: another process holds one of them; it is named.
    """
    if _held:
        return
    # Several simulated nodes may share this machine.
    node = os.environ.get("GROUP_RANK", "0")
    folder = claim_folder()
    taken: list[int] = []
    holder = ""
    for core in cores:
        descriptor = os.open(folder / f"node{node}-nc{core}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder or f"nc{core} is in use by process {os.pread(descriptor, 256, 0).decode(errors='replace')}"
            os.close(descriptor)
            continue
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} ({' '.join(sys.argv)[:200]})".encode(), 0)
        taken.append(descriptor)
    if holder:
        for descriptor in taken:
            os.close(descriptor)
        raise RuntimeError(
            f"neuron: NeuronCore(s) not available - Requested:nc{cores[0]}-nc{cores[-1]} Available:{len(taken)}: "
            f"{holder}. End that job, or name other cores in {VARIABLE}"
        )
    _held.extend(taken)
