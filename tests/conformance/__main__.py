"""The conformance sweep: ``python -m tests.conformance [--dtype DTYPE] [--most N] [NAME ...]`` prints its totals.

Operators run in a worker process that is started anew when one crashes, so that a crash is a result like any other.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import subprocess
import sys
import time
from typing import Any

SECONDS_AN_OPERATOR = 300


def work() -> None:
    """Reads operator, dtype and number of samples, a JSON list a line, and writes a line for each comparison."""
    import torch

    from tests.conformance.comparison import compare
    from tests.conformance.operators import OPERATORS
    from trn_dist.neuron.random import use_cpu_rng

    torch.set_num_threads(1)
    use_cpu_rng(True)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, dtype, most = json.loads(line)
        result = compare(OPERATORS[name], getattr(torch, dtype), most)
        mismatches = [(m.check, m.sample, m.what) for m in result.mismatches]
        print(json.dumps({"checks": sorted(result.checks), "mismatches": mismatches}), file=results, flush=True)


class Worker:
    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance", "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def run(self, *request: Any) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], SECONDS_AN_OPERATOR)
            if ready and (line := process.stdout.readline()):
                return json.loads(line)
            died = bool(ready)
        except BrokenPipeError:
            died = True
        process.kill()
        status = process.wait()
        self._start()
        what = f"the process died (status {status})" if died else f"no result after {SECONDS_AN_OPERATOR} s"
        return {"checks": ["forward"], "mismatches": [("forward", -1, what)]}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help="one dtype only, such as float32 (default: all that the operator has)")
    parser.add_argument("--most", type=int, help="samples of each operator (default: all)")
    parser.add_argument("--output", help="file for the mismatches, a JSON object a line")
    parser.add_argument("name", nargs="*", help="operators (default: all)")
    options = parser.parse_args()
    if options.worker:
        work()
        return 0

    from tests.conformance.expected_failures import EXPECTED_FAILURES, key_of
    from tests.conformance.operators import OPERATORS, dtypes_of

    unknown = set(options.name) - set(OPERATORS)
    if unknown:
        parser.error(f"no such operator: {', '.join(sorted(unknown))}")
    worker = Worker()
    passed: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    pairs = failed_pairs = 0
    unexpected = []
    output = open(options.output, "w") if options.output else None  # noqa: SIM115
    begin = time.time()
    for name in options.name or OPERATORS:
        for dtype in dtypes_of(OPERATORS[name]):
            dtype_name = str(dtype).removeprefix("torch.")
            if options.dtype not in (None, dtype_name):
                continue
            result = worker.run(name, dtype_name, options.most)
            failed = {check for check, _, _ in result["mismatches"]}
            pairs += bool(result["checks"])
            failed_pairs += bool(failed)
            for check in result["checks"]:
                total[check] += 1
                passed[check] += check not in failed
            for check, sample, what in result["mismatches"]:
                if output:
                    record = {"operator": name, "dtype": dtype_name, "check": check, "sample": sample, "what": what}
                    print(json.dumps(record), file=output, flush=True)
            for check in sorted(failed):
                if key_of(name, dtype_name, check) not in EXPECTED_FAILURES:
                    what = next(what for c, _, what in result["mismatches"] if c == check)
                    unexpected.append(f"{name} {dtype_name} {check}: {what}")
                    print(unexpected[-1], flush=True)
    worker.close()
    print(f"\n{'check':<10} {'equal':>7} {'of':>7}")
    for check in total:
        print(f"{check:<10} {passed[check]:>7} {total[check]:>7}")
    share = 100 * (1 - failed_pairs / pairs) if pairs else 100.0
    print(f"operator and dtype: {pairs - failed_pairs} of {pairs} equal bit for bit ({share:.2f} %)")
    print(f"{len(unexpected)} failures not listed as expected; {time.time() - begin:.0f} s")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
