"""Tokens a second of one TorchTitan layout on the device, and of the same layout on CPU tensors over Gloo.

    python benchmarks/titan_layouts.py                                   # fsdp=2,tp=2,pp=2: eight ranks
    python benchmarks/titan_layouts.py --layout fsdp=8 --steps 20

Both train the Llama 3 debug model, same recipe, same trainer: the device under ``trn train``, the CPU by the
stand-alone reference of ``trn parity`` under torchrun. Prints host tokens/s of all ranks together, the median over
steps without the first two (warm-up), and the quotient. The runs follow each other, on a machine that should be idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from trn_dist.parity.layout import LayoutError, parse_layout
from trn_dist.parity.training import RunFailed, RunningTraining, plan_training
from trn_dist.shipped import shipped_folder

GLOBAL_BATCH = 8
WARM_UP_STEPS = 2


def measure(layout: str, steps: int, seq_len: int, folder: Path, stall_s: float) -> float:
    """Host tokens a second of a layout."""
    # The norm is summed as the CPU does it: the reference has no other way.
    overrides = ["--neuron.norm_accumulation", "float32", "--training.steps", str(steps)]
    overrides += ["--training.seq_len", str(seq_len)]
    recipe = shipped_folder("recipes") / "llama3_debug.toml"
    training = plan_training(recipe, overrides, parse_layout(layout), GLOBAL_BATCH)
    run = RunningTraining(training, folder, stall_s)
    try:
        while not run.poll():
            time.sleep(0.2)
    except BaseException:
        run.stop()
        raise
    return statistics.median(step.tokens_per_s for step in run.steps[WARM_UP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="fsdp=2,tp=2,pp=2", help="as in trn parity (default %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps a run (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens a sample (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each (default %(default)s)")
    parser.add_argument("--stall-s", type=float, default=300.0, help="end a run without a step for so long")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {options.steps}: expected more than the {WARM_UP_STEPS} steps of warm-up")
    rates: dict[str, list[float]] = {options.layout: [], f"{options.layout},gloo": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.repeat):
            for layout in rates:
                try:
                    cache = Path(folder, str(number))
                    cache.mkdir(exist_ok=True)
                    rates[layout].append(measure(layout, options.steps, options.seq_len, cache, options.stall_s))
                except (LayoutError, RunFailed) as error:
                    sys.exit(f"{layout}: {error}")
                print(f"{layout:<28} {rates[layout][-1]:10,.0f} tokens/s", flush=True)
    device, cpu = (statistics.median(values) for values in rates.values())
    print(f"device / CPU over Gloo: {device / cpu:.2f}")


if __name__ == "__main__":
    main()
