"""PyTorch's own tests of ``torch.distributed`` (``distributed_test.py`` in the wheel) on the process group ``neuron``.

``python -m tests.conformance.distributed_suite --world-size N [NAME ...]`` runs them and prints what came of each.
``test_distributed.py`` runs it as a process of its own for each number of ranks, from which the ranks of each test are
forked: it has imported torch and the suite and has never touched the device.

The suite knows NCCL and CUDA by name. Its source is read from the wheel and ported word by word, as somebody who
brings it to another device would do by hand: `_PORT` has every change. What it skips because NCCL cannot do it (CPU
tensors, any source, sends and receives one by one) runs here.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import types
import unittest
from typing import Any

# Pattern and replacement, in this order. Names of tests and of parameters keep their "cuda" and "nccl".
_PORT = (
    # The device and its module.
    (r"\bfrom torch\.cuda\.amp import", "from torch.amp import"),
    (r"\b(autocast|GradScaler)\(\)", r'\1("neuron")'),
    (r"(?<!import )\btorch\.cuda\.", "torch.neuron."),
    (r"\.cuda\(", ".neuron("),
    (r'"cuda"', '"neuron"'),
    (r'"cuda:', '"neuron:'),
    (r"\bProfilerActivity\.CUDA\b", "ProfilerActivity.PrivateUse1"),
    (r"\bDeviceType\.CUDA\b", "DeviceType.PrivateUse1"),
    (r"^    TEST_CUDA,$", ""),
    (r"\bTEST_CUDA\b", "True"),
    # The backend. `BACKEND == "nccl"` in an if asks for a device; in a decorator it skips what NCCL lacks, and
    # `BACKEND != "gloo"` what only Gloo has.
    (r'^(\s+)if BACKEND == "nccl"', r'\1if BACKEND == "neuron"'),
    (r'BACKEND == "nccl"|BACKEND != "(gloo|mpi)"(?! and)', "False"),
    (r'require_backend_is_available\(\{"gloo"\}\)', 'require_backend_is_available({"neuron"})'),
    # Its own barrier over files is to outlast a busy machine.
    (r"def sync\(cls, wait_for=None, timeout=10\)", "def sync(cls, wait_for=None, timeout=120)"),
    # Tests of subgroups want eight ranks; what they do needs three.
    (r'int\(os\.environ\["WORLD_SIZE"\]\) < 8', 'int(os.environ["WORLD_SIZE"]) < 3'),
    (r'"nccl"', '"neuron"'),
    (r"\bBackend\.NCCL\b", "Backend.NEURON"),
    (r"\bis_nccl_available\(\)", "is_available()"),
    (r"\btorch\.neuron\.nccl\.version\(\)", "(2, 99)"),
    # The two modules use each other.
    (r"\btorch\.testing\._internal\.common_distributed\b", "tests.conformance._common_distributed"),
)
_DEADLINE_S = 300  # of a test of the suite
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def _ported(name: str, as_name: str) -> types.ModuleType:
    """The wheel's module `name`, ported, as the module `as_name`."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    for pattern, replacement in _PORT:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    module = types.ModuleType(as_name)
    module.__file__ = spec.origin
    sys.modules[as_name] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def load(world_size: int) -> type[unittest.TestCase]:
    """The suite for `world_size` ranks. Once a process: the suite reads the number when it is imported."""
    os.environ.update(BACKEND="neuron", WORLD_SIZE=str(world_size), DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(_DEADLINE_S))
    common = _ported("torch.testing._internal.common_distributed", "tests.conformance._common_distributed")
    for feature in ("gpu", "neuron", "ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add("neuron")
    for backends in common.DistTestCases.skip_collective.values():
        backends.discard("neuron")
    suite = _ported("torch.testing._internal.distributed.distributed_test", "tests.conformance._distributed_test")

    import torch

    class DistributedSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return DistributedSuite


def _run(suite: type[unittest.TestCase], name: str) -> tuple[str, str]:
    """Runs one test and tells passed, failed or skipped, and why."""
    result = unittest.TestResult()
    suite(name).run(result)
    for _, text in (*result.failures, *result.errors):
        return FAILED, text
    for _, reason in result.skipped:
        return SKIPPED, reason
    return PASSED, ""


def _serve(world_size: int) -> None:
    """Reads names of tests, one a line, and answers each with a line of JSON. The first line has all names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    suite = load(world_size)
    print(json.dumps(unittest.TestLoader().getTestCaseNames(suite)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(suite, line.strip())), file=answers, flush=True)


class Server:
    """A process that runs the suite's tests on `world_size` ranks, one after the other."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.distributed_suite", "--serve", "--world-size", str(world_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the suite's process ended with {self._process.wait()}"
        return json.loads(line)

    def run(self, name: str) -> tuple[str, str]:
        """Passed, failed or skipped, and why. The suite has a deadline for each of its tests."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        outcome, why = self._answer()
        return outcome, why

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.distributed_suite", description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("name", nargs="*", help="tests (default: all)")
    options = parser.parse_args()
    if options.serve:
        _serve(options.world_size)
        return 0
    server = Server(options.world_size)
    counts: collections.Counter[str] = collections.Counter()
    begin = time.time()
    for name in options.name or server.names:
        started = time.time()
        outcome, why = server.run(name)
        counts[outcome] += 1
        print(f"{outcome} {name} ({time.time() - started:.1f} s) {why}", flush=True)
    server.close()
    print(f"{dict(counts)} on {options.world_size} ranks; {time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
