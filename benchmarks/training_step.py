"""What a training step costs on ``neuron`` beside ``cpu``: TorchTitan's Llama 3 debug model, one rank, one thread.

    python benchmarks/training_step.py [--check] [--rounds 15] [--seq-len 256] [--batch 1]

Forward, loss, backward, clipping and AdamW in float32. The two devices take turns, step by step; each figure is the
median over the rounds, in milliseconds. Both losses are printed and must be equal to the bit. ``--check`` fails when
``neuron`` takes more than 1.05 times what ``cpu`` takes.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.model import Transformer

LIMIT = 1.05
WARM_UP = 3


def trainer(device: str, seq_len: int, batch: int) -> Callable[[], float]:
    """Takes one training step when called and returns its loss; the same weights and tokens on every device."""
    arguments = llama3_args["debugmodel"]
    torch.manual_seed(0)
    model = Transformer(arguments)
    model.init_weights()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(arguments.vocab_size, (batch, seq_len + 1)).to(device)

    def step() -> float:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when the limit is passed or the losses differ")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="sequences a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = {device: trainer(device, options.seq_len, options.batch) for device in ("cpu", "neuron")}
    times: dict[str, list[float]] = {device: [] for device in steps}
    losses: dict[str, float] = {}
    for number in range(WARM_UP + options.rounds):
        for device, step in steps.items():
            begin = time.perf_counter()
            losses[device] = step()
            if number >= WARM_UP:
                times[device].append((time.perf_counter() - begin) * 1e3)
    medians = {device: statistics.median(found) for device, found in times.items()}
    ratio = statistics.median(b / a for a, b in zip(times["cpu"], times["neuron"], strict=True))
    for device in steps:
        print(
            f"{device:<7} {medians[device]:8.2f} ms a step, loss after {WARM_UP + options.rounds}: {losses[device]!r}"
        )
    print(f"neuron over cpu, median of the rounds: {ratio:.3f} (limit {LIMIT})")
    return int(options.check and (ratio > LIMIT or losses["cpu"] != losses["neuron"]))


if __name__ == "__main__":
    sys.exit(main())
