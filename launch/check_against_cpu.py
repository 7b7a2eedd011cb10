"""The check that a new accelerator backend is put to first: the same job on ``cpu`` with Gloo and on ``neuron``,
compared rank by rank, in outputs, gradients and updated weights.

    python launch/check_against_cpu.py                              # 64 ranks, under trn run
    python launch/check_against_cpu.py --ranks 8 --launcher both    # under torchrun too
    python launch/check_against_cpu.py --ranks 8 --mode tp

Each worker gets 8 samples, so 64 of them have a global batch of 512. DDP, FSDP2 and tensor parallelism by DTensor train
a small model for three steps from the same weights. Both devices do the same arithmetic; only the order in which the
ranks' contributions are added differs, so figures must agree within the rounding of such sums. Outputs of the first
step under DDP and FSDP2, before any sum over ranks, must be equal to the bit.

This file is also what each rank runs. Exit codes: 0 when all agree, 1 otherwise, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MODES = ("ddp", "fsdp2", "tp")
LAUNCHERS = {
    "trn": [sys.executable, "-m", "trn_dist.cli", "run", "-n"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"],
}
SAMPLES = 8
WIDTH = 64
STEPS = 3


class Block(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, hidden)
        self.down = torch.nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host of a tensor, or of the shard that this rank holds of it."""
    return getattr(tensor, "_local_tensor", tensor).detach().cpu().clone()


def run_rank(mode: str, device: str, folder: Path) -> None:
    """What each rank does: trains, and leaves what it saw in a file."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "neuron":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "neuron")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(*(Block(4 * max(WIDTH, ranks)) for _ in range(2)))
    model = model.to(device)
    if mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif mode == "fsdp2":
        mesh = init_device_mesh(device, (ranks,))
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        # Gloo has no average.
        fully_shard(model, mesh=mesh).set_force_sum_reduction_for_comms(True)
    else:
        mesh = init_device_mesh(device, (ranks,))
        for layer in model:  # type: ignore[attr-defined]
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    # In tensor parallelism all ranks work on the same samples.
    draw = torch.Generator().manual_seed(1 if mode == "tp" else 1 + rank)
    seen: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        x = torch.randn(SAMPLES, WIDTH, generator=draw).to(device)
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        seen[f"step {step + 1}: output"] = whole(y)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            seen[f"step {step + 1}: gradient of {name}"] = whole(parameter.grad)
        optimizer.step()
    for name, parameter in model.named_parameters():
        seen[f"weight {name}"] = whole(parameter)
    torch.save(seen, folder / f"{device}-{rank}.pt")
    dist.destroy_process_group()


def tolerance(name: str, ranks: int) -> float:
    """How far a tensor may be off, in parts of its largest element.

    Two orders of a sum of one term a rank differ by at most a unit in the last place for each of its log2(ranks)
    levels. A layer's sums are over WIDTH such figures, and later steps start from weights that differ already.
    """
    units = (1 + math.log2(max(ranks, 2))) * torch.finfo(torch.float32).eps
    return units * math.sqrt(WIDTH) * (1 if name.startswith("step 1") else STEPS)


def compare(mode: str, ranks: int, folder: Path) -> list[str]:
    """Sentences about what differs by more than rounding."""
    problems, exact, largest, values = [], 0, 0.0, 0
    seen = [[torch.load(folder / f"{device}-{rank}.pt") for device in ("cpu", "neuron")] for rank in range(ranks)]
    # Of the whole tensor: a shard may be a single element that is nearly zero.
    scale: dict[str, float] = {}
    for cpu, _ in seen:
        for name, want in cpu.items():
            scale[name] = max(scale.get(name, 1e-6), float(want.abs().max()) if want.numel() else 0.0)
    for rank, (cpu, neuron) in enumerate(seen):
        if cpu.keys() != neuron.keys():
            problems.append(f"rank {rank}: not the same tensors: {sorted(cpu.keys() ^ neuron.keys())}")
            continue
        for name, want in cpu.items():
            got = neuron[name]
            values += 1
            exact += torch.equal(want, got)
            if want.shape != got.shape or not bool(got.isfinite().all()):
                problems.append(f"rank {rank}: {name}: {tuple(got.shape)} with values that are not finite or misshapen")
                continue
            if want.numel() == 0:
                continue
            off = float((want - got).abs().max()) / scale[name]
            largest = max(largest, off)
            # Nothing but local arithmetic has happened so far.
            allowed = 0.0 if name == "step 1: output" and mode != "tp" else tolerance(name, ranks)
            if off > allowed:
                problems.append(f"rank {rank}: {name}: off by {off:.1e}, allowed {allowed:.1e}")
    print(
        f"  {values} tensors of {ranks} ranks: {exact} equal to the bit, largest difference {largest:.1e}", flush=True
    )
    return problems


def check(mode: str, launcher: str, ranks: int, timeout_s: float) -> list[str]:
    """Runs one mode on both devices; sentences about what went wrong."""
    print(
        f"{mode} under {launcher}, {ranks} ranks, global batch {SAMPLES * (1 if mode == 'tp' else ranks)}", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        for device in ("cpu", "neuron"):
            command = [
                *LAUNCHERS[launcher],
                str(ranks),
                __file__,
                "--mode",
                mode,
                "--rank-of",
                device,
                "--folder",
                name,
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            if done.returncode:
                return [f"{device}: {launcher} ended with {done.returncode}:\n{done.stderr[-2000:]}"]
        return compare(mode, ranks, Path(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="default 64")
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--launcher", choices=[*LAUNCHERS, "both"], default="trn")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each run (default 600)")
    parser.add_argument("--rank-of", choices=["cpu", "neuron"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.mode, options.rank_of, options.folder)
        return
    if "LOCAL_RANK" in os.environ:
        parser.error("it starts the ranks itself, and was started as one: call it with python, without a launcher")
    if not 1 <= options.ranks <= 64:
        parser.error(f"--ranks {options.ranks}: must be 1 to 64, the cores of a node")
    problems = []
    for launcher in LAUNCHERS if options.launcher == "both" else [options.launcher]:
        for mode in MODES if options.mode == "all" else [options.mode]:
            problems += [
                f"{mode} under {launcher}: {text}" for text in check(mode, launcher, options.ranks, options.timeout_s)
            ]
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    print("cpu and neuron agree" if not problems else f"{len(problems)} differences", flush=True)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
