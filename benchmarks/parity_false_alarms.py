"""How often `trn parity` calls a correct layout different: other seeds, sizes and learning rates, float32.

    python benchmarks/parity_false_alarms.py --runs 200

Every comparison draws a seed, a sequence length, a batch, a learning rate and layouts from its own number, so a run
can be repeated with ``--first N --runs 1``. Prints a line for each verdict and at the end the false alarms; the exit
code is 1 if there is one. About 20 seconds a verdict on two idle cores.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from trn_dist.parity.comparison import compare
from trn_dist.parity.layout import parse_layouts
from trn_dist.parity.run_queue import RunQueue
from trn_dist.parity.training import default_cache

RECIPE = Path(__file__).parents[1] / "recipes" / "llama3_debug.toml"
LAYOUTS = ("ddp=2", "fsdp=2", "fsdp=4", "tp=2", "pp=2", "cp=2", "hsdp=2x2", "fsdp=2,tp=2", "fsdp=2,pp=2", "cpu")


def draw(number: int) -> tuple[str, list[str]]:
    """The layouts and overrides of one comparison."""
    chance = random.Random(number)
    layouts = "; ".join(["1", *chance.sample(LAYOUTS, 4)])
    overrides = {
        "debug.seed": chance.randrange(10**6),
        "training.seq_len": chance.choice([32, 64, 128]),
        "training.global_batch_size": chance.choice([8, 16]),
        "optimizer.lr": chance.choice([1e-4, 1e-3, 3e-3]),
    }
    return layouts, [word for key, value in overrides.items() for word in (f"--{key}", str(value))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="verdicts to make (default 200)")
    parser.add_argument("--first", type=int, default=0, help="number of the first comparison (default 0)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run (default 5)")
    options = parser.parse_args()
    verdicts = alarms = 0
    number = options.first
    while verdicts < options.runs:
        text, overrides = draw(number)
        queue = RunQueue(default_cache())
        comparison = compare(
            RECIPE, parse_layouts(text), overrides, queue=queue, steps=options.steps, clipping=(bool(number % 2),)
        )
        for verdict in comparison.verdicts:
            verdicts += 1
            alarms += not verdict.kind.passes
            ratio = "" if verdict.worst is None else f", ratio {verdict.worst.ratio:.2g}"
            print(f"{number}: {verdict.layout}: {verdict.kind.value}{ratio}: {verdict.reason}", flush=True)
        number += 1
    print(f"{alarms} false alarms in {verdicts} verdicts")
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
