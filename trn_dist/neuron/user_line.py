"""The line of the user's program that an operator came from."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

import torch

_OURS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<frozen ",
    "<eval_with_key",
)
_COMPILED_REGION = os.path.join(os.path.dirname(__file__), "compile.py")


def _first_outside(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    compiled = False
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            break
        compiled |= code.co_name == "region" and code.co_filename == _COMPILED_REGION
        frame = frame.f_back
    return frame, compiled


def find_user_line() -> tuple[str, bool]:
    """``"train.py:12 in main"``, the innermost frame outside of torch and trn_dist, and whether the operator runs
    inside of a graph of ``torch.compile``.

    Autograd's threads have no frames of the program: there it is the line at which the main thread waits for them.
    Empty when there is none.
    """
    frame, compiled = _first_outside(sys._getframe(1))
    place = ""
    if frame is None and threading.get_ident() != threading.main_thread().ident:
        frame, _ = _first_outside(sys._current_frames().get(threading.main_thread().ident or 0))
        place = " (backward)"
    if frame is None:
        return "", compiled
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}{place}", compiled


def user_line() -> str:
    """The line alone; see :func:`find_user_line`."""
    return find_user_line()[0]
