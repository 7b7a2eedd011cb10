"""Ranks that a program starts itself, by ``torch.multiprocessing``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.runs import write

PROGRAM = """
    import os, sys
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, size, address):
        dist.init_process_group("neuron", init_method=address, rank=rank, world_size=size)
        torch.accelerator.set_device_index(rank)
        x = torch.full((1000,), rank + 1.0, device="neuron")
        dist.all_reduce(x)
        os.write(1, f"rank {rank} of {size} on {x.device}: {x[-1].item()}\\n".encode())
        dist.destroy_process_group()
        if sys.argv[2] == "fails" and rank == 2:
            raise RuntimeError("rank 2 gives up")

    if __name__ == "__main__":
        torch.ones(1, device="neuron")  # the parent may use the device, too
        how, address = sys.argv[1], f"file://{os.getcwd()}/meeting"
        if how == "spawn":
            mp.spawn(train, args=(3, address), nprocs=3)
        else:
            processes = [mp.get_context("spawn").Process(target=train, args=(rank, 3, address)) for rank in range(3)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            sys.exit(max(process.exitcode for process in processes))
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    write(folder / "program.py", PROGRAM)
    command = [sys.executable, "program.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("how", ["spawn", "Process"])
def test_ranks_of_torch_multiprocessing(tmp_path: Path, how: str) -> None:
    done = run(tmp_path, how, "works")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3 on neuron:{rank}: 6.0" for rank in range(3)]


def test_spawn_shows_the_error_of_a_rank(tmp_path: Path) -> None:
    done = run(tmp_path, "spawn", "fails")
    assert done.returncode == 1
    assert "-- Process 2 terminated with the following error:" in done.stderr and "rank 2 gives up" in done.stderr
