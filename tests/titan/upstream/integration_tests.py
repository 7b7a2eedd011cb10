"""TorchTitan's own integration tests on the simulated device: each under torchrun, all of them, compared with a list.

    python tests/titan/upstream/integration_tests.py TORCHTITAN_CHECKOUT [--only NAME ...] [--work FOLDER]

The tests are those of ``tests/integration_tests/{features,models}.py`` of a source tree of TorchTitan 0.2.1 or 0.2.2
(the published packages have no tests), run by that tree's own ``run_single_test``: same commands, same
``run_train.sh``, passed when every command ends with 0. Three things differ. Each test is run, not only those before
the first failure. Sequences are shorter than the 2,048 tokens that upstream's GPUs take (``--seq-len``). And the text
``tests/assets/c4_test`` is a stand-in made of Python's standard library's source, because the real one is stored
outside the source tree in some copies.

The checkout is not written to: it is copied to the work folder, where logs and ``results.json`` are left too. A second
call with the same work folder keeps the results of tests that it does not run. ``expected_failures.toml`` beside this
file names what is known to fail, with the reason; the exit code is 0 when the failures of this call are exactly those.
"""

import argparse
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

SUITES = {"features": "build_features_test_list", "models": "build_model_tests_list"}
EXPECTED = Path(__file__).with_name("expected_failures.toml")


def copy_checkout(checkout: Path, work: Path, seq_len: int) -> Path:
    """A copy of the source tree in the work folder, with the stand-in text and shorter sequences."""
    tree = work / "torchtitan"
    if not tree.exists():
        ignored = shutil.ignore_patterns(".git", "__pycache__")
        shutil.copytree(checkout, tree, ignore=ignored, ignore_dangling_symlinks=True)
        write_stand_in_text(tree / "tests" / "assets" / "c4_test" / "data.json")
    base = (checkout / "tests/integration_tests/base_config.toml").read_text()
    base = re.sub(r"(?m)^seq_len = \d+", f"seq_len = {seq_len}", base)
    # The validation loop has a sequence length of its own, 2,048 by default.
    base = base.replace("[validation]\n", f"[validation]\nseq_len = {seq_len}\n")
    (tree / "tests/integration_tests/base_config.toml").write_text(base)
    return tree


