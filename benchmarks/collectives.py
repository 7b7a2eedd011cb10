"""Time of collectives over the neuron process group, beside Gloo in the same run.

    python benchmarks/collectives.py --ranks 2 --op all_reduce --sizes 4 64K 1M 32M --check

Columns as in nccom-test: the size of the whole buffer, elements, dtype, time (median over iterations of the slowest
rank), algorithm and bus bandwidth, for warm memory; "cold" is the first call on memory that was never touched. The last
column is Gloo's time over ours. Bus bandwidth follows nccl-tests: algbw x 2(n-1)/n for all_reduce, (n-1)/n for
all_gather, reduce_scatter and all_to_all, 1 otherwise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv", "barrier")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """ "64K" -> 65536, in bytes."""
    digits = text.rstrip("KMG")
    if not digits.isdigit() or text[len(digits) :] not in UNITS:
        raise argparse.ArgumentTypeError(f"a size is a number with K, M or G behind it or nothing, got {text!r}")
    return int(digits) * UNITS[text[len(digits) :]]


def bus_factor(op: str, size: int) -> float:
    if op == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def make_case(
    op: str, nbytes: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Callable[[], Any], Callable[[], bool], int]:
    """The call, a check of its result, and the elements of the whole buffer."""
    rank, size = group.rank(), group.size()
    numel = max(nbytes // dtype.itemsize, 1)
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        numel = max(numel // size, 1) * size
    part = numel // size

    def filled(n: int, value: float) -> torch.Tensor:
        return torch.full((n,), value, dtype=dtype, device=device)

    if op == "all_reduce":
        # AVG of equal values: the buffer can be reduced again and again without overflow.
        tensor = filled(numel, float(rank % 4))
        expected = sum(r % 4 for r in range(size)) / size

        def all_reduce() -> None:
            dist.all_reduce(tensor, group=group)

        def check() -> bool:
            tensor.fill_(float(rank % 4))
            all_reduce()
            return bool((tensor.float() == expected * size).all())

        return all_reduce, check, numel
    if op == "all_gather":
        output, source = filled(numel, -1), filled(part, float(rank))
        call = lambda: dist.all_gather_single(output, source, group=group)  # noqa: E731
        return call, lambda: all((output[r * part : (r + 1) * part] == r).all() for r in range(size)), numel
    if op == "reduce_scatter":
        output, source = filled(part, -1), filled(numel, float(rank))
        call = lambda: dist.reduce_scatter_single(output, source, group=group)  # noqa: E731
        return call, lambda: bool((output == size * (size - 1) / 2).all()), numel
    if op == "all_to_all":
        output, source = filled(numel, -1), filled(numel, float(rank))
        call = lambda: dist.all_to_all_single(output, source, group=group)  # noqa: E731
        return call, lambda: all((output[r * part : (r + 1) * part] == r).all() for r in range(size)), numel
    if op == "broadcast":
        tensor = filled(numel, float(rank))
        return lambda: dist.broadcast(tensor, 0, group=group), lambda: bool((tensor == 0).all()), numel
    if op == "sendrecv":
        output, source = filled(numel, -1), filled(numel, float(rank))
        left, right = (rank - 1) % size, (rank + 1) % size

        def exchange() -> None:
            ops = [
                dist.P2POp(dist.isend, source, group=group, group_peer=right),
                dist.P2POp(dist.irecv, output, group=group, group_peer=left),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return exchange, lambda: bool((output == left).all()), numel
    return lambda: dist.barrier(group=group), lambda: True, 0


def measure(call: Callable[[], Any], fence: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """First and median time in microseconds. All ranks do the same number of iterations; `fence` lines them up."""
    fence()
    begin = time.perf_counter()
    call()
    cold_us = (time.perf_counter() - begin) * 1e6
    begin = time.perf_counter()
    for _ in range(3):
        call()
    estimate = torch.tensor([(time.perf_counter() - begin) / 3])
    dist.all_reduce(estimate, dist.ReduceOp.MAX)
    iterations = max(5, min(2000, int(seconds / max(estimate.item(), 1e-7))))
    # Short calls are timed in batches: reading the clock would cost as much as they do.
    batch = max(1, min(50, int(20e-6 / max(estimate.item(), 1e-7))))
    times = []
    fence()
    for _ in range(max(iterations // batch, 5)):
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - begin) / batch * 1e6)
    return cold_us, statistics.median(times)


def rank_main(rank: int, port: int, options: argparse.Namespace, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.bind:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % (os.cpu_count() or 1)]})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("neuron", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=120))
    neuron = dist.distributed_c10d._get_default_group()
    groups = {"neuron": neuron, "neuron-cpu": neuron}
    if "gloo" in options.backends:
        groups["gloo"] = dist.new_group(backend="gloo")
    dtype = getattr(torch, options.dtype)
    for op in options.op:
        for nbytes in options.sizes if op != "barrier" else [0]:
            row = {}
            for backend in options.backends:
                device = torch.device(f"neuron:{rank}" if backend == "neuron" else "cpu")
                call, check, numel = make_case(op, nbytes, dtype, device, groups[backend])
                cold_us, warm_us = measure(call, dist.barrier, options.seconds)
                correct = bool(check()) if options.check else None
                slowest = torch.tensor([cold_us, warm_us, 0.0 if correct in (True, None) else 1.0])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                row[backend] = (numel, *slowest.tolist())
                del call, check
            if rank == 0:
                pipe.send((op, row))
    dist.destroy_process_group()
    if rank == 0:
        pipe.send(None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--op", nargs="+", choices=OPS, default=["all_reduce", "all_gather", "reduce_scatter"])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[4, 1 << 16, 1 << 20, 32 << 20])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=["neuron", "neuron-cpu", "gloo"],
        default=["neuron", "gloo"],
        help="neuron-cpu: the neuron group on CPU tensors",
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement")
    parser.add_argument(
        "--bind", action="store_true", help="bind each rank to a core, as MPI launchers do; for machines in use"
    )
    parser.add_argument("--check", action="store_true", help="compare each result with what it should be")
    options = parser.parse_args()

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(target=rank_main, args=(rank, server.port, options, theirs)) for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    theirs.close()
    print(f"# {options.ranks} ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    print(
        f"{'op':<15}{'size(B)':>12}{'count':>12}{'type':>10}{'backend':>12}{'cold(us)':>12}{'time(us)':>12}"
        f"{'algbw(GB/s)':>13}{'busbw(GB/s)':>13}{'gloo/ours':>11}{'check':>7}"
    )
    failed = False
    while True:
        try:
            message = ours.recv()
        except EOFError:
            failed = True
            break
        if message is None:
            break
        op, row = message
        for backend, (numel, cold_us, warm_us, wrong) in row.items():
            nbytes = numel * getattr(torch, options.dtype).itemsize
            algbw = nbytes / warm_us / 1e3
            ratio = f"{row['gloo'][2] / warm_us:.1f}" if "gloo" in row and backend != "gloo" else ""
            failed |= bool(wrong)
            verdict = ("FAIL" if wrong else "ok") if options.check else "-"
            print(
                f"{op:<15}{nbytes:>12}{numel:>12}{options.dtype:>10}{backend:>12}{cold_us:>12.1f}{warm_us:>12.2f}"
                f"{algbw:>13.2f}{algbw * bus_factor(op, options.ranks):>13.2f}{ratio:>11}{verdict:>7}",
                flush=True,
            )
    for process in processes:
        process.join(timeout=30)
        failed |= process.exitcode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
