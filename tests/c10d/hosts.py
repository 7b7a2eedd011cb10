"""Hosts for the tests of this folder, all on this machine: network namespaces with addresses of their own that a cable
joins, or names alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000


@dataclasses.dataclass(frozen=True)
class Host:
    address: str
    namespace: str = ""
    host_id: str = ""  # for TRN_HOST_ID

    def enter(self) -> None:
        """Moves the calling process, which must have one thread, to this host."""
        if self.host_id:
            os.environ["TRN_HOST_ID"] = self.host_id
        if self.namespace:
            descriptor = os.open(Path("/run/netns") / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.namespace}")
            os.close(descriptor)

    def command(self, *arguments: str) -> list[str]:
        """The command that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def named(*host_ids: str) -> list[Host]:
    """Hosts by name alone, which meet at the loopback address."""
    return [Host("127.0.0.1", host_id=host_id) for host_id in host_ids]


def why_not() -> str:
    """Why this machine cannot have two namespaces; empty if it can."""
    if shutil.which("ip") is None:
        return "needs the command ip (install iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"trn-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces joined by a veth pair; they are gone at the end."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    hosts = (Host("10.77.0.1", f"trn-{os.getpid()}-a"), Host("10.77.0.2", f"trn-{os.getpid()}-b"))
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = (host.namespace for host in hosts)
        ip("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for host in hosts:
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "wire")
            ip("-n", host.namespace, "link", "set", "wire", "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
