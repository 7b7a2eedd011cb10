"""For the tests of programs that run on several ranks: a decorator that runs a test on all of them.

    from trn_dist.testing import ranks

    @ranks(8)
    def test_sum():
        x = torch.ones(1, device="neuron")
        dist.all_reduce(x)
        assert x.item() == 8

The ranks are processes that stay from test to test, forked from one that has imported torch, so that a test takes a
fraction of a second. Each test has a process group of its own, and generators seeded anew. After a test that failed the
ranks are replaced. Fixtures and parameters reach the ranks by pickle; a test's module is imported there as Python
imports it, so that a failed ``assert`` shows its line and not its values.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, TypeVar

DEADLINE_S = 60.0
_START_S = 120.0  # importing torch on a busy machine
_GRACE_S = 1.0  # between the first failure and the end of the others, which may tell more

_PRELOAD = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "trn_dist.testing")

Test = TypeVar("Test", bound=Callable[..., None])


class RankFailed(AssertionError):
    """A test failed on a rank: its traceback, and what became of the others."""


@dataclasses.dataclass(frozen=True)
class _Job:
    module: str
    qualified_name: str
    file: str
    path: list[str]  # sys.path
    folder: str
    arguments: bytes  # pickled
    number: int
    port: int
    backend: str


@dataclasses.dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: str = ""  # its last line
    text: str = ""  # the traceback
    skipped: str | None = None


def ranks(number: int, *, backend: str = "neuron", deadline_s: float = DEADLINE_S) -> Callable[[Test], Test]:
    """Run the decorated test on ``number`` ranks at once, in a process group of them all.

    On each rank ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are set, and ``neuron:LOCAL_RANK`` is
    the current device. The test fails when it fails on a rank, when a rank dies, or when it is not over after
    ``deadline_s`` seconds; it is skipped when a rank skips it.

    Args:
        number: of ranks, at most the logical cores of the simulated node.
        backend: of the process group; "" makes none.
        deadline_s: seconds for the test alone, without the start of the ranks.
    """
    if number < 1:
        raise ValueError(f"ranks({number}): a test needs at least 1 rank")

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test):
            raise TypeError(f"{test.__qualname__}: a test on ranks is a plain function")

        @functools.wraps(test)
        def on_ranks(*arguments: Any, **named: Any) -> None:
            run_on_ranks(test, number, *arguments, backend=backend, deadline_s=deadline_s, **named)

        return on_ranks  # type: ignore[return-value]

    return decorate


def run_on_ranks(
    function: Callable[..., Any],
    number: int,
    *arguments: Any,
    backend: str = "neuron",
    deadline_s: float = DEADLINE_S,
    **named: Any,
) -> list[Any]:
    """Call a function of a module on ``number`` ranks, as :func:`ranks` does; returns what each rank returned.

    Raises:
        RankFailed: it failed on a rank.
        TypeError: the function or its arguments cannot be sent to another process.
    """
    __tracebackhide__ = True
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is defined inside a function, so that no other process can find it")
    try:
        pickled = pickle.dumps((arguments, named))
    except Exception as error:
        raise TypeError(f"an argument of {function.__qualname__} cannot be sent to the ranks: {error}") from None
    return _Pool.of(number).run(function, pickled, backend, deadline_s)


class _Pool:
    """Ranks that wait for tests."""

    _pools: ClassVar[dict[int, _Pool]] = {}

    @classmethod
    def of(cls, number: int) -> _Pool:
        """The pool of so many ranks. Others are ended: the host's memory is small."""
        if number not in cls._pools:
            cls.end_all()
            cls._pools[number] = cls(number)
        return cls._pools[number]

    @classmethod
    def end_all(cls) -> None:
        for pool in cls._pools.values():
            pool.end()
        cls._pools.clear()

    def __init__(self, number: int) -> None:
        from torch.distributed import TCPStore

        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(variable, "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        self.number, self.tests = number, 0
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, number, theirs), daemon=True, name=f"rank{rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(_START_S):
                self.end()
                raise RuntimeError(f"rank {rank} of {number} did not start within {_START_S:g} s")
            pipe.recv()

    def run(self, function: Callable[..., Any], arguments: bytes, backend: str, deadline_s: float) -> list[Any]:
        __tracebackhide__ = True
        self.tests += 1
        job = _Job(
            module=function.__module__,
            qualified_name=function.__qualname__,
            file=inspect.getsourcefile(function) or "",
            path=list(sys.path),
            folder=os.getcwd(),
            arguments=arguments,
            number=self.tests,
            port=self.store.port,
            backend=backend,
        )
        answers: dict[int, _Answer] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(job)
            except OSError:
                answers[rank] = _Answer(error=f"had died before the test: {self._exit(rank)}")
        until = time.monotonic() + deadline_s
        first: int | None = None
        while len(answers) < self.number:
            missing = [rank for rank in range(self.number) if rank not in answers]
            ready = wait([self.pipes[rank] for rank in missing], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in missing if self.pipes[rank] in ready]:
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = _Answer(error=self._exit(rank))
                if (answers[rank].error or answers[rank].skipped is not None) and first is None:
                    first = rank
                    until = min(until, time.monotonic() + _GRACE_S)
        for answer in answers.values():
            if answer.skipped is not None:
                self._replace()
                import pytest

                pytest.skip(answer.skipped)
        if len(answers) == self.number and not any(answer.error for answer in answers.values()):
            return [answers[rank].value for rank in range(self.number)]
        self._replace()
        raise RankFailed(self._describe(answers, first, deadline_s))

    def _describe(self, answers: dict[int, _Answer], first: int | None, deadline_s: float) -> str:
        # A rank that died is to blame, not its peers, which notice.
        dead = [rank for rank, answer in sorted(answers.items()) if answer.error and not answer.text]
        blamed = dead[0] if dead else first
        if blamed is None:
            late = [rank for rank in range(self.number) if rank not in answers]
            return f"not over after {deadline_s:g} s on rank {', '.join(map(str, late))} of {self.number}"
        lines = [f"rank {blamed} of {self.number}: {answers[blamed].error}", answers[blamed].text.rstrip()]
        for rank in range(self.number):
            if rank != blamed:
                answer = answers.get(rank)
                fate = "not over, ended" if answer is None else answer.error or "passed"
                lines.append(f"rank {rank}: {fate}")
        return "\n".join(line for line in lines if line)

    def _exit(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"left with exit code {code}"

    def _replace(self) -> None:
        self.end()
        _Pool._pools.pop(self.number, None)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


atexit.register(_Pool.end_all)


# --- In the ranks


def _serve(rank: int, number: int, pipe: Connection) -> None:
    from trn_dist.launcher import processes

    processes.die_with_parent(os.getppid())
    import torch

    torch.set_num_threads(1)
    size = str(number)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_carry_out(rank, number, job))


