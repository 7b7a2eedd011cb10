"""What test_hosts.py starts under torchrun: names no host and no device index, as a user's program."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.c10d.test_training import make_model
from tests.c10d.test_training import train as train_model


def train(rank: int, size: int) -> dict[str, torch.Tensor]:
    """DDP and FSDP2 for a few steps, and one collective of each kind; what a rank holds at the end, on the CPU."""
    device = torch.device(f"neuron:{rank}")
    torch.accelerator.set_device_index(rank)
    found = {}
    replica = make_model(device)
    train_model(DistributedDataParallel(replica, bucket_cap_mb=0.005), rank, device)
    sharded = make_model(device)
    for layer in (sharded[0], sharded[2], sharded[4]):
        fully_shard(layer)
    fully_shard(sharded)
    train_model(sharded, rank, device)
    for i, (whole, shard) in enumerate(zip(replica.parameters(), sharded.parameters(), strict=True)):
        found[f"ddp{i}"] = whole.detach().cpu()
        found[f"fsdp{i}"] = shard.to_local().detach().cpu()
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(200_000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        summed = values.to(device)
        dist.all_reduce(summed)
        found[f"all_reduce {dtype}"] = summed.cpu()
        part = torch.zeros(200_000 // size, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, values.to(device), op=dist.ReduceOp.AVG)
        found[f"reduce_scatter {dtype}"] = part.cpu()
        exchanged = torch.zeros_like(summed)
        dist.all_to_all_single(exchanged, values.to(device))
        found[f"all_to_all {dtype}"] = exchanged.cpu()
    return found


def forever(folder: Path, rank: int) -> None:
    x = torch.ones(100_000, device=f"neuron:{rank}")
    dist.all_reduce(x)
    (folder / f"running{rank}").touch()
    while True:
        dist.all_reduce(x, dist.ReduceOp.AVG)


def dies_once(folder: Path, rank: int) -> None:
    x = torch.full((100_000,), float(rank), device=f"neuron:{rank}")
    dist.all_reduce(x)
    if rank == 3 and not (folder / "died").exists():  # the agents' counts of restarts differ
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    group = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(torch.ones(10, device=f"neuron:{rank}"), group=group)
    (folder / f"sum{rank}").write_text(str(x[-1].item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("neuron")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(sys.argv[2])
    if sys.argv[1] == "forever":
        forever(folder, rank)
    if sys.argv[1] == "dies_once":
        dies_once(folder, rank)
        sys.exit()
    torch.save(train(rank, size), folder / f"rank{rank}.pt")
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    dist.destroy_process_group()
