"""What PyTorch 2.13 forgets about a PrivateUse1 device that was renamed, corrected when the backend is loaded.

Each function names the place in PyTorch and what is wrong there. Called by :mod:`trn_dist.neuron.autoload`; nothing
that ``import torch`` leaves out is imported here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


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


def _correct_flex_attention(module: ModuleType) -> None:
    """``_validate_device`` has a closed list of devices. On neuron flex attention runs its dense form, both ways."""
    original = module._validate_device

    @functools.wraps(original)
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "neuron":
            original(query, key, value)

    module._validate_device = _validate_device  # type: ignore[attr-defined]


class _FlexAttentionFinder(importlib.abc.MetaPathFinder):
    """Corrects flex attention's module when it is imported, which ``import torch`` does not do."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _FLEX_ATTENTION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _correct_flex_attention(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def correct_flex_attention() -> None:
    """Corrects the module now if it was imported, else when it will be."""
    if _FLEX_ATTENTION in sys.modules:
        _correct_flex_attention(sys.modules[_FLEX_ATTENTION])
    else:
        sys.meta_path.insert(0, _FlexAttentionFinder())


def correct_all() -> None:
    correct_dlpack_device()
    correct_flex_attention()
