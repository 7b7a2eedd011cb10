"""A rank of an MPI for benchmarks/collectives.py, which starts it with that MPI's own mpiexec and Python:

    mpiexec -n 2 python benchmarks/collectives_mpi.py ADDRESS NAME

Needs mpi4py and NumPy. Buffers go to the MPI through mpi4py's buffer interface, all-reduces in place as c10d's.
"""

from __future__ import annotations

import pathlib
import sys
import time
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.collectives_rank import Case, Cell, serve

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
left, right = (rank - 1) % size, (rank + 1) % size


def encode(value: float, dtype: str) -> Any:
    """The element as it lies in memory; NumPy has no bfloat16."""
    bits = np.float32(value)
    return bits if dtype == "float32" else np.uint16(bits.view(np.uint32) >> 16)


def make_case(variant: str, cell: Cell) -> Case | None:
    dtype = np.float32 if cell.dtype == "float32" else np.uint16
    mpi_type = MPI.FLOAT if cell.dtype == "float32" else getattr(MPI, "BFLOAT16_T", MPI.DATATYPE_NULL)
    if cell.op in ("all_reduce", "reduce_scatter") and mpi_type == MPI.DATATYPE_NULL:
        return None
    if mpi_type == MPI.DATATYPE_NULL:
        mpi_type = MPI.UINT16_T  # moved, not added
    numel = cell.numel(size)
    part = numel // size
    send = np.empty(part if cell.op == "all_gather" else numel, dtype)
    recv = send if cell.op == "all_reduce" else np.empty(part if cell.op == "reduce_scatter" else numel, dtype)
    send[:] = encode(rank % 4, cell.dtype)
    source, target = [send, send.size, mpi_type], [recv, recv.size, mpi_type]
    expected = np.empty_like(recv)
    if cell.op in ("all_reduce", "reduce_scatter"):
        expected[:] = encode(sum(r % 4 for r in range(size)), cell.dtype)
    elif cell.op == "sendrecv":
        expected[:] = encode(left % 4, cell.dtype)
    else:
        for r in range(size):
            expected[r * part : (r + 1) * part] = encode(r % 4, cell.dtype)

    def calls(on: Any, count: int | None) -> Any:
        """The operation on a communicator, over the buffers or over nothing."""
        to = target if count is None else [recv[:0], 0, mpi_type]
        of = source if count is None else [send[:0], 0, mpi_type]
        in_right, in_left = (right, left) if count is None else (MPI.PROC_NULL, MPI.PROC_NULL)
        if cell.op == "all_reduce":
            return lambda: on.Allreduce(MPI.IN_PLACE, to, MPI.SUM)
        if cell.op == "all_gather":
            share = [recv, part, mpi_type] if count is None else to
            return lambda: on.Allgather(of, share)
        if cell.op == "reduce_scatter":
            # Of the input, too, mpi4py wants the elements that one rank gets.
            share = [send, part, mpi_type] if count is None else of
            return lambda: on.Reduce_scatter_block(share, to, MPI.SUM)
        if cell.op == "all_to_all":
            share = [send, part, mpi_type] if count is None else of
            return lambda: on.Alltoall(share, [recv, part, mpi_type] if count is None else to)
        if cell.op == "sendrecv":
            return lambda: on.Sendrecv(of, in_right, 0, to, in_left, 0)
        return on.Barrier

    call, empty = calls(comm, None), calls(MPI.COMM_SELF, 0)

    def timed(function: Any, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            function()
        return time.perf_counter() - begin

    def native(count: int) -> float:
        # Less the binding's share: the same calls of nothing on a communicator of one.
        return max(timed(call, count) - timed(empty, count), 0.0)

    def check() -> bool:
        if cell.op == "barrier":
            return True
        send[:] = encode(rank % 4, cell.dtype)
        call()
        return bool((recv == expected).all())

    return Case(call, check, native)


def main() -> None:
    address, name = sys.argv[1:]
    with Client(address, "AF_UNIX") as pipe:
        pipe.send((name, rank))
        serve(pipe, comm.Barrier, make_case)


if __name__ == "__main__":
    main()