def _carry_out(rank: int, number: int, job: _Job) -> _Answer:
    import torch.distributed as dist

    try:
        function = _find(job)
        arguments, named = pickle.loads(job.arguments)
        _prepare(rank, number, job)
        value = function(*arguments, **named)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return _Answer(value=value)
    except BaseException as error:
        if type(error).__name__ == "Skipped":
            return _Answer(skipped=str(error))
        # Without the frames of this module.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
        return _Answer(error=traceback.format_exception_only(error)[-1].strip(), text="".join(lines))


def _find(job: _Job) -> Callable[..., Any]:
    """The function itself, below this module's decorator."""
    sys.path[:] = job.path
    os.chdir(job.folder)
    try:
        module = importlib.import_module(job.module)
    except ModuleNotFoundError:  # pytest imports tests by their files too
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[job.module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = module
    for name in job.qualified_name.split("."):
        found = getattr(found, name)
    return inspect.unwrap(found)


def _prepare(rank: int, number: int, job: _Job) -> None:
    import random

    import numpy
    import torch
    import torch.distributed as dist

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    if "neuron" in job.backend:
        torch.accelerator.set_device_index(rank)
    if job.backend:
        store = dist.PrefixStore(f"test{job.number}", _store(job.port))
        dist.init_process_group(job.backend, store=store, rank=rank, world_size=number)


@functools.cache
def _store(port: int) -> Any:
    """This rank's connection to the store. One for all tests: now and then torch needs 5 s to make one."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False)
