"""Recorded programs in files: what each rank of a run asked of virtual time, without any time in it.

``TRN_RECORD=DIR`` makes every rank write ``DIR/rank-NNNNN.json`` and ``DIR/rank-NNNNN.actions`` when its process ends;
:mod:`trn_dist.timing.replay` reads them. The first holds what the second refers to by number: operators as sizes of
products, elements and bytes, collectives as operation, group and bytes. The second is an array of 16-byte records
(``Action`` in ``csrc/timing/Program.h``), in the order of the program. Nothing of it is code. Reading needs no torch.
"""

from __future__ import annotations

import atexit
import enum
import json
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD_VARIABLE = "TRN_RECORD"
FORMAT = "trn_dist program 1"

# As in csrc/timing/Program.h.
ACTION = struct.Struct("<BBhiq")
"""An action: kind, flag, device, stream, value."""


class Action(enum.IntEnum):
    LAUNCH = 0
    ENQUEUE = 1
    STREAM_WAIT = 2
    HOST_WAIT = 3
    HOST_WAIT_STREAM = 4
    HOST_WAIT_DEVICE = 5
    STREAM_WAIT_STREAM = 6
    POLL = 7
    RECORD = 8
    RECORD_AFTER = 9
    ENTER = 10
    MARK_STEP = 11


class Origin(enum.IntEnum):
    TRANSFER = 1
    MOMENT = 2
    LAUNCH = 3


class Role(enum.IntEnum):
    UNDESCRIBED = 0
    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3


class ProgramError(RuntimeError):
    """A record that is missing, incomplete or cannot be replayed; the text says which file and why."""


@dataclass(frozen=True)
class RankProgram:
    """What one rank recorded.

    Attributes:
        rank, world_size, local_world_size: of the job that ran.
        cluster: what ``TRN_CLUSTER`` named.
        lnc: physical cores of a logical one.
        lone: its peers were taken to do what it does (timing mode).
        actions: records of ``csrc/timing/Program.h``.
        works, transfers: rows of its operators, each once, and of its collectives and messages.
    """

    rank: int
    world_size: int
    local_world_size: int
    cluster: str
    lnc: int
    lone: bool
    actions: bytes
    works: list[list[Any]]
    transfers: list[list[Any]]

    def as_dict(self) -> dict[str, Any]:
        """As ``_C._Replay`` takes it."""
        return {"rank": self.rank, "actions": self.actions, "works": self.works, "transfers": self.transfers}


def program_files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank:05d}.json", folder / f"rank-{rank:05d}.actions"


def start_program(folder: str | Path | None = None) -> Path | None:
    """Records this rank's program from its first operator on; the files are written when the process ends.

    Args:
        folder: made if it does not exist; by default what ``TRN_RECORD`` says, and nothing is recorded without it.

    Raises:
        RuntimeError: an operator was launched before, or a program is being recorded already.
        OSError: the folder cannot be made.
    """
    from trn_dist import _C

    folder = folder or os.environ.get(RECORD_VARIABLE)
    if not folder:
        return None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _C._start_program()
    atexit.register(_write_at_exit, folder)
    return folder


def _write_at_exit(folder: Path) -> None:
    try:
        write_program(folder)
    except OSError as error:
        print(f"{RECORD_VARIABLE}={folder}: {error.strerror}; this rank is not recorded", file=sys.stderr)


def write_program(folder: Path) -> None:
    """Writes what was recorded so far."""
    from trn_dist import _C
    from trn_dist.timing.cluster import cluster, cluster_name
    from trn_dist.timing.virtual_world import timing_only

    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    recorded = _C._program_so_far()
    about, actions = program_files(folder, rank)
    actions.write_bytes(recorded["actions"])
    content = {
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        "cluster": cluster_name(),
        "lnc": cluster().chip.physical_cores_per_logical,
        "lone": timing_only(),
        "cannot_replay": recorded["cannot_replay"],
        "works": recorded["works"],
        "transfers": recorded["transfers"],
    }
    part = about.with_suffix(".part")
    part.write_text(json.dumps(content) + "\n", encoding="utf-8")
    part.replace(about)


def read_programs(folder: str | Path) -> list[RankProgram]:
    """The programs of all ranks of a run, in the order of the ranks.

    Raises:
        ProgramError: there is none, one is missing or damaged, or one cannot be replayed.
    """
    folder = Path(folder)
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        raise ProgramError(
            f"{folder}: no recorded program (rank-*.json) in it; was the run recorded ({RECORD_VARIABLE}, "
            "trn train --record), and did its ranks end by themselves?"
        )
    programs = [_read(file) for file in files]
    first = programs[0]
    if not first.lone:
        missing = sorted(set(range(first.world_size)) - {program.rank for program in programs})
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ProgramError(f"{folder}: of {first.world_size} ranks these left no record: {shown}")
    return programs


def _read(file: Path) -> RankProgram:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise ProgramError(f"{file}: format {content.get('format')!r}; this version reads {FORMAT!r}")
        if content["cannot_replay"]:
            raise ProgramError(f"{file}: this program cannot be replayed: {content['cannot_replay']}")
        names = ("rank", "world_size", "local_world_size", "cluster", "lnc", "lone", "works", "transfers")
        return RankProgram(actions=file.with_suffix(".actions").read_bytes(), **{name: content[name] for name in names})
    except FileNotFoundError as error:
        raise ProgramError(f"{error.filename}: missing; it belongs to {file.name}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ProgramError(f"{file}: not a recorded program: {error}") from None
