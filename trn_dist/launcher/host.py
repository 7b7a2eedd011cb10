"""What this machine can give to a run. Reads ``/proc`` and the control group; called by ``plan`` and by commands."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_TASK_FILES = (("pids.max", "pids.current"), ("pids/pids.max", "pids/pids.current"))
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def memory_bytes(proc: Path = Path("/proc")) -> dict[str, int]:
    """This machine's memory in bytes, by the kernel's names, such as ``MemTotal``."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}


def usable_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new processes can have: what the kernel calls available, or less where a container allows less."""
    available = memory_bytes(proc)["MemAvailable"]
    left = _left_in_group(groups)
    return available if left is None else min(available, left)


def usable_tasks(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """How many more processes and threads can be started, and what sets the limit."""
    system = int((proc / "sys/kernel/threads-max").read_text())
    tasks = int((proc / "loadavg").read_text().split()[3].split("/")[1])
    limits = [(system - tasks, "kernel.threads-max")]
    for limit_file, usage_file in _TASK_FILES:
        try:
            limit, usage = (groups / limit_file).read_text().strip(), int((groups / usage_file).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            limits.append((int(limit) - usage, "the container's pids.max"))
        break
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is exempt
        limits.append((soft - _own_tasks(proc), "ulimit -u"))
    left, what = min(limits)
    return max(0, left), what


def _own_tasks(proc: Path) -> int:
    """Threads of this user."""
    count = 0
    for entry in proc.iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(list((entry / "task").iterdir()))
        except OSError:  # ended meanwhile
            continue
    return count


def _left_in_group(groups: Path) -> int | None:
    """What the container's limit leaves; None without a limit. Its page cache can be given up, so it counts as free."""
    for limit_file, usage_file, statistics_file in _GROUP_FILES:
        try:
            limit = (groups / limit_file).read_text().strip()
            usage = int((groups / usage_file).read_text())
            statistics = dict(line.split() for line in (groups / statistics_file).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or int(limit) >= 1 << 60:
            return None
        return max(0, int(limit) - usage + int(statistics.get("inactive_file", 0)))
    return None
