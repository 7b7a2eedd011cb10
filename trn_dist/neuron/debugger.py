"""A rank at the prompt of a debugger does not time the others out.

``breakpoint()``, ``pdb.set_trace()`` and ``torch.distributed.breakpoint()`` all end in ``pdb.Pdb.interaction``. While a
rank is in there it says so in shared memory, and the deadlines of the neuron groups of all ranks of this machine stand
still.
"""

from __future__ import annotations

import functools
import pdb
from typing import Any

import torch


def install() -> None:
    """Wraps ``pdb.Pdb.interaction``. Debuggers that derive from it, such as IPython's, are served too."""
    original = pdb.Pdb.interaction

    @functools.wraps(original)
    def interaction(self: pdb.Pdb, *args: Any, **kwargs: Any) -> Any:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return original(self, *args, **kwargs)
        from trn_dist import _C

        _C._begin_pause()
        try:
            return original(self, *args, **kwargs)
        finally:
            _C._end_pause()

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
