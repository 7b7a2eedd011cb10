"""Time of collectives over the neuron process group beside Gloo and three MPIs, in one run.

    python benchmarks/collectives.py --setup            # once: a virtual environment for each MPI, in a cache folder
    python benchmarks/collectives.py --quick --check    # under five minutes
    python benchmarks/collectives.py --check            # everything: 2 to 16 ranks, 4 B to 256 MiB, two dtypes
    python benchmarks/collectives.py --ranks 2 --op all_reduce --sizes 4 64K 1M 32M --backends neuron gloo

Columns as in nccom-test: size of the whole buffer, elements, dtype, time, algorithm and bus bandwidth. The time is the
median over calls, of the slowest rank, with memory warm; "cold" is the first call, whose output was never touched. Bus
bandwidth follows nccl-tests: algbw x 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1
for sendrecv (a ring: each rank sends to the next and receives from the one before).

Every library has its own ranks, which sleep while another's are measured; a cell is measured in short rounds, library
by library, so that other load on the machine falls on all alike. Gloo is compared through Python. Up to 64 KiB the MPIs
are compared at the call itself: "c++" rows are loops inside the extension, and for an MPI calls through mpi4py less the
cost of the same call of no bytes on a communicator of one.

On two ranks each large cell has its floor beside it: the time in which the ranks' cores together read the inputs and
write the outputs once, the faster of a pass over memory outside and inside the arena, in the same rounds. The smallest
cells have torch's own share: the same call through Python of a group that does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from benchmarks.collectives_rank import OPS, Case, Cell, batch_of, serve

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
NATIVE_BYTES = 64 << 10  # up to this the MPIs are compared at the call below Python
PATIENCE_S = 120.0
RANK_SCRIPT = pathlib.Path(__file__).parent / "collectives_mpi.py"


@dataclasses.dataclass(frozen=True)
class Mpi:
    """An MPI that pip installs, and what its launcher needs to run more ranks than cores on one machine."""

    package: str
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


MPIS = {
    "mpich": Mpi("mpich"),
    "openmpi": Mpi(
        "openmpi",
        ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
    ),
    "impi": Mpi("impi-rt", environment=(("I_MPI_FABRICS", "shm"), ("I_MPI_PIN", "0"), ("I_MPI_THREAD_YIELD", "2"))),
}
TORCH_BACKENDS = ("neuron", "neuron-cpu", "gloo")
FLOORS = ("floor", "floor-arena")
IDLE = "torch-alone"  # a process group that does nothing


def parse_size(text: str) -> int:
    """ "64K" -> 65536, in bytes."""
    digits = text.rstrip("KMG")
    if not digits.isdigit() or text[len(digits) :] not in UNITS:
        raise argparse.ArgumentTypeError(f"a size is a number with K, M or G behind it or nothing, got {text!r}")
    return int(digits) * UNITS[text[len(digits) :]]


def bus_factor(op: str, ranks: int) -> float:
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


# ---- Ranks of torch -------------------------------------------------------------------------------------------------


def make_torch_case(cell: Cell, device: torch.device, group: dist.ProcessGroup) -> Case:
    from trn_dist import _C

    rank, size = group.rank(), group.size()
    left, right = (rank - 1) % size, (rank + 1) % size
    dtype = getattr(torch, cell.dtype)
    numel = cell.numel(size)
    part = numel // size
    send = torch.full((part if cell.op == "all_gather" else numel,), float(rank % 4), dtype=dtype, device=device)
    recv = send
    if cell.op != "all_reduce":  # never touched
        recv = torch.empty(part if cell.op == "reduce_scatter" else numel, dtype=dtype, device=device)

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, send, group=group, group_peer=right),
            dist.P2POp(dist.irecv, recv, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    call = {
        "all_reduce": lambda: dist.all_reduce(send, group=group),
        "all_gather": lambda: dist.all_gather_single(recv, send, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(recv, send, group=group),
        "all_to_all": lambda: dist.all_to_all_single(recv, send, group=group),
        "sendrecv": exchange,
        "barrier": lambda: dist.barrier(group=group),
    }[cell.op]

    def check() -> bool:
        send.fill_(float(rank % 4))
        call()
        if cell.op in ("all_reduce", "reduce_scatter"):
            return bool((recv == sum(r % 4 for r in range(size))).all())
        if cell.op == "sendrecv":
            return bool((recv == left % 4).all())
        return cell.op == "barrier" or all(bool((recv[r * part : (r + 1) * part] == r % 4).all()) for r in range(size))

    backend = group._get_backend(device)
    if not isinstance(backend, _C.ProcessGroupNeuron):
        return Case(call, check)
    return Case(call, check, lambda count: _C._time_calls(backend, cell.op, recv, send, count))


def moved_bytes(cell: Cell, ranks: int) -> int:
    """Bytes of all inputs and all outputs together: what must be read and written."""
    halves = 2 * ranks
    if cell.op in ("all_gather", "reduce_scatter"):  # one side is as large as the whole buffer, on each rank
        halves = ranks + 1
    return halves * cell.numel(ranks) * getattr(torch, cell.dtype).itemsize


def make_floor(cell: Cell, ranks: int, device: torch.device) -> Case:
    """This rank's share of the bytes, half of them read and half written."""
    buffer = torch.zeros(moved_bytes(cell, ranks) // (2 * ranks) // 4, dtype=torch.float32, device=device)
    return Case(lambda: buffer.mul_(2.0), lambda: True)


def torch_main(rank: int, ranks: int, port: int, backends: list[str], address: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    neuron_device = torch.device("neuron", rank)
    dist.init_process_group(
        "neuron",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE_S),
        # Spares barrier() the search for a device. Groups of other backends could not be made beside it.
        device_id=None if "gloo" in backends or IDLE in backends else neuron_device,
    )
    default = dist.distributed_c10d._get_default_group()
    groups = {"neuron": default, "neuron-cpu": default}
    if "gloo" in backends:
        groups["gloo"] = dist.new_group(backend="gloo")
    if IDLE in backends:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
        groups[IDLE] = dist.new_group(backend="fake")

    def make_case(variant: str, cell: Cell) -> Case:
        torch.neuron.empty_cache()  # type: ignore[attr-defined]
        if variant in FLOORS:
            return make_floor(cell, ranks, neuron_device if variant == "floor-arena" else torch.device("cpu"))
        return make_torch_case(cell, neuron_device if variant == "neuron" else torch.device("cpu"), groups[variant])

    with Client(address, "AF_UNIX") as pipe:
        pipe.send(("torch", rank))
        serve(pipe, dist.barrier, make_case)
    dist.destroy_process_group()


# ---- The driver's side ----------------------------------------------------------------------------------------------


def last_words(errors: pathlib.Path) -> str:
    """How the ranks' stderr ends."""
    lines = [line.rstrip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return "".join(f"\n#   {line}" for line in lines[-12:])


class Job:
    """The ranks of one library, as the driver sees them."""

    def __init__(
        self, name: str, pipes: list[Connection], processes: list[Any], errors: pathlib.Path | None = None
    ) -> None:
        self.name = name
        self.pipes = pipes
        self.processes = processes
        self.errors = errors  # what the ranks wrote to stderr

    def ask(self, *order: Any) -> list[Any]:
        """Gives all ranks one order and returns their answers, by rank. Raises when one is late or gone."""
        for pipe in self.pipes:
            pipe.send(order)
        waiting = dict.fromkeys(self.pipes)
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"no answer to {order} within {PATIENCE_S:.0f} s")
            for answered in ready:
                assert isinstance(answered, Connection)
                answers[answered] = answered.recv()
                del waiting[answered]
        return [answers[pipe] for pipe in self.pipes]

    def last_words(self) -> str:
        """How the stderr of ranks that failed ends, once their launcher has; empty where they wrote nothing."""
        if self.errors is None:
            return ""
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        return last_words(self.errors)

    def stop(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(("stop",))
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15) if isinstance(process, subprocess.Popen) else process.join(15)
            process.kill()


class Address:
    """A socket in a folder that only this user can enter."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="trn-collectives-")
        self.path = os.path.join(self.folder, "driver")
        self.listener = Listener(self.path, "AF_UNIX", backlog=256)

    def accept(self, name: str, ranks: int, processes: list[Any], errors: pathlib.Path | None = None) -> Job:
        self.listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
        pipes: dict[int, Connection] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(pipes) < ranks:
            with contextlib.suppress(TimeoutError):
                pipe = self.listener.accept()
                _, rank = pipe.recv()
                pipes[rank] = pipe
            exited = [p for p in processes if (p.poll() if isinstance(p, subprocess.Popen) else p.exitcode) is not None]
            if exited or time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                how = "ended" if exited else f"did not come within {PATIENCE_S:.0f} s"
                said = "" if errors is None else last_words(errors)
                raise TimeoutError(f"{ranks - len(pipes)} of {ranks} ranks {how}{said}")
        return Job(name, [pipes[rank] for rank in range(ranks)], processes, errors)

    def close(self) -> None:
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_torch(address: Address, ranks: int, backends: list[str]) -> Job:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=torch_main, args=(rank, ranks, server.port, backends, address.path), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    job = address.accept("torch", ranks, processes)
    job.server = server  # type: ignore[attr-defined]
    return job


def start_mpi(address: Address, name: str, ranks: int, cache: pathlib.Path) -> Job:
    mpi = MPIS[name]
    bin_folder = cache / name / "bin"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment.update(mpi.environment)
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    command = [str(bin_folder / "mpiexec"), *mpi.options, "-n", str(ranks)]
    errors = pathlib.Path(address.folder, f"{name}-{ranks}.stderr")
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*command, str(bin_folder / "python"), str(RANK_SCRIPT), address.path, name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    return address.accept(name, ranks, [process], errors)


def set_up(cache: pathlib.Path) -> int:
    """A virtual environment for each MPI: they share names of libraries and cannot live in one."""
    for name, mpi in MPIS.items():
        folder = cache / name
        print(f"{name}: {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        packages = [mpi.package, "mpi4py", "numpy"]
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", *packages], check=True)
    return 0


@dataclasses.dataclass
class Row:
    cell: Cell
    ranks: int
    backend: str
    cold_us: float = 0.0
    python_us: float = 0.0
    native_us: float | None = None
    correct: bool | None = None

    def print(self) -> None:
        numel = self.cell.numel(self.ranks)
        nbytes = numel * getattr(torch, self.cell.dtype).itemsize
        verdict = "-" if self.correct is None else "ok" if self.correct else "FAIL"
        for call, time_us in (("python", self.python_us), ("c++", self.native_us)):
            if time_us is None:
                continue
            algbw = nbytes / max(time_us, 1e-3) / 1e3
            cold = f"{self.cold_us:.1f}" if call == "python" else ""
            print(
                f"{self.cell.op:<15}{self.ranks:>5} {self.backend:<12}{call:<7}{nbytes:>11}{numel:>11}"
                f"{self.cell.dtype:>10}{cold:>12}{time_us:>13.2f}{algbw:>12.2f}"
                f"{algbw * bus_factor(self.cell.op, self.ranks):>12.2f}{verdict:>7}",
                flush=True,
            )


HEADER = (
    f"{'op':<15}{'ranks':>5} {'backend':<12}{'call':<7}{'size(B)':>11}{'count':>11}{'type':>10}{'cold(us)':>12}"
    f"{'time:p50(us)':>13}{'algbw(GB/s)':>12}{'busbw(GB/s)':>12}{'check':>7}"
)


def available_bytes() -> int:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30


def measure_cell(
    cell: Cell, ranks: int, peers: dict[str, Job], options: argparse.Namespace, notes: list[str]
) -> list[Row]:
    """All libraries over one cell, in turns. A library that fails is taken out of `peers`."""
    if not peers:
        return []  # all were lost
    rows: dict[str, Row] = {}
    # For each library the buffers, and half as much again for what it keeps beside them.
    buffers = {"all_reduce": 1, "all_gather": 1 + 1 / ranks, "reduce_scatter": 1 + 1 / ranks}.get(cell.op, 2)
    need = int(1.5 * buffers * ranks * cell.nbytes)
    room = int(0.7 * available_bytes())
    if need > room:
        notes.append(f"skipped {cell.op} of {cell.nbytes} bytes on {ranks} ranks: needs {need >> 20} MiB of memory")
        return []
    plans: dict[str, tuple[int, int, bool]] = {}
    samples: dict[tuple[str, bool], list[list[float]]] = {}

    def lose(name: str, error: Exception) -> None:
        """Takes out a library that failed, with all that its ranks measure."""
        job = peers[name]
        why = job.last_words() or repr(error)
        notes.append(f"left out {name} on {ranks} ranks from {cell.op} of {cell.nbytes} bytes on: {why}")
        for other in [other for other, owner in peers.items() if owner is job]:
            del peers[other]
            rows.pop(other, None)
            plans.pop(other, None)
        for process in job.processes:
            process.kill()

    together = need * len(peers) <= room  # otherwise one library after the other
    for names in [list(peers)] if together else [[name] for name in peers]:
        for name in names:
            if name not in peers:
                continue
            try:
                made = peers[name].ask("make", name, cell)
                if any(answer is None for answer in made):
                    notes.append(f"skipped {name}: has no {cell.op} of {cell.dtype}")
                    continue
                estimate_us = max(answer[1] for answer in made)
                native = made[0][2] and cell.nbytes <= NATIVE_BYTES
                batch = batch_of(estimate_us)
                iterations = int(options.seconds * 1e6 / options.rounds / (estimate_us * batch))
                plans[name] = (max(3, min(iterations, 200)), batch, native)
                rows[name] = Row(cell, ranks, name, cold_us=max(answer[0] for answer in made))
            except (OSError, EOFError, TimeoutError) as error:
                lose(name, error)
        for turn in range(options.rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order:
                for native in (False, True):
                    if name not in plans or (native and not plans[name][2]):
                        continue
                    iterations, batch, _ = plans[name]
                    try:
                        times = peers[name].ask("round", name, iterations, batch, native)
                    except (OSError, EOFError, TimeoutError) as error:
                        lose(name, error)
                        continue
                    kept = samples.setdefault((name, native), [[] for _ in range(ranks)])
                    for own, new in zip(kept, times, strict=True):
                        own.extend(new)
        for name in list(plans):
            try:
                if options.check and name not in (*FLOORS, IDLE):
                    rows[name].correct = all(peers[name].ask("check", name))
                peers[name].ask("drop", name)
            except (OSError, EOFError, TimeoutError) as error:
                lose(name, error)
        for (name, native), by_rank in samples.items():
            if name in rows:
                slowest = max(statistics.median(times) for times in by_rank)
                setattr(rows[name], "native_us" if native else "python_us", slowest)
    return list(rows.values())


def cells_of(options: argparse.Namespace) -> Iterator[tuple[int, list[Cell]]]:
    for ranks in options.ranks:
        yield (
            ranks,
            [
                Cell(op, nbytes, dtype)
                for op in options.op
                for dtype in (options.dtype if op != "barrier" else ["float32"])
                for nbytes in (options.sizes if op != "barrier" else [0])
            ],
        )
    for ranks in options.barrier_ranks:
        yield ranks, [Cell("barrier", 0, "float32"), Cell("all_reduce", 8, "float32")]


# ---- Summary --------------------------------------------------------------------------------------------------------


def summarize(rows: list[Row]) -> None:
    cells: dict[tuple[int, Cell], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.ranks, row.cell), {})[row.backend] = row

    def ratios(peer: str, keep: Any) -> list[float]:
        """The peer's time over ours, in the cells that `keep` wants."""
        found = []
        for (ranks, cell), by_backend in cells.items():
            ours, theirs = by_backend.get("neuron"), by_backend.get(peer)
            if ours is None or theirs is None or not keep(ranks, cell):
                continue
            if ours.native_us is not None and theirs.native_us is not None:
                found.append(theirs.native_us / ours.native_us)
            else:
                found.append(theirs.python_us / ours.python_us)
        return found

    def best_mpi_ratios(keep: Any) -> list[float]:
        per_peer = []
        for key, by_backend in cells.items():
            present = [name for name in MPIS if name in by_backend]
            if "neuron" in by_backend and present and keep(*key):
                per_peer.append(min(ratios(name, lambda *other, key=key: other == key)[0] for name in present))
        return per_peer

    def line(text: str, values: list[float], target: float) -> None:
        if values:
            print(
                f"{text:<58}{statistics.median(values):>8.2f} x at the median of {len(values):>3} cells "
                f"(worst {min(values):.2f} x, faster in {sum(value > 1 for value in values)}; target {target:g} x)"
            )

    print("\n# summary: the other's time over ours, on neuron tensors")
    for peer in ("gloo", *MPIS):
        line(f"{peer}, all cells", ratios(peer, lambda ranks, cell: True), 1)
    large = lambda ranks, cell: cell.nbytes >= 1 << 20  # noqa: E731
    line("gloo, from 1 MiB", ratios("gloo", large), 8)
    line("the best MPI of each cell, from 1 MiB", best_mpi_ratios(large), 1)
    for op in OPS:
        only = lambda ranks, cell, op=op: cell.op == op and cell.nbytes >= 1 << 20  # noqa: E731
        line(f"  {op}: gloo, from 1 MiB", ratios("gloo", only), 8)
        line(f"  {op}: the best MPI, from 1 MiB", best_mpi_ratios(only), 1)
    line("gloo, 4 bytes on 2 ranks", ratios("gloo", lambda ranks, cell: cell.nbytes <= 8 and ranks == 2), 20)
    for (ranks, cell), by_backend in cells.items():
        if IDLE in by_backend and "neuron" in by_backend:
            ours_us, idle_us = by_backend["neuron"].python_us, by_backend[IDLE].python_us
            print(
                f"{cell.op} of {cell.nbytes} bytes on {ranks} ranks through Python: {ours_us:.1f} us; torch alone, "
                f"with a group that does nothing: {idle_us:.1f} us"
            )
    for (ranks, cell), by_backend in cells.items():
        floors = [by_backend[name].python_us for name in FLOORS if name in by_backend]
        if floors and "neuron" in by_backend:
            ours_us, floor_us = by_backend["neuron"].python_us, min(floors)
            target = "; target 1.3 x" if cell.op == "all_reduce" else ""
            gloo = by_backend.get("gloo")
            limit = f"; gloo takes {gloo.python_us / floor_us:.1f} x" if gloo is not None else ""
            print(
                f"{cell.op} of {cell.nbytes >> 20} MiB {cell.dtype} on {ranks} ranks: {ours_us / floor_us:.2f} x the "
                f"floor of {floor_us:.0f} us ({moved_bytes(cell, ranks) / floor_us / 1e3:.1f} GB/s read and written"
                f"{target}{limit})"
            )
    for (ranks, cell), by_backend in cells.items():
        if "neuron" in by_backend and cell.nbytes <= 8 and cell.op in ("barrier", "all_reduce") and ranks >= 16:
            ours_us = by_backend["neuron"].python_us
            print(
                f"{cell.op} of {cell.nbytes} bytes, {ranks} ranks on {os.cpu_count()} cores, through Python: "
                f"{ours_us:.0f} us, {ours_us / ranks:.1f} us a rank (target: barrier below 15)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [4, 256, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 32 << 20, 256 << 20]
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS[:-1]))
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=sizes, help="of the whole buffer: 4 64K 1M")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=[*TORCH_BACKENDS, *MPIS],
        default=[*TORCH_BACKENDS, *MPIS],
        help="neuron-cpu: the neuron group on CPU tensors",
    )
    parser.add_argument("--barrier-ranks", nargs="*", type=int, default=[16, 64], help="ranks of the 8-byte barriers")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each library and cell")
    parser.add_argument("--rounds", type=int, default=5, help="turns into which these are cut")
    parser.add_argument("--check", action="store_true", help="compare each result with what it should be")
    parser.add_argument("--quick", action="store_true", help="2 and 4 ranks, four sizes, float32: minutes, not an hour")
    parser.add_argument("--setup", action="store_true", help="make the MPIs' environments in the cache folder and stop")
    default_cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "trn_dist" / "mpi"
    parser.add_argument("--cache", type=pathlib.Path, default=default_cache, help="default: %(default)s")
    options = parser.parse_args()
    if options.setup:
        return set_up(options.cache)
    if options.quick:
        options.ranks, options.dtype, options.rounds, options.seconds = [2, 4], ["float32"], 3, 0.15
        options.sizes = [4, 64 << 10, 1 << 20, 32 << 20]

    notes: list[str] = []
    for name in [name for name in options.backends if name in MPIS]:
        if not (options.cache / name / "bin" / "mpiexec").exists():
            notes.append(f"skipped {name}: no environment in {options.cache / name}; --setup makes it")
            options.backends.remove(name)
    if not options.backends:
        parser.error("; ".join(notes))
    print(f"# {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the start")
    print(HEADER, flush=True)
    rows: list[Row] = []
    address = Address()
    try:
        for ranks, cells in cells_of(options):
            barrier_only = cells[0].op == "barrier"
            backends = ["neuron"] if barrier_only else options.backends
            peers: dict[str, Job] = {}
            try:
                torch_backends = [name for name in backends if name in TORCH_BACKENDS]
                if torch_backends:
                    job = start_torch(address, ranks, [*torch_backends, IDLE] if ranks == 2 else torch_backends)
                    peers.update(dict.fromkeys(torch_backends, job))
                for name in backends:
                    if name in MPIS:
                        try:
                            peers[name] = start_mpi(address, name, ranks, options.cache)
                        except TimeoutError as error:
                            notes.append(f"skipped {name} on {ranks} ranks: {error}")
                for cell in cells:
                    present = dict(peers)
                    if cell.op != "barrier" and "neuron" in peers and ranks == 2:
                        if cell.nbytes >= 1 << 20:
                            present.update(dict.fromkeys(FLOORS, peers["neuron"]))
                        elif cell.nbytes <= 8:
                            present[IDLE] = peers["neuron"]
                    new = measure_cell(cell, ranks, present, options, notes)
                    peers = {name: job for name, job in peers.items() if name in present}
                    for row in new:
                        row.print()
                    rows += new
            finally:
                for job in dict.fromkeys(peers.values()):
                    job.stop()
    finally:
        address.close()
    summarize(rows)
    for note in dict.fromkeys(notes):
        print(f"# {note}")
    return int(any(row.correct is False for row in rows) or any(note.startswith("left out neuron") for note in notes))


if __name__ == "__main__":
    sys.exit(main())
