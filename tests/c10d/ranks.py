"""Runs a function on several ranks, each a process of its own. Used by the tests of this folder.

Ranks are forked from a server process that has imported torch and done nothing else: starting eight takes a fraction of
a second, and whatever the test process did before does not reach them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.c10d import hosts

DEADLINE_S = 60.0

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
# What the tests' own modules import is imported once, in the server.
_PRELOAD = (
    "pytest",
    "torch.distributed._functional_collectives",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tests.c10d.ranks",
)
_context.set_forkserver_preload(list(_PRELOAD))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank did. `error` is the traceback's text. A rank that died without a word has no value and no error."""

    value: Any = None
    error: str = ""
    error_type: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Job:
    size: int
    port: int  # of the store
    backend: str  # "": the function makes the process group
    timeout_s: float
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    hosts: tuple[hosts.Host, ...]  # of each rank; empty: all on this one


def _rank_main(rank: int, job: _Job, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    size = str(job.size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    begin = time.monotonic()
    try:
        deadline = timedelta(seconds=DEADLINE_S)
        if job.hosts:
            job.hosts[rank].enter()
            first = job.hosts[0]
            leads = rank == 0 and bool(first.namespace)  # the store of this process is out of reach from there
            store = dist.TCPStore(first.address, job.port, is_master=leads, timeout=deadline, wait_for_workers=False)
        else:
            store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=deadline)
        if job.backend:
            timeout = timedelta(seconds=job.timeout_s)
            dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.size, timeout=timeout)
        value = job.fn(rank, job.size, *job.args)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(Outcome(value=value, seconds=time.monotonic() - begin))
    except BaseException as error:
        pipe.send(
            Outcome(error=traceback.format_exc(), error_type=type(error).__name__, seconds=time.monotonic() - begin)
        )
        pipe.close()
        os._exit(1)


def _fork_ranks(job: _Job, pipes: list[Connection], report: Connection) -> None:
    """Forks the ranks, in a process group of its own by which they can all be ended, and reports how each one ended."""
    os.setpgrp()
    report.send(os.getpid())
    ranks_by_pid = {}
    for rank in range(job.size):
        pid = os.fork()
        if pid == 0:
            for other in range(job.size):
                if other != rank:
                    pipes[other].close()
            code = 1
            try:
                _rank_main(rank, job, pipes[rank])
                code = 0
            finally:
                os._exit(code)
        ranks_by_pid[pid] = rank
    for pipe in pipes:
        pipe.close()
    exitcodes: dict[int, int] = {}
    while len(exitcodes) < job.size:
        pid, status = os.wait()
        exitcodes[ranks_by_pid[pid]] = os.waitstatus_to_exitcode(status)
    report.send(exitcodes)


def outcomes(
    size: int,
    fn: Callable,
    *args: Any,
    backend: str = "neuron",
    timeout_s: float = 30.0,
    deadline_s: float = DEADLINE_S,
    on: Sequence[hosts.Host] = (),
) -> list[Outcome]:
    """Runs ``fn(rank, size, *args)`` on `size` ranks and tells what became of each. Fails the test when one hangs.

    `on` names a host for each rank; the job's store is then in the namespace of rank 0, if that has one.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pairs = [_context.Pipe(duplex=False) for _ in range(size)]
    report, report_end = _context.Pipe(duplex=False)
    job = _Job(size, server.port, backend, timeout_s, fn, args, tuple(on))
    parent = _context.Process(target=_fork_ranks, args=(job, [theirs for _, theirs in pairs], report_end))
    parent.start()
    for end in (*(theirs for _, theirs in pairs), report_end):
        end.close()
    deadline = time.monotonic() + deadline_s
    process_group = report.recv()
    results = [Outcome() for _ in range(size)]
    try:
        open_pipes: dict[Any, int] = {ours: rank for rank, (ours, _) in enumerate(pairs)}
        while open_pipes:
            ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise AssertionError(f"ranks {sorted(open_pipes.values())} of {size} did not end within {deadline_s} s")
            pipe: Any
            for pipe in ready:
                rank = open_pipes.pop(pipe)
                with contextlib.suppress(EOFError):
                    results[rank] = pipe.recv()
        assert report.poll(10), "a rank did not exit after it had answered"
        exitcodes = report.recv()
    finally:
        if parent.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process_group, signal.SIGKILL)
        parent.join()
    return [dataclasses.replace(result, exitcode=exitcodes[rank]) for rank, result in enumerate(results)]


def run(size: int, fn: Callable, *args: Any, **options: Any) -> list[Any]:
    """As :func:`outcomes`, for functions that succeed everywhere: their values by rank."""
    results = outcomes(size, fn, *args, **options)
    for rank, result in enumerate(results):
        assert not result.error, f"rank {rank} of {size}:\n{result.error}"
        assert result.exitcode == 0, f"rank {rank} of {size} ended with {result.exitcode}"
    return [result.value for result in results]


def die() -> None:
    """Ends this process as a crash would: at once, without telling anybody."""
    os.kill(os.getpid(), signal.SIGKILL)
