"""What PyTorch 2.13 forgets about a PrivateUse1 device that was renamed, corrected when the backend is loaded.

Each function names the place in PyTorch and what is wrong there. Called by :mod:`trn_dist.neuron.autoload`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def correct_dlpack_device() -> None:
    """``Tensor.__dlpack_device__`` compares the device's type with ``"privateuse1"``, which no renamed device is."""
    original = torch.Tensor.__dlpack_device__

    @functools.wraps(original)
    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if type(self) is torch.Tensor and self.device.type == "neuron":
            from torch.utils.dlpack import DLDeviceType

            return DLDeviceType.kDLExtDev, self.device.index
        return original(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]


def correct_all() -> None:
    correct_dlpack_device()
