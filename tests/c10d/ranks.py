"""Runs a function on several ranks, each a process of its own. Used by the tests of this folder.

Ranks are forked from a server process that has imported torch and done nothing else: starting eight takes a fraction of a
second, and whatever the test process did before does not reach them.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 60.0

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.c10d.ranks"])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank did. `error` is the traceback's text; both are None when the process ended without an answer."""

    value: Any = None
    error: str | None = None
    error_type: str | None = None
    exitcode: int | None = None
    seconds: float = 0.0


def _rank_main(
    rank: int, size: int, port: int, backend: str, timeout_s: float, pipe: Connection, fn: Callable, args: tuple
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    begin = time.monotonic()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
        if backend:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        value = fn(rank, size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(Outcome(value=value, seconds=time.monotonic() - begin))
    except BaseException as error:
        pipe.send(
            Outcome(
                error=traceback.format_exc(), error_type=type(error).__name__, seconds=time.monotonic() - begin
            )
        )
        pipe.close()
        os._exit(1)


def outcomes(
    size: int, fn: Callable, *args: Any, backend: str = "neuron", timeout_s: float = 30.0, deadline_s: float = DEADLINE_S
) -> list[Outcome]:
    """Runs ``fn(rank, size, *args)`` on `size` ranks and tells what became of each. Fails the test when one hangs."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank_main, args=(rank, size, server.port, backend, timeout_s, theirs, fn, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    results: list[Outcome | None] = [None] * size
    deadline = time.monotonic() + deadline_s
    try:
        open_pipes = dict(zip(pipes, range(size), strict=True))
        while open_pipes:
            left = deadline - time.monotonic()
            ready = wait(list(open_pipes), timeout=max(left, 0))
            if not ready:
                hung = sorted(open_pipes.values())
                raise AssertionError(f"ranks {hung} of {size} did not end within {deadline_s} s")
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(timeout=5)
                    results[rank] = Outcome(exitcode=processes[rank].exitcode)
        for process in processes:
            process.join(timeout=10)
            assert process.exitcode is not None, f"process {process.pid} did not exit"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [outcome if outcome is not None else Outcome() for outcome in results]


def run(size: int, fn: Callable, *args: Any, **options: Any) -> list[Any]:
    """As :func:`outcomes`, for functions that succeed everywhere: their values by rank."""
    results = outcomes(size, fn, *args, **options)
    for rank, result in enumerate(results):
        assert result.error is None, f"rank {rank} of {size}:\n{result.error}"
        assert result.exitcode in (None, 0), f"rank {rank} of {size} ended with {result.exitcode}"
    return [result.value for result in results]


def die() -> None:
    """Ends this process as a crash would: at once, without telling anybody."""
    os.kill(os.getpid(), signal.SIGKILL)
