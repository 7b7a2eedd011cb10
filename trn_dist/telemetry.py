"""How an onlooker in another process asks a rank for its figures: the name of the socket, and the client's side.

The rank's side is :mod:`trn_dist.neuron.telemetry`. A rank listens on a socket of the abstract namespace, which leaves
no file behind however the rank ends; whoever connects and is of the same user gets one JSON object. Imports no torch.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_READ_BYTES = 1 << 16


class NoFigures(Exception):
    """Why a process tells no figures."""


def socket_name(pid: int, rank: int) -> bytes:
    """The name that the process with this pid, rank ``rank`` of its job, listens at."""
    return f"\0trn_dist-figures-{pid}-rank{rank}".encode()


def listening() -> dict[int, int]:
    """Pid and rank of the processes that seem to listen on this host."""
    try:
        sockets = Path("/proc/net/unix").read_text()
    except OSError:
        return {}
    return {
        int(pid): int(rank) for pid, rank in re.findall(r"@trn_dist-figures-(\d+)-rank(\d+)$", sockets, re.MULTILINE)
    }


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end, as the kernel says."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def ask(ranks: Mapping[int, int], timeout_s: float = 2.0) -> dict[int, dict[str, Any] | NoFigures]:
    """The figures of each process, or why there are none; waits ``timeout_s`` for all of them together.

    ``ranks`` has the rank of each pid.
    """
    answers: dict[int, dict[str, Any] | NoFigures] = {}
    received: dict[int, bytearray] = {}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for pid, rank in ranks.items():
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(socket_name(pid, rank))
                if peer_of(connection)[0] != pid:
                    raise PermissionError
            except BlockingIOError:  # other onlookers wait in its queue
                answers[pid] = NoFigures("too many ask it at once")
                connection.close()
            except OSError:
                answers[pid] = NoFigures("has not used the device yet")
                connection.close()
            else:
                received[pid] = bytearray()
                selector.register(connection, selectors.EVENT_READ, pid)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            events = selector.select(max(left_s, 0.0))
            if not events and left_s <= 0:
                break
            for key, _ in events:
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    data = connection.recv(_READ_BYTES)
                except OSError:  # it has ended
                    data = b""
                received[key.data] += data
                if not data:
                    selector.unregister(connection)
                    connection.close()
                    answers[key.data] = _parsed(bytes(received[key.data]))
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
            answers[key.data] = NoFigures(f"no answer within {timeout_s:g} s")
    return answers


def _parsed(answer: bytes) -> dict[str, Any] | NoFigures:
    try:
        return json.loads(answer)
    except ValueError:
        return NoFigures("ended while it answered")
