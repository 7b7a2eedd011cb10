"""Traces of virtual time for Perfetto (https://ui.perfetto.dev): one file a rank, and one of all ranks together.

``TRN_TRACE=DIR`` makes every rank write ``DIR/rank-NNNNN.json``; :func:`join_traces` puts them into ``DIR/trace.json``.
The format is Chrome's JSON array, written by ``csrc/timing/Trace.cpp``. :func:`join_traces` needs no torch.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

TRACE_VARIABLE = "TRN_TRACE"
JOINED_TRACE = "trace.json"


def trace_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def start_trace(folder: str | Path | None = None, rank: int | None = None) -> Path | None:
    """Traces this rank from now on until the process ends.

    Args:
        folder: made if it does not exist; by default what ``TRN_TRACE`` says, and nothing is traced without it.
        rank: by default what ``RANK`` says, or 0.

    Returns:
        The file, or None when nothing is traced.

    Raises:
        RuntimeError: the file cannot be written, or a trace is being written already.
    """
    from trn_dist import _C

    folder = folder or os.environ.get(TRACE_VARIABLE)
    if not folder:
        return None
    path = trace_file(Path(folder), int(os.environ.get("RANK", "0")) if rank is None else rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    _C._start_trace(str(path), int(path.stem.removeprefix("rank-")))
    atexit.register(_flush_at_exit)
    return path


def flush_trace() -> None:
    """Writes out what was traced so far; happens by itself at the end of the process."""
    from trn_dist import _C

    _C._flush_trace()


def _flush_at_exit() -> None:
    try:
        flush_trace()
    except RuntimeError as error:  # the disk is full
        print(error, file=sys.stderr)


def join_traces(folder: str | Path) -> Path:
    """Puts the traces of all ranks in ``folder`` into one file, ``trace.json``, which it returns.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(folder)
    parts = sorted(folder.glob("rank-*.json"))
    if not parts:
        raise FileNotFoundError(
            f"{folder}: no rank-*.json in it; was the run traced ({TRACE_VARIABLE}, trn train --trace)?"
        )
    joined = folder / JOINED_TRACE
    with joined.open("wb") as out:
        out.write(b"[\n")
        for part in parts:
            with part.open("rb") as lines:
                for line in lines:
                    # Whole lines of entries only: not the opening bracket, nor what a killed rank left half written.
                    if line.endswith(b"},\n"):
                        out.write(line)
        out.write(b'{"ph":"M","name":"trn_dist","pid":0,"args":{"name":"predicted times, none measured"}}\n]\n')
    return joined
