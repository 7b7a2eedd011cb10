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
# The CPU adds biases inside its matrix products, and hands float32 layers whole to oneDNN. On a device PyTorch ends
# each step in a fused cell that adds them afterwards. tests/neuron/test_training.py holds both equal within rounding.
_RECURRENT = "PyTorch composes recurrent layers differently on a device: equal but for rounding"

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
        for layer, dtype in itertools.product(("RNN", "GRU", "LSTM", "GRUCell", "LSTMCell"), ("float32", "float64"))
    },
    **{key_of("nn.LinearCrossEntropyLoss", dtype, "module"): _CHUNKED for dtype in ("bfloat16", "float16")},
}
