"""TorchTitan's own unit tests with the simulated device present: each file by itself, compared with a list.

    python tests/titan/upstream/unit_tests.py TORCHTITAN_CHECKOUT [--only FILE ...] [--work FOLDER]

The tests are ``tests/unit_tests`` of a source tree of TorchTitan 0.2.1 or 0.2.2 (the published packages have none). As
in integration_tests.py, a copy of it is run, with a stand-in text and no network. What is known to fail stands in
``expected_failures.toml`` with its reason; the exit code is 0 when exactly that fails.
"""

import argparse
import fnmatch
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.titan.upstream.integration_tests import EXPECTED, copy_checkout, known_failures, prepare


def run(tree: Path, file: Path, report: Path, timeout_s: float) -> dict[str, str]:
    """What became of each test of a file: "passed", "skipped", or why it failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
    with report.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, cwd=tree, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {f"{file.name}::*": f"not done after {timeout_s:.0f} s"}
    if not report.exists():
        return {f"{file.name}::*": f"pytest ended with {process.returncode} and wrote no report"}
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        scopes = case.get("classname", "").split(".")
        name = "::".join([file.name, *scopes[scopes.index(file.stem) + 1 :], case.get("name", "")])
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        if failure is not None:
            outcomes[name] = (failure.get("message") or "no message").splitlines()[0][:200]
        else:
            outcomes[name] = "skipped" if case.find("skipped") is not None else "passed"
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="source tree of TorchTitan 0.2.1 or 0.2.2")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="files to run, as test_loss.py; default: all")
    parser.add_argument("--work", type=Path, help="work folder; default: a new one in the temporary folder")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="of one file (default: %(default)s)")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    files = sorted((checkout / "tests/unit_tests").glob("test_*.py"))
    if not files:
        parser.error(f"{checkout}: no tests/unit_tests/test_*.py there; expected a source tree of TorchTitan")
    if unknown := set(arguments.only or ()) - {file.name for file in files}:
        known = ", ".join(file.name for file in files)
        parser.error(f"no such file: {', '.join(sorted(unknown))}; there are {known}")
    work, version = prepare(checkout, arguments.work)
    (work / "unit_tests").mkdir(exist_ok=True)
    expected = known_failures(f"{version} unit tests")
    tree = copy_checkout(checkout, work, seq_len=128)

    totals: Counter[str] = Counter()
    surprises = []
    for file in files:
        if arguments.only and file.name not in arguments.only:
            continue
        outcomes = run(
            tree, tree / "tests/unit_tests" / file.name, work / "unit_tests" / f"{file.stem}.xml", arguments.timeout
        )
        failed = {name: why for name, why in outcomes.items() if why not in ("passed", "skipped")}
        counts = Counter("failed" if name in failed else outcome for name, outcome in outcomes.items())
        totals += counts
        print(
            f"{file.name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), flush=True
        )
        for name, why in failed.items():
            reason = next((reason for pattern, reason in expected.items() if fnmatch.fnmatchcase(name, pattern)), None)
            print(f"  failed: {name}: {why}  [{reason or 'unexpected'}]", flush=True)
            if reason is None:
                surprises.append(f"{name} failed, and is not listed")
        surprises += [
            f"{pattern} passed, but is listed as failing"
            for pattern in expected
            if pattern.startswith(f"{file.name}::") and not any(fnmatch.fnmatchcase(name, pattern) for name in failed)
        ]
    print(f"TorchTitan {version}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(totals.items())))
    for surprise in surprises:
        print(f"unexpected: {surprise} in {EXPECTED.name}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
