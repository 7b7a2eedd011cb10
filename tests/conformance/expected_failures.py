"""What is known to differ from the CPU, by name and with the reason. The list only shrinks: an entry that passes fails.

A key is ``operator:dtype:check``, for modules ``module:dtype:module``.
"""

from __future__ import annotations

import itertools


def key_of(operator: str, dtype: str, check: str) -> str:
    return f"{operator}:{dtype}:{check}"


# torch.nn.modules.linear_cross_entropy_options keeps a closed list of devices on which it accumulates in float32.
_CHUNKED = "PyTorch picks the precision of chunked cross entropy from a closed list of devices"
# Module._apply replaces the parameters of a module that moves to any PrivateUse1 device, uninitialised ones by plain
# ones (TensorImpl::has_compatible_shallow_copy_type). The same on meta.
_LAZY = "PyTorch cannot move a lazy module that is not initialised to a PrivateUse1 device"
# The CPU hands these layers whole to oneDNN, which no device can reach; a device composes them of steps.
_RECURRENT = "the CPU takes oneDNN's whole layer, the device PyTorch's composition of cells: equal but for rounding"

EXPECTED_FAILURES: dict[str, str] = {
    **{
        key_of(f"nn.functional.linear_cross_entropy.{variant}", dtype, check): _CHUNKED
        for variant, dtype, check in itertools.product(
            ("chunked", "chunked_none"), ("bfloat16", "float16"), ("forward", "backward")
        )
    },
    **{
        key_of(f"nn.LazyConv{transposed}{dimensions}d", dtype, "module"): _LAZY
        for transposed, dimensions, dtype in itertools.product(("", "Transpose"), (1, 2, 3), ("float32", "float64"))
    },
    **{
        key_of(f"nn.{layer}", dtype, "module"): _RECURRENT
        for layer, dtype in itertools.product(("RNN", "GRU", "LSTM"), ("float32", "float64"))
    },
}
