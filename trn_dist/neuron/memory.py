"""Memory of the device: statistics and control, with ``torch.cuda``'s names and keys.

All figures are of the modelled HBM (what the chip would have allocated), never of this machine's memory.
"""

from __future__ import annotations

import pickle
from typing import Any

from trn_dist import _C
from trn_dist.neuron.device import Device, device_count, device_index


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """The allocator's statistics, nested: ``stats["allocated_bytes"]["all"]["peak"]``."""
    return _C._memory_stats(device_index(device))


def memory_stats(device: Device = None) -> dict[str, int]:
    """The allocator's statistics under ``torch.cuda.memory_stats``' keys, such as ``"allocated_bytes.all.peak"``."""
    flat: dict[str, int] = {}

    def flatten(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", memory_stats_as_nested_dict(device))
    return dict(sorted(flat.items()))


def memory_allocated(device: Device = None) -> int:
    """Bytes of HBM in live tensors."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes of HBM that live tensors took since the start or :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Device = None) -> int:
    """Bytes of HBM in the allocator's segments."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes of HBM that segments took since the start or :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Makes every ``peak`` the present value."""
    _C._reset_peak_memory_stats(device_index(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Sets the ``allocated``, ``freed``, retry and out-of-memory counts to zero."""
    _C._reset_accumulated_memory_stats(device_index(device))


def empty_cache() -> None:
    """Gives free segments back, and this machine's pages behind freed tensors."""
    _C._empty_cache()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes of HBM."""
    return _C._mem_get_info(device_index(device))


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limits the allocator to ``fraction`` (above 0, at most 1) of the device's HBM."""
    _C._set_memory_fraction(fraction, device_index(device))


def memory_snapshot() -> list[dict[str, Any]]:
    """Every segment of every used device with its blocks, in the form of ``torch.cuda.memory_snapshot``."""
    return [segment for index in range(device_count()) for segment in _C._memory_segments(index)]


def _record_memory_history(enabled: str | None = "all", **_: Any) -> None:
    """Accepted so that TorchTitan's memory snapshots run; the history of allocations is not kept yet."""
    if enabled not in (None, "state", "all"):
        raise ValueError(f"enabled must be None, 'state' or 'all', not {enabled!r}")


def _snapshot(device: Device = None) -> dict[str, Any]:
    """The present segments in the form that PyTorch's memory visualiser reads; ``device_traces`` are empty."""
    return {
        "segments": memory_snapshot(),
        "device_traces": [[] for _ in range(device_count())],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)
