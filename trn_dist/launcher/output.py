"""What becomes of the ranks' output: to the terminal with a prefix a line, to one log file a rank, or both.

Writes to the launcher's own stdout and stderr and to the log files. Called by ``supervisor``.
"""

from __future__ import annotations

import collections
import errno
import os
import select
from collections.abc import Iterable
from pathlib import Path

STDOUT, STDERR = 1, 2

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

lost: set[int] = set()
"""Which of the launcher's streams lead to a full disk, so that something of what ranks printed is missing."""

_LONGEST_LINE_BYTES = 64 * 1024
_TAIL_LINES = 40


class TerminalClosedError(Exception):
    """Nobody reads the launcher's output any more, as in ``trn run ... | head``."""


def write_terminal(fd: int, data: bytes) -> None:
    """Write everything to the launcher's stdout or stderr. Raises TerminalClosedError when its reader is gone."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody who shares the terminal made it non-blocking
            select.select([], [fd], [])
        except BrokenPipeError:
            raise TerminalClosedError from None
        except OSError as error:
            # A terminal that was hung up, or a full disk; the run goes on, and log files have it all.
            if error.errno in _DISK_FULL and fd not in lost:
                lost.add(fd)
                if fd == STDOUT:
                    say(f"stdout: {error.strerror}; what is printed from now on is lost, the run goes on")
            return


def say(text: str) -> None:
    """A line of the launcher's own, on stderr."""
    write_terminal(STDERR, f"trn: {text}\n".encode(errors="backslashreplace"))


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 4``."""
    numbers = sorted(ranks)
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {text}"


class RankOutput:
    """Both output streams of one rank.

    Attributes:
        shown: whether the terminal gets stdout, stderr, as a set of ``STDOUT`` and ``STDERR``.
        tail: the last lines of stderr that the terminal did not get, for when the rank fails.
        log_is_cut: whether the log lacks something, because its disk is full, say.
    """

    def __init__(self, rank: int, shown: bool, prefixed: bool, log_path: Path | None) -> None:
        self.shown = {STDOUT, STDERR} if shown else set()
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self.log_is_cut = False
        self._prefix = f"[rank{rank}] ".encode() if prefixed else b""
        self._pending = {STDOUT: b"", STDERR: b""}
        self._log_path = log_path
        self._log_fd = -1
        if log_path is not None:
            self._log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def feed(self, stream: int, data: bytes) -> None:
        """Take what the rank wrote to ``stream``. With a prefix, the terminal gets whole lines only."""
        self.log(data)
        if not self._prefix and stream in self.shown:
            write_terminal(stream, data)
            return
        data = self._pending[stream] + data
        # A progress bar ends its line with a carriage return.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end and len(data) > _LONGEST_LINE_BYTES:
            end = len(data)
        self._pending[stream] = data[end:]
        if end:
            self._put(stream, data[:end])

    def finish(self) -> None:
        """Let go of an unfinished last line and close the log."""
        for stream, data in self._pending.items():
            if data:
                self._put(stream, data + b"\n")
        self._pending = {STDOUT: b"", STDERR: b""}
        self.close()

    def log(self, data: bytes) -> None:
        """Write to the log file alone."""
        try:
            while data and self._log_fd >= 0:
                data = data[os.write(self._log_fd, data) :]
        except OSError as error:
            self.log_is_cut = True
            self.close()
            say(f"{self._log_path}: {error.strerror}; this log ends here, the run goes on")

    def close(self) -> None:
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _put(self, stream: int, lines: bytes) -> None:
        if stream in self.shown:
            write_terminal(stream, b"".join(self._prefix + line for line in lines.splitlines(keepends=True)))
        elif stream == STDERR:
            self.tail.extend(lines.splitlines(keepends=True))
