"""The flight recorder: what the ranks last called, and what became of it, in the form of PyTorch's.

Each rank keeps its last calls in shared memory: TORCH_FR_BUFFER_SIZE (or TORCH_NCCL_TRACE_BUFFER_SIZE) of them, 2000 by
default. When a group fails, each rank that learns of it writes them to a file, ``PREFIX`` and its rank, and also those
of the ranks that have written none, because they are dead or stuck. PREFIX is TORCH_FR_DUMP_TEMP_FILE (or
TORCH_NCCL_DEBUG_INFO_TEMP_FILE); without it nothing is written unless TORCH_FR_DUMP_ON_TIMEOUT (or
TORCH_NCCL_DUMP_ON_TIMEOUT) is 1, and then to ``~/.cache/torch/comm_lib_trace_rank_`` as PyTorch does.

The files hold what ``torch.distributed.flight_recorder.fr_trace`` reads; ``trn flight`` reads them too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trn_dist import __version__

if TYPE_CHECKING:
    from trn_dist import _C

_VERSION = "2.10"  # of PyTorch's format
_SECONDS_BETWEEN_DUMPS = 1.0
# PyTorch's reader accepts the names of the libraries that it knows only.
_LIBRARY = "nccl"
_SITE = re.compile(r"(?P<filename>.*):(?P<line>\d+) \((?P<name>.*)\)", re.DOTALL)

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_last_dump_s = -math.inf
_first_group_s = 0.0  # since 1970; files from before are of another run


def note_group() -> None:
    """Called when a group is made: files older than the first one are of another run."""
    global _first_group_s
    if _first_group_s == 0.0:
        _first_group_s = time.time()


def _largest_group() -> _C.ProcessGroupNeuron | None:
    """A group by which most ranks of the job are reached."""
    from torch.distributed import distributed_c10d as c10d

    from trn_dist import _C

    found = []
    for group in list(c10d._world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            if isinstance(backend, _C.ProcessGroupNeuron):
                found.append(backend)
    return max(found, key=lambda backend: backend._fabric_size, default=None)


def dump_prefix() -> str | None:
    """What the names of the files begin with, or None when none are to be written."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if os.environ.get(name):
            return os.environ[name]
    if any(os.environ.get(name) == "1" for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")):
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return os.path.join(cache, "torch", "comm_lib_trace_rank_")
    return None


def flight_record(rank: int | None = None) -> dict[str, Any]:
    """The last calls of a rank, as the dictionary that PyTorch's flight recorder dumps.

    Args:
        rank: of the job; None is this rank. Another rank's are read from its shared memory, dead or alive.

    Raises:
        RuntimeError: there is no neuron process group.
        IndexError: the job has no such rank.
    """
    group = _largest_group()
    if group is None:
        raise RuntimeError("there is no neuron process group, so there is no flight record")
    own = group._fabric_rank
    calls = group._flight_record(own if rank is None else rank)
    pg_config = _pg_config()
    numbers: dict[str, int] = {}
    status: dict[str, dict[str, int]] = {}
    entries = []
    for call in calls:
        name = call["group"].removeprefix(" at ")
        number = numbers.setdefault(name, len(numbers))
        pg_config.setdefault(name, {"name": name, "desc": "undefined", "ranks": "[]"})
        entries.append(_entry(call, number, (name, pg_config[name]["desc"])))
        if not call["is_p2p"]:
            state = status.setdefault(
                str(number),
                {"last_enqueued_collective": -1, "last_started_collective": -1, "last_completed_collective": -1},
            )
            state["last_enqueued_collective"] = call["sequence"]
            if call["completed_ns"]:
                state["last_started_collective"] = state["last_completed_collective"] = call["sequence"]
    return {
        "version": _VERSION,
        "comm_lib_version": f"neuron, trn_dist {__version__}",
        "pg_config": pg_config,
        "pg_status": status,
        "entries": entries,
    }


def dump_on_failure() -> None:
    """Writes the files if they are asked for. Called when a group has failed; never raises."""
    global _last_dump_s
    prefix = dump_prefix()
    if prefix is None or not _lock.acquire(blocking=False):
        return
    try:
        if time.monotonic() - _last_dump_s >= _SECONDS_BETWEEN_DUMPS:
            _last_dump_s = time.monotonic()
            dump(prefix)
    except Exception as error:
        torch._logging.warning_once(_logger, "the flight record could not be written: %s", error)
    finally:
        _lock.release()


def dump(prefix: str) -> None:
    """Writes this rank's file anew, and those of other ranks that this run has not written yet."""
    group = _largest_group()
    if group is None:
        return
    Path(prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    for rank in range(group._fabric_size):
        path = Path(f"{prefix}{rank}")
        own = rank == group._fabric_rank
        if not own and path.exists() and path.stat().st_mtime >= _first_group_s:
            continue
        _write(path, pickle.dumps(flight_record(rank), protocol=2), replace=own)


def _write(path: Path, content: bytes, replace: bool) -> None:
    """Writes a file in one step. Without ``replace`` the file of a rank that writes its own meanwhile wins."""
    handle, temporary = tempfile.mkstemp(prefix=".flight-", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if replace:
            os.replace(temporary, path)
            return
        if path.exists() and path.stat().st_mtime < _first_group_s:
            path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _pg_config() -> dict[str, dict[str, str]]:
    """The groups that this process knows."""
    from torch.distributed import distributed_c10d as c10d

    config: dict[str, dict[str, str]] = {}
    for group in c10d._world.pg_map:
        ranks = sorted(c10d.get_process_group_ranks(group))
        config[group.group_name] = {"name": group.group_name, "desc": group.group_desc, "ranks": str(ranks)}
    return config


def _entry(call: dict[str, Any], number: int, group: tuple[str, str]) -> dict[str, Any]:
    operation = call["operation"]
    if call["is_p2p"]:
        arrow = "->" if operation == "send" else "<-"
        operation = f"{operation} {call['rank']}{arrow}{call['peer']}"
    elif call["chunked"] and operation in ("all_gather", "reduce_scatter"):
        operation = f"_{operation}_base"
    site = _SITE.fullmatch(call["site"].removeprefix(" at "))
    shape = list(call["shape"])

    def sizes(numel: int) -> list[list[int]]:
        return [shape if math.prod(shape) == numel else [numel]]

    inputs, outputs = call["input_numel"], call["output_numel"]
    if operation in ("broadcast", "reduce"):  # one tensor on every rank, whichever side of the call it is on
        inputs = outputs = max(inputs, outputs)
    completed = call["completed_ns"] or None
    return {
        "record_id": call["record_id"],
        "pg_id": number,
        "process_group": group,
        "collective_seq_id": 0 if call["is_p2p"] else call["sequence"],
        "p2p_seq_id": call["sequence"] if call["is_p2p"] else 0,
        "op_id": call["sequence"],
        "profiling_name": f"{_LIBRARY}:{operation}",
        "time_created_ns": call["created_ns"],
        "input_sizes": sizes(inputs),
        "input_dtypes": [call["dtype"]],
        "output_sizes": sizes(outputs),
        "output_dtypes": [call["dtype"]],
        "state": "completed" if completed else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": completed,
        "retired": bool(completed) or call["failed"],
        "timeout_ms": call["timeout_ms"],
        "is_p2p": call["is_p2p"],
        "frames": [{**site.groupdict(), "line": int(site["line"])}] if site else [],
        "thread_id": "",
        "thread_name": "",
    }
