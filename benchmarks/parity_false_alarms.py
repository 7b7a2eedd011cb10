"""How often `trn parity` calls a correct layout different: other seeds, sizes, learning rates and dtypes.

    python benchmarks/parity_false_alarms.py --runs 200

Every comparison draws a seed, a sequence length, a batch, a learning rate, a dtype (float32, or bfloat16 mixed
precision) and layouts from its own number, and judges a Llama of two layers. Verdicts are appended to a file as they
are made; when it is called again it goes on with the next comparison, and `--total` only counts. Prints a line for
each verdict and at the end the false alarms; the exit code is 1 if there is one. About 3 seconds of CPU a verdict.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from trn_dist.parity.comparison import ComparisonFailed, compare
from trn_dist.parity.layout import parse_layouts
from trn_dist.parity.run_queue import RunQueue
from trn_dist.parity.training import default_cache

RECIPE = Path(__file__).parents[1] / "recipes" / "llama3_debug.toml"
LAYOUTS = (
    *("ddp=2", "ddp=4", "fsdp=2", "fsdp=4", "tp=2", "pp=2", "cp=2", "hsdp=2x2", "fsdp=2,tp=2", "fsdp=2,pp=2"),
    *("fsdp=2,microbatch=1", "ddp=2,microbatch=2", "1,microbatch=2", "cpu"),
)
TINY = ("--experimental.custom_import", "benchmarks.tiny_llama", "--model.flavor", "tiny")


def draw(number: int) -> tuple[str, dict[str, Any]]:
    """The layouts and overrides of one comparison."""
    chance = random.Random(number)
    layouts = "; ".join(["1", *chance.sample(LAYOUTS, 5)])
    return layouts, {
        "debug.seed": chance.randrange(10**6),
        "training.seq_len": chance.choice([16, 32, 64, 128]),
        "training.global_batch_size": chance.choice([8, 16]),
        "optimizer.lr": chance.choice([1e-4, 1e-3, 3e-3]),
        "training.mixed_precision_param": chance.choice(["float32", "bfloat16"]),
        "neuron.shuffle_block": 64,
    }


def judge(number: int, steps: int, cache: Path) -> list[dict[str, Any]]:
    """The verdicts of one comparison."""
    text, overrides = draw(number)
    words = [*TINY, *(word for key, value in overrides.items() for word in (f"--{key}", str(value)))]
    queue = RunQueue(cache, stall_s=600, quiet=True)
    clipping = (bool(number % 2),)
    comparison = compare(RECIPE, parse_layouts(text), words, queue=queue, steps=steps, clipping=clipping)
    return [
        {
            "number": number,
            "layout": verdict.layout,
            "dtype": overrides["training.mixed_precision_param"],
            "clipped": verdict.clipped,
            "passes": verdict.kind.passes,
            "verdict": verdict.kind.value,
            "ratio": None if verdict.worst is None else verdict.worst.ratio,
            "reason": verdict.reason,
        }
        for verdict in comparison.verdicts
    ]


def summarise(lines: list[dict[str, Any]]) -> int:
    """Prints the counts and returns the number of false alarms."""
    for dtype in ("float32", "bfloat16"):
        own = [line for line in lines if line["dtype"] == dtype]
        kinds = collections.Counter(line["verdict"] for line in own)
        ratios = sorted(line["ratio"] for line in own if line["ratio"] is not None)
        middle = (
            f"; ratio to the bound: median {ratios[len(ratios) // 2]:.2g}, largest {ratios[-1]:.2g}" if ratios else ""
        )
        print(f"{dtype}: {len(own)} verdicts: {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))}{middle}")
    alarms = sum(not line["passes"] for line in lines)
    print(f"{alarms} false alarms in {len(lines)} verdicts")
    return alarms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="verdicts in all (default 200)")
    parser.add_argument("--number", type=int, help="make this one comparison anew, and nothing else")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default 4)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no comparison after so long")
    parser.add_argument("--total", action="store_true", help="only count what was made before")
    parser.add_argument("--results", type=Path, default=default_cache() / "false_alarms.jsonl", help="verdicts so far")
    options = parser.parse_args()
    # The small model is a module of this folder's, which the ranks import too.
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if options.number is not None:
        sys.exit(summarise(judge(options.number, options.steps, default_cache())) > 0)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    old = options.results.read_text(encoding="utf-8") if options.results.exists() else ""
    lines = [json.loads(line) for line in old.splitlines()]
    number = max((line["number"] for line in lines), default=-1) + 1
    started = time.monotonic()
    while len(lines) < options.runs and not options.total and time.monotonic() - started < options.minutes * 60:
        try:
            found = judge(number, options.steps, default_cache())
        except ComparisonFailed as error:
            sys.exit(f"comparison {number} could not be made: {error}")
        with options.results.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in found)
        for line in found:
            ratio = "" if line["ratio"] is None else f", ratio {line['ratio']:.2g}"
            print(f"{number}: {line['layout']} {line['dtype']}: {line['verdict']}{ratio}: {line['reason']}", flush=True)
        lines += found
        number += 1
    sys.exit(summarise(lines) > 0)


if __name__ == "__main__":
    main()
