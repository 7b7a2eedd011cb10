"""How long it takes to start ranks, run one all-reduce and stop, under ``trn run`` and under torchrun.

    python benchmarks/startup.py                       # 64 ranks under trn run, 16 under torchrun
    python benchmarks/startup.py --ranks 256 --memory  # an UltraServer, with the memory of all its processes
    python benchmarks/startup.py --ranks 8 --torchrun-ranks 8 --device cpu --backend gloo

Prints a line for each: wall time from the command to its end, and the CPU time of all its processes. --memory adds a
run in which the ranks wait after the all-reduce, and prints the sum of what all processes of the run hold (proportional
set size: shared pages count once). The ranks run this file too. torchrun starts an interpreter a rank, and each imports
torch: about 1.2 s of CPU a rank.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path


def run_rank(device: str, backend: str, hold: bool) -> None:
    """What each rank does; with ``hold`` it stays until its standard input ends."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    value = torch.full((1,), float(rank), device=device)
    dist.all_reduce(value)
    expected = world_size * (world_size - 1) / 2
    if value.item() != expected:
        raise RuntimeError(f"rank {rank}: the sum of 0 to {world_size - 1} is {expected}, got {value.item()}")
    if hold:
        dist.barrier()
        if rank == 0:
            print("up", flush=True)
        sys.stdin.read()
    dist.destroy_process_group()


def measure_memory(command: list[str], timeout_s: float) -> float:
    """GiB that the processes of a run hold together when all ranks have reduced."""
    marker = f"STARTUP_BENCHMARK={os.getpid()}"
    name, _, value = marker.partition("=")
    run = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, name: value}
    )
    assert run.stdout is not None
    if not run.stdout.readline():
        sys.exit(f"{' '.join(command)} ended with {run.wait(timeout_s)}")
    total_kib = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes().split(b"\0"):
                fields = (entry / "smaps_rollup").read_text().split("Pss:", 1)[1].split()
                total_kib += int(fields[0])
        except OSError:
            continue
    run.communicate("", timeout=timeout_s)
    return total_kib / (1 << 20)


def measure(command: list[str], timeout_s: float) -> tuple[float, float]:
    """Wall and CPU seconds of a command that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    wall_s = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="ranks under trn run (default 64)")
    parser.add_argument("--torchrun-ranks", type=int, default=16, help="ranks under torchrun, 0 for none (default 16)")
    parser.add_argument("--device", default="neuron", help="device of the tensor (default neuron)")
    parser.add_argument("--backend", default="neuron", help="process group (default neuron)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of trn run, of which the median counts (default 3)")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for each command (default 300)")
    parser.add_argument("--memory", action="store_true", help="also print the memory of the ranks under trn run")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.device, options.backend, options.hold)
        return

    program = [__file__, "--device", options.device, "--backend", options.backend]
    print(f"start, one all-reduce ({options.backend}), stop, on {len(os.sched_getaffinity(0))} cores")
    nodes = str(-(-options.ranks // 64))
    launcher = [sys.executable, "-m", "trn_dist.cli", "run", "-n", str(options.ranks), "--nodes", nodes]
    times = sorted(measure([*launcher, *program], options.timeout_s) for _ in range(options.repeat))
    wall_s, cpu_s = times[len(times) // 2]
    spread = f"{times[0][0]:.2f} to {times[-1][0]:.2f} s in {options.repeat} runs"
    print(f"trn run   {options.ranks:4d} ranks  {wall_s:6.2f} s wall  {cpu_s:6.2f} s CPU  ({spread})")
    if options.memory:
        held = measure_memory([*launcher, *program, "--hold"], options.timeout_s)
        print(f"trn run   {options.ranks:4d} ranks  {held:6.2f} GiB held by all processes together")
    if options.torchrun_ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.torchrun_ranks)]
        wall_s, cpu_s = measure([*launcher, *program], options.timeout_s)
        print(f"torchrun  {options.torchrun_ranks:4d} ranks  {wall_s:6.2f} s wall  {cpu_s:6.2f} s CPU")


if __name__ == "__main__":
    main()
