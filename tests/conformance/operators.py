"""PyTorch's OpInfo entries by name, in the suite's order."""

from __future__ import annotations

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo


def name_of(op: OpInfo) -> str:
    """The entry's full name, its variant included: ``"std_mean.unbiased"``."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPERATORS: dict[str, OpInfo] = {name_of(op): op for op in op_db}


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    """The dtypes that the entry declares for the CPU, forward or backward."""
    dtypes = set(op.supported_dtypes("cpu"))
    if op.supports_autograd:
        dtypes |= set(op.supported_backward_dtypes("cpu"))
    return sorted(dtypes, key=str)
