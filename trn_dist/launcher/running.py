"""The ranks of this user that run at this moment, under ``trn run``, torchrun or a program of their own.

Reads ``/proc``; called by ``trn ls``, ``trn stacks``, ``trn top`` and ``trn monitor``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from trn_dist import telemetry
from trn_dist.launcher import processes
from trn_dist.launcher.stacks import file_of

RUN_FILE = "run.json"
"""In the folder of a run for temporary files: its world size and what it runs."""


@dataclasses.dataclass(frozen=True)
class RunningRank:
    """One rank that runs.

    Attributes:
        node: the simulated node, counted from 0.
        local_rank: the logical core of the node that it stands for.
        launcher: pid of the process that started it: of ``trn run``, ``trn train``, torchrun, or a program that uses
            ``torch.multiprocessing``; its own where it started by itself.
    """

    pid: int
    rank: int
    node: int
    local_rank: int
    command: str
    launcher: int


def zygotes() -> dict[int, int]:
    """Pid of the launcher and of its warm process, for every run of this user under ``trn run`` and ``trn train``."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or entry.stat().st_uid != os.getuid():
                continue
            if (entry / "comm").read_text() == "trn:zygote\n":
                found[int(processes.stat_fields(int(entry.name))[1])] = int(entry.name)
        except OSError:  # ended meanwhile
            continue
    return found


def running_ranks() -> list[RunningRank]:
    """All ranks, by pid. Of torchrun's those that have loaded the device, of others those that have joined a group."""
    found = []
    launcher_of = {zygote: launcher for launcher, zygote in zygotes().items()}
    for zygote, launcher in launcher_of.items():
        for pid in processes.children(zygote):
            rank = _forked_rank(pid, launcher)
            if rank is not None:
                found.append(rank)
    others = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            variables = processes.environment_of(int(entry.name))
            if variables.get("LOCAL_RANK", "").isdigit() and _has_device(entry):
                try:
                    parent = int(processes.stat_fields(int(entry.name))[1])
                except OSError:  # ended meanwhile
                    continue
                others[int(entry.name)] = RunningRank(
                    pid=int(entry.name),
                    rank=int(variables.get("RANK", "0")),
                    node=int(variables.get("GROUP_RANK", "0")),
                    local_rank=int(variables["LOCAL_RANK"]),
                    command=_command(entry),
                    launcher=launcher_of.get(parent, parent),
                )
    # What a rank has started itself, such as the workers of a DataLoader, has its environment but is no rank.
    found += [rank for rank in others.values() if rank.launcher not in others]
    known = {rank.pid for rank in found} | others.keys()
    for pid, number in telemetry.listening().items():
        rank = _unlaunched_rank(pid, number) if pid not in known else None
        if rank is not None:
            found.append(rank)
    return sorted(found, key=lambda rank: rank.pid)


def _forked_rank(pid: int, launcher: int) -> RunningRank | None:
    """A rank that the zygote has forked: its number and its run are known by the file that it has open for stacks."""
    file = file_of(pid)
    if file is None:
        return None
    try:
        run = json.loads((file.parent / RUN_FILE).read_text())
    except (OSError, ValueError):
        return None
    rank, local = int(file.stem.removeprefix("rank")), int(run["local_world_size"])
    return RunningRank(pid, rank, rank // local, rank % local, run["command"], launcher)


def _unlaunched_rank(pid: int, rank: int) -> RunningRank | None:
    """A rank whose program has given it its number; all are on one node."""
    entry = Path(f"/proc/{pid}")
    try:
        if entry.stat().st_uid != os.getuid():
            return None
        parent = int(processes.stat_fields(pid)[1])
    except OSError:  # ended meanwhile
        return None
    starter = parent if _has_device(Path(f"/proc/{parent}")) else pid
    return RunningRank(pid, rank, 0, rank, _command(Path(f"/proc/{starter}")), starter)


def _has_device(entry: Path) -> bool:
    try:
        return "/trn_dist/_C." in (entry / "maps").read_text()
    except OSError:
        return False


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
