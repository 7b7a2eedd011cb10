"""``trn doctor``: is this machine fit for trn_dist, and if not, what to do.

Looks at the compiler, the installed versions and the host's limits. Imports torch only to try the device, last.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from trn_dist.launcher.host import usable_memory_bytes

REQUIRED_TORCH = "2.13.0"
TORCHTITAN_RANGE = ((0, 2, 1), (0, 3))
"""At least the first, below the second."""

_GIB = 1 << 30
_RANK_MEMORY_BYTES = _GIB
"""Host memory that a rank of the Llama 3 debug recipe takes at most; most of it is shared between forked ranks."""

_DEVICE_TIMEOUT_S = 120


class Verdict(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # works, with limits
    ERROR = "error"  # something does not work


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, what to do about it."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def check_platform() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("platform", Verdict.ERROR, found, "use Linux, WSL2, or a Linux container on macOS")
    if platform.machine() not in ("x86_64", "aarch64"):
        return Finding("platform", Verdict.WARNING, found, "only x86_64 and aarch64 are tested")
    return Finding("platform", Verdict.OK, found)


def check_python() -> Finding:
    return Finding("Python", Verdict.OK, f"{platform.python_version()} in {sys.prefix}")


def check_headers() -> Finding:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Finding("Python headers", Verdict.ERROR, f"{header} is missing", f"install python{version}-dev")
    return Finding("Python headers", Verdict.OK, str(header.parent))


def check_compiler() -> Finding:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return Finding("C++ compiler", Verdict.ERROR, "neither c++ nor g++ is on PATH", "install g++ 11 or newer")
    probe = subprocess.run(
        [*compiler.split(), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"],
        input="#include <concepts>\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode:
        return Finding("C++ compiler", Verdict.ERROR, f"{compiler} does not compile C++20", "install g++ 11 or newer")
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, timeout=60, check=False)
    return Finding("C++ compiler", Verdict.OK, version.stdout.split("\n", 1)[0])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_torch() -> Finding:
    version = _version("torch")
    advice = f"pip install torch=={REQUIRED_TORCH}"
    if version is None:
        return Finding("torch", Verdict.ERROR, "not installed", advice)
    if version.split("+")[0] != REQUIRED_TORCH:
        return Finding("torch", Verdict.ERROR, f"{version}, built for {REQUIRED_TORCH}", advice)
    return Finding("torch", Verdict.OK, version)


def check_torchtitan() -> Finding:
    version = _version("torchtitan")
    low, high = (".".join(map(str, bound)) for bound in TORCHTITAN_RANGE)
    advice = f'pip install "torchtitan>={low},<{high}"'
    if version is None:
        return Finding("torchtitan", Verdict.ERROR, "not installed; `trn train` needs it", advice)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not TORCHTITAN_RANGE[0] <= numbers < TORCHTITAN_RANGE[1]:
        return Finding("torchtitan", Verdict.ERROR, f"{version}, needs at least {low} and below {high}", advice)
    return Finding("torchtitan", Verdict.OK, version)


def check_extension() -> Finding:
    """Whether the extension is built and the device works, tried in another process: a broken one may crash."""
    spec = importlib.util.find_spec("trn_dist._C")
    advice = "build it: pip install --no-build-isolation -e . (in the checkout), or `make build`"
    if spec is None or spec.origin is None:
        return Finding("device neuron", Verdict.ERROR, "the extension trn_dist._C is not built", advice)
    program = "import torch; print((torch.ones(2, device='neuron') + 1).cpu().tolist() == [2.0, 2.0])"
    try:
        trial = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_DEVICE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("device neuron", Verdict.ERROR, f"no answer within {_DEVICE_TIMEOUT_S} s", advice)
    if trial.returncode or trial.stdout.strip() != "True":
        # The first exception of a chain is the cause; without one, a signal or a wrong result.
        errors = [line for line in trial.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception): ", line)]
        cause = errors[0] if errors else f"exit code {trial.returncode}, output {trial.stdout.strip()!r}"
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            advice = "unset TORCH_DEVICE_BACKEND_AUTOLOAD, which keeps torch from loading the device"
        return Finding("device neuron", Verdict.ERROR, cause, advice)
    return Finding("device neuron", Verdict.OK, spec.origin)


def check_cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding(
            "host cores", Verdict.WARNING, f"{cores}", "works, but ranks wait for each other more than needed"
        )
    return Finding("host cores", Verdict.OK, f"{cores} usable of {os.cpu_count()}")


def check_memory() -> Finding:
    usable = usable_memory_bytes()
    found = f"{usable / _GIB:.1f} GiB usable"
    if usable < 8 * _RANK_MEMORY_BYTES:
        return Finding(
            "host memory", Verdict.WARNING, found, "8 ranks of the debug recipe may need up to 8 GiB; use fewer"
        )
    return Finding("host memory", Verdict.OK, found)


def check_shared_memory() -> Finding:
    """Device memory is a memfd, mapped large and touched little."""
    size = 24 * _GIB
    try:
        fd = os.memfd_create("trn_doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return Finding("shared memory", Verdict.ERROR, f"memfd_create: {error.strerror}", "use Linux 3.17 or newer")
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, b"x", size - 1)
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "")
        return Finding(
            "shared memory",
            Verdict.ERROR,
            f"a memfd of 24 GiB is refused: {error.strerror} ({reason})",
            "raise the limits on file size (ulimit -f) and address space (ulimit -v)",
        )
    finally:
        os.close(fd)
    return Finding("shared memory", Verdict.OK, "memfd of 24 GiB can be reserved")


def check_limits() -> Iterator[Finding]:
    wanted = {
        "open files": (resource.RLIMIT_NOFILE, 1024, "ulimit -n 1024"),
        "processes": (resource.RLIMIT_NPROC, 1024, "ulimit -u 1024"),
    }
    for name, (which, needed, command) in wanted.items():
        soft, hard = resource.getrlimit(which)
        found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} (hard limit {hard})"
        if soft != resource.RLIM_INFINITY and soft < needed:
            yield Finding(name, Verdict.WARNING, found, f"for 64 ranks and more: {command}")
        else:
            yield Finding(name, Verdict.OK, found)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        found = f"{address_space / _GIB:.0f} GiB"
        yield Finding("address space", Verdict.ERROR, found, "every rank maps 24 GiB of each peer: ulimit -v unlimited")


def check_temporary_folder() -> Finding:
    import tempfile

    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return Finding("temporary folder", Verdict.ERROR, str(error), "set TMPDIR to a folder that can be written")
    return Finding("temporary folder", Verdict.OK, folder)


def check_gpu() -> Finding | None:
    """A CUDA machine: TorchTitan takes CUDA before any other device."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    return Finding(
        "CUDA", Verdict.WARNING, "nvidia-smi is on PATH", 'TorchTitan prefers CUDA: set CUDA_VISIBLE_DEVICES=""'
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_platform,
    check_python,
    check_headers,
    check_compiler,
    check_torch,
    check_torchtitan,
    check_extension,
    check_cores,
    check_memory,
    check_shared_memory,
    check_temporary_folder,
)


def examine() -> list[Finding]:
    """Every finding, in the order of the report."""
    findings = [check() for check in CHECKS]
    findings += check_limits()
    gpu = check_gpu()
    return findings if gpu is None else [*findings, gpu]


def _print_table(findings: list[Finding]) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "looked at", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}
    for finding in findings:
        mark = rich.text.Text(finding.verdict.value, style=colours[finding.verdict])
        table.add_row(mark, finding.subject, finding.found, finding.advice)
    rich.console.Console().print(table)


@click.command(name="doctor", epilog="Exit codes: 0 when nothing is wrong (warnings allowed), 1 otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check this machine and the installation, and say what to do."""
    findings = examine()
    if as_json:
        rows = [dataclasses.asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_table(findings)
    errors = sum(finding.verdict is Verdict.ERROR for finding in findings)
    if errors:
        raise click.ClickException(f"{errors} of {len(findings)} checks failed")
