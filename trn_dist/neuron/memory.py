"""Memory of the device: statistics and control, with ``torch.cuda``'s names and keys.

All figures are of the modelled HBM (what the chip would have allocated), never of this machine's memory.
"""

from __future__ import annotations

import pickle
import sys
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


def max_memory_cached(device: Device = None) -> int:
    """The former name of :func:`max_memory_reserved`."""
    return max_memory_reserved(device)


def reset_max_memory_allocated(device: Device = None) -> None:
    """The former name of :func:`reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: Device = None) -> None:
    """The former name of :func:`reset_peak_memory_stats`."""
    reset_peak_memory_stats(device)


def _size(nbytes: int) -> str:
    for unit, bytes_of_unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= bytes_of_unit:
            return f"{nbytes / bytes_of_unit:.2f} {unit}"
    return f"{nbytes} B"


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """The statistics as a table for people: now, peak, and all that was ever allocated and freed.

    Args:
        device: the device; the current one by default.
        abbreviated: leave the split into small and large pool out.
    """
    index = device_index(device)
    stats = memory_stats(index)
    free, total = mem_get_info(index)
    sizes = {
        "allocated_bytes": "Allocated memory",
        "active_bytes": "Active memory",
        "requested_bytes": "Requested memory",
        "reserved_bytes": "Reserved memory",
        "inactive_split_bytes": "Non-releasable memory",
    }
    counts = {
        "allocation": "Allocations",
        "active": "Active allocs",
        "segment": "Reserved segments",
        "inactive_split": "Non-releasable allocs",
    }
    pools = (
        {"all": ""} if abbreviated else {"all": "", "large_pool": "from large pool", "small_pool": "from small pool"}
    )
    metrics = ("current", "peak", "allocated", "freed")
    width = 24 + 4 * 15 + 1
    rule = "|" + "-" * (width - 2) + "|"
    title = f"Memory of neuron:{index}, {_size(total)} of HBM, {_size(free)} free"
    events = f"out of memory: {stats['num_ooms']}, retries after freeing: {stats['num_alloc_retries']}"
    head = "".join(f" {name:>12} |" for name in ("Now", "Peak", "Allocated", "Freed"))
    lines = [rule, f"|{title:^{width - 2}}|", f"|{events:^{width - 2}}|", rule, f"| {'Metric':<21} |{head}"]
    for families, text in ((sizes, _size), (counts, str)):
        for family, name in families.items():
            lines.append(rule)
            for pool, pool_name in pools.items():
                cells = "".join(f" {text(stats[f'{family}.{pool}.{metric}']):>12} |" for metric in metrics)
                lines.append(f"| {('  ' + pool_name) if pool_name else name:<21} |{cells}")
    return "\n".join([*lines, rule]) + "\n"


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "python",
    max_entries: int = sys.maxsize,
    device: Device = None,
    clear_history: bool = False,
    **_: Any,
) -> None:
    """Keeps a history of allocations with the lines of the program, for :func:`_snapshot` and out-of-memory messages.

    The arguments are those of ``torch.cuda.memory._record_memory_history``, the default of ``stacks`` apart.

    Args:
        enabled: None stops and forgets, ``"state"`` keeps the lines of live memory, ``"all"`` every event as well.
        context: whose lines are kept: None, ``"state"``, ``"alloc"`` (events of allocation too) or ``"all"``.
        stacks: ``"python"``, or ``"all"`` for C++ frames beside Python's, which take long to be named.
        max_entries: events that are kept of each device, the last ones.
        device: accepted and not used: the history is kept of all devices.
        clear_history: forget what was kept before.
    """
    if enabled not in (None, "state", "all"):
        raise ValueError(f"enabled must be None, 'state' or 'all', not {enabled!r}")
    levels = {None: 0, "state": 1, "alloc": 2, "all": 3}
    if context not in levels:
        raise ValueError(f"context must be None, 'state', 'alloc' or 'all', not {context!r}")
    if stacks not in ("python", "all"):
        raise ValueError(f"stacks must be 'python' or 'all', not {stacks!r}")
    if clear_history:
        _C._record_memory_history(False, False, 0, False, 0)
    _C._record_memory_history(
        enabled is not None, enabled == "all", levels[context], stacks == "all", min(max_entries, sys.maxsize)
    )


def _snapshot(device: Device = None) -> dict[str, Any]:
    """Segments and history in the form that PyTorch's memory visualiser reads (pytorch.org/memory_viz)."""
    return {
        "segments": memory_snapshot(),
        "device_traces": [_C._memory_history(index) for index in range(device_count())],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Writes :func:`_snapshot` to a file that pytorch.org/memory_viz opens."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)
