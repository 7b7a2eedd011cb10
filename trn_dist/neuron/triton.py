"""A Triton kernel launched with neuron tensors fails in one sentence, not somewhere in Triton's search for a GPU.

Triton is not a dependency: trn_dist.neuron.upstream puts the check in place when a program imports it.
"""

from __future__ import annotations

import functools
from typing import Any


def refuse_neuron_tensors(module: Any) -> None:
    """``triton/runtime/jit.py``: every launch of a kernel goes through ``JITFunction.run``."""
    import torch

    original = module.JITFunction.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if any(tensor.device.type == "neuron" for tensor in tensors):
            raise RuntimeError(
                f"neuron: the Triton kernel {getattr(self, '__name__', 'given')} was called with neuron tensors, and "
                "Triton makes no code for Trainium: give the operator a CPU kernel by torch.library, or write it in NKI"
            )
        return original(self, *args, **kwargs)

    module.JITFunction.run = run