def write_stand_in_text(file: Path, documents: int = 2000, characters: int = 2400) -> None:
    """JSON Lines of the size of upstream's test text: pieces of the standard library's source files."""
    from trn_dist.titan.corpus import python_standard_library

    file.parent.mkdir(parents=True, exist_ok=True)
    pieces: list[str] = []
    for document in python_standard_library().documents():
        pieces += [document[start : start + characters] for start in range(0, len(document), characters)]
        if len(pieces) >= documents:
            break
    lines = [json.dumps({"text": piece}) for piece in pieces[:documents]]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def environment(work: Path) -> dict[str, str]:
    """What the tests see: this interpreter's torchrun, one thread a rank, folders of the work folder, no network."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RUNNER_TEMP": str(work),  # where one test looks for the checkpoint of its first part
        "HF_HOME": str(work / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }


def prepare(checkout: Path, work: Path | None) -> tuple[Path, str]:
    """Makes the work folder (a new one for None) and sets the environment; returns it and TorchTitan's version."""
    folder = (work or Path(tempfile.mkdtemp(prefix="titan_upstream_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment(folder))
    return folder, re.search(r"\d+\.\d+\.\d+", (checkout / "assets/version.txt").read_text())[0]  # type: ignore[index]


def known_failures(table: str) -> dict[str, str]:
    """A table of expected_failures.toml."""
    return tomllib.loads(EXPECTED.read_text()).get(table, {})


class Runner:
    """Runs tests by upstream's code; stands in for the one function of it that starts a command."""

    def __init__(self, tree: Path, work: Path, timeout_s: float) -> None:
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        self.upstream = importlib.import_module("tests.integration_tests.run_tests")
        self.upstream._run_cmd = self.run_command
        self.upstream.logger.setLevel("WARNING")  # it repeats the commands, which stand in the tests' logs
        self.work = work
        self.output = work / "artifacts-to-be-uploaded"
        self.timeout_s = timeout_s

    def tests(self) -> dict[str, Any]:
        found = {}
        for suite, build in SUITES.items():
            module = importlib.import_module(f"tests.integration_tests.{suite}")
            found |= {test.test_name: test for test in getattr(module, build)() if not test.disabled}
        return found

    def run_command(self, command: str) -> Any:
        """One command of a test, its output in the test's log; ended with all it started when its time is over."""
        with self.log.open("a") as log:
            log.write(f"+ {command}\n")
            log.flush()
            process = subprocess.Popen(command, shell=True, stdout=log, stderr=log, start_new_session=True)
            try:
                returncode = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                self.reason = f"not done after {self.timeout_s:.0f} s"
                returncode = -signal.SIGKILL
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
                    try:
                        process.wait(30)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        return subprocess.CompletedProcess(command, returncode, stdout="")

    def run(self, test: Any) -> dict[str, Any]:
        shutil.rmtree(self.output / test.test_name, ignore_errors=True)
        (self.output / test.test_name).mkdir(parents=True)
        self.log = self.work / "logs" / f"{test.test_name}.log"
        self.log.parent.mkdir(exist_ok=True)
        self.log.unlink(missing_ok=True)
        self.reason = ""
        started = time.monotonic()
        try:
            self.upstream.run_single_test(
                dataclasses.replace(test), "./tests/integration_tests/base_config.toml", str(self.output)
            )
            passed = True
        except Exception:  # what upstream raises when a command failed
            passed = False
        seconds = round(time.monotonic() - started, 1)
        reason = "" if passed else self.reason or last_error(self.log.read_text(errors="replace"))
        return {"passed": passed, "seconds": seconds, "reason": reason}


def last_error(log: str) -> str:
    """The line of a log that says most about why a test failed."""
    errors = re.findall(r"(?m)^(?:\[rank\d+\]:|\[\S*\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception|Unsupported)\b.*)$", log)
    return errors[-1][:200] if errors else "no error line in the log"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="source tree of TorchTitan 0.2.1 or 0.2.2")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="tests to run; default: all")
    parser.add_argument("--work", type=Path, help="work folder; default: a new one in the temporary folder")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="of one command (default: %(default)s)")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    if not (checkout / "tests/integration_tests/features.py").exists():
        parser.error(f"{checkout}: no tests/integration_tests/features.py there; expected a source tree of TorchTitan")
    work, version = prepare(checkout, arguments.work)
    expected = known_failures(version)
    runner = Runner(copy_checkout(checkout, work, arguments.seq_len), work, arguments.timeout)
    tests = runner.tests()
    if unknown := set(arguments.only or ()) - set(tests):
        parser.error(f"no such test: {', '.join(sorted(unknown))}; there are {', '.join(tests)}")

    results_file = work / "results.json"
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    surprises = []
    for name in arguments.only or tests:
        results[name] = result = runner.run(tests[name])
        results_file.write_text(json.dumps(results, indent=1) + "\n")
        shutil.rmtree(runner.output / name, ignore_errors=True)  # checkpoints
        outcome = "passed" if result["passed"] else "FAILED"
        note = expected.get(name, "unexpected") if not result["passed"] else ""
        print(
            f"{outcome}  {result['seconds']:6.1f} s  {name}  {result['reason']}{f'  [{note}]' if note else ''}",
            flush=True,
        )
        if result["passed"] == (name in expected):
            surprises.append(name)
    passed = sum(result["passed"] for result in results.values())
    print(
        f"TorchTitan {version}: {passed} of {len(tests)} passed, {len(results) - passed} failed, "
        f"{len(tests) - len(results)} not run; logs in {work / 'logs'}"
    )
    for name in surprises:
        what = "passed, but is listed as failing" if results[name]["passed"] else "failed, and is not listed"
        print(f"unexpected: {name} {what} in {EXPECTED.name}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
