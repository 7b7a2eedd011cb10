"""What an operator costs on ``neuron`` beside ``cpu``: ten common ones on small tensors, one thread.

    python benchmarks/operators.py [--check]

Each figure is the best of several rounds, in microseconds, the two devices taking turns. ``--check`` fails when the
median of the differences is above 1.5 us or that of ``add`` above 2 us.
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

CALLS = 2000
ROUNDS = 15
MEDIAN_LIMIT_US = 1.5
ADD_LIMIT_US = 2.0


def operators(device: str) -> dict[str, Callable[[], object]]:
    small = torch.ones(16, device=device)
    square = torch.ones(16, 16, device=device)
    scale = torch.ones(16, device=device)
    indices = torch.tensor([3, 1, 2], device=device)
    target = torch.empty(16, device=device)
    return {
        "add": lambda: torch.add(small, small),
        "mul_": lambda: small.mul_(1.0),
        "mm": lambda: torch.mm(square, square),
        "layer_norm": lambda: F.layer_norm(square, (16,), scale, scale),
        "view": lambda: square.view(256),
        "cat": lambda: torch.cat((small, small)),
        "copy_": lambda: target.copy_(small),
        "sum": lambda: torch.sum(square),
        "index": lambda: square[indices],
        "softmax": lambda: torch.softmax(square, -1),
    }


def best_us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail when a limit is passed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    calls = {device: operators(device) for device in ("cpu", "neuron")}
    best: dict[str, dict[str, float]] = {device: {} for device in calls}
    for _ in range(ROUNDS):
        for name in calls["cpu"]:
            for device in calls:
                figure = best_us(calls[device][name])
                best[device][name] = min(figure, best[device].get(name, figure))
    print(f"{'operator':<12} {'cpu us':>8} {'neuron us':>10} {'difference':>11}")
    differences = {}
    for name in calls["cpu"]:
        differences[name] = best["neuron"][name] - best["cpu"][name]
        print(f"{name:<12} {best['cpu'][name]:>8.2f} {best['neuron'][name]:>10.2f} {differences[name]:>11.2f}")
    median = statistics.median(differences.values())
    print(f"{'median':<12} {'':>8} {'':>10} {median:>11.2f}")
    missed = median > MEDIAN_LIMIT_US or differences["add"] > ADD_LIMIT_US
    if options.check and missed:
        print(f"above the limits: median {MEDIAN_LIMIT_US} us, add {ADD_LIMIT_US} us")
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
