"""What a rank of benchmarks/collectives.py does, whatever library it measures: it waits for the driver's orders, so
that only one library runs at a time. Imports nothing but the standard library: the ranks of an MPI have no torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv", "barrier")
WARM_UP_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective over one set of buffers."""

    call: Callable[[], Any]
    check: Callable[[], bool]  # refills the buffers, calls once, compares
    # Seconds that n calls in a row take below Python; None where only `call` is measured.
    native: Callable[[int], float] | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the table. nbytes is the size of the whole buffer, as in nccl-tests."""

    op: str
    nbytes: int
    dtype: str  # float32 or bfloat16

    def numel(self, ranks: int) -> int:
        """Elements of the whole buffer: the ranks divide it where the operation cuts it."""
        numel = max(self.nbytes // (4 if self.dtype == "float32" else 2), 1)
        if self.op in ("all_gather", "reduce_scatter", "all_to_all"):
            numel = max(numel // ranks, 1) * ranks
        return 0 if self.op == "barrier" else numel


def batch_of(estimate_us: float) -> int:
    """Short calls are timed in batches: reading the clock would cost as much as they do."""
    return max(1, min(200, int(100 / max(estimate_us, 0.1))))


def serve(pipe: Connection, fence: Callable[[], Any], make_case: Callable[[str, Cell], Case | None]) -> None:
    """Carries out the driver's orders until it says stop.

    fence: lines this library's ranks up. make_case(variant, cell): None when the library has no such operation.
    """
    cases: dict[str, Case] = {}
    while True:
        order, *arguments = pipe.recv()
        if order == "stop":
            return
        variant = arguments[0]
        if order == "make":
            cell = arguments[1]
            # What a library sets up at an operation's first call is not the memory's first touch.
            warm_up = make_case(variant, dataclasses.replace(cell, nbytes=min(WARM_UP_BYTES, cell.nbytes)))
            if warm_up is None:
                pipe.send(None)
                continue
            fence()
            warm_up.call()
            warm_up = None
            case = make_case(variant, cell)
            assert case is not None
            cases[variant] = case
            fence()
            begin = time.perf_counter()
            case.call()
            cold_us = (time.perf_counter() - begin) * 1e6
            begin = time.perf_counter()
            case.call()
            estimate_us = (time.perf_counter() - begin) * 1e6
            pipe.send((cold_us, estimate_us, case.native is not None))
        elif order == "round":
            iterations, batch, native = arguments[1:]
            case = cases[variant]
            times_us = []
            fence()
            for _ in range(iterations):
                if native:
                    assert case.native is not None
                    times_us.append(case.native(batch) / batch * 1e6)
                    continue
                begin = time.perf_counter()
                for _ in range(batch):
                    case.call()
                times_us.append((time.perf_counter() - begin) / batch * 1e6)
            pipe.send(times_us)
        elif order == "check":
            fence()
            pipe.send(cases[variant].check())
        elif order == "drop":
            del cases[variant]
            pipe.send(None)
