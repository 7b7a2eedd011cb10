"""Messages between the supervisor, the zygote and the ranks: one JSON object a packet, with descriptors if need be.

The channel is a SOCK_SEQPACKET socket pair, so packets arrive whole or not at all and several processes may send on one
end. Its file descriptors are close-on-exec: a program that a rank starts does not get them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_MAX_PACKET_BYTES = 128 * 1024
_MAX_TEXT_CHARS = 20_000  # at most 4 bytes each as UTF-8, 6 as a JSON escape: always fits the packet


def shorten(text: str) -> str:
    """Cut the middle out of a text that would not fit a message."""
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    half = _MAX_TEXT_CHARS // 2 - 50
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. Raises OSError when the other end is closed."""
    socket.send_fds(channel, [json.dumps(message).encode()], list(fds))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the descriptors that came with it; None when the other end is closed."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, _MAX_PACKET_BYTES, 4)
    except ConnectionResetError:
        return None
    if not data:
        return None
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(data), fds
