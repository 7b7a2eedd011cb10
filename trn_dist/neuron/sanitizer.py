"""The stream sanitizer: two uses of the same memory that nothing orders are found, with both lines of the program.

``TRN_SANITIZE=1`` turns it on for a process and makes it raise, ``TRN_SANITIZE=warn`` makes it warn. How it works
stands in ``csrc/device/Sanitizer.h``.
"""

from __future__ import annotations

import os

from trn_dist import _C
from trn_dist.neuron.user_line import user_line

VARIABLE = "TRN_SANITIZE"
_MODES = {"": 0, "0": 0, "warn": 1, "1": 2}


def enable_sanitizer(warn_only: bool = False) -> None:
    """Looks at all that is issued from now on. ``warn_only``: a finding warns instead of raising RuntimeError."""
    _C._set_user_line_provider(user_line)
    _C._set_sanitizer(1 if warn_only else 2)


def disable_sanitizer() -> None:
    """Operators cost again what they cost without it."""
    _C._set_sanitizer(0)


def enable_from_environment() -> None:
    """Raises ValueError for a value of TRN_SANITIZE that is none of 0, 1 and warn."""
    value = os.environ.get(VARIABLE, "").strip()
    if value not in _MODES:
        raise ValueError(f"{VARIABLE}={value!r}: must be 0, 1 (a finding raises) or warn")
    if _MODES[value]:
        enable_sanitizer(warn_only=value == "warn")
