"""The module that a program sees as ``torch.neuron``.

Names, arguments and statistics keys are those of ``torch.cuda`` and ``torch.accelerator``. It is registered by
:mod:`trn_dist.neuron.autoload`, which ``import torch`` runs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from trn_dist import _C
from trn_dist.neuron import memory as memory
from trn_dist.neuron.device import DeviceProperties as DeviceProperties
from trn_dist.neuron.device import claim_named_cores as _claim_named_cores
from trn_dist.neuron.device import current_device as current_device
from trn_dist.neuron.device import device as device
from trn_dist.neuron.device import device_count as device_count
from trn_dist.neuron.device import device_of as device_of
from trn_dist.neuron.device import get_device_capability as get_device_capability
from trn_dist.neuron.device import get_device_name as get_device_name
from trn_dist.neuron.device import get_device_properties as get_device_properties
from trn_dist.neuron.device import set_device as set_device
from trn_dist.neuron.memory import (
    empty_cache as empty_cache,
)
from trn_dist.neuron.memory import (
    max_memory_allocated as max_memory_allocated,
)
from trn_dist.neuron.memory import (
    max_memory_reserved as max_memory_reserved,
)
from trn_dist.neuron.memory import (
    mem_get_info as mem_get_info,
)
from trn_dist.neuron.memory import (
    memory_allocated as memory_allocated,
)
from trn_dist.neuron.memory import (
    memory_reserved as memory_reserved,
)
from trn_dist.neuron.memory import (
    memory_snapshot as memory_snapshot,
)
from trn_dist.neuron.memory import (
    memory_stats as memory_stats,
)
from trn_dist.neuron.memory import (
    memory_stats_as_nested_dict as memory_stats_as_nested_dict,
)
from trn_dist.neuron.memory import (
    memory_summary as memory_summary,
)
from trn_dist.neuron.memory import (
    reset_accumulated_memory_stats as reset_accumulated_memory_stats,
)
from trn_dist.neuron.memory import (
    reset_max_memory_allocated as reset_max_memory_allocated,
)
from trn_dist.neuron.memory import (
    reset_max_memory_cached as reset_max_memory_cached,
)
from trn_dist.neuron.memory import (
    reset_peak_memory_stats as reset_peak_memory_stats,
)
from trn_dist.neuron.memory import (
    set_per_process_memory_fraction as set_per_process_memory_fraction,
)
from trn_dist.neuron.operator_cost import OperatorCost as OperatorCost
from trn_dist.neuron.operator_cost import register_operator_cost as register_operator_cost
from trn_dist.neuron.random import _get_generator as _get_generator
from trn_dist.neuron.random import get_rng_state as get_rng_state
from trn_dist.neuron.random import get_rng_state_all as get_rng_state_all
from trn_dist.neuron.random import initial_seed as initial_seed
from trn_dist.neuron.random import manual_seed as manual_seed
from trn_dist.neuron.random import manual_seed_all as manual_seed_all
from trn_dist.neuron.random import seed as seed
from trn_dist.neuron.random import seed_all as seed_all
from trn_dist.neuron.random import set_rng_state as set_rng_state
from trn_dist.neuron.random import set_rng_state_all as set_rng_state_all
from trn_dist.neuron.replicas import ReplicaDivergenceError as ReplicaDivergenceError
from trn_dist.neuron.replicas import check_replicas as check_replicas
from trn_dist.neuron.streams import Event as Event
from trn_dist.neuron.streams import Stream as Stream
from trn_dist.neuron.streams import current_stream as current_stream
from trn_dist.neuron.streams import default_stream as default_stream
from trn_dist.neuron.streams import set_stream as set_stream
from trn_dist.neuron.streams import stream as stream
from trn_dist.neuron.streams import synchronize as synchronize


def _load_chip_rates() -> None:
    # At the first operator: reading the hardware's files costs time that a process without operators need not spend.
    from trn_dist.neuron.telemetry import start as start_telemetry
    from trn_dist.timing.chip_rates import load_chip_rates
    from trn_dist.timing.program import start_program
    from trn_dist.timing.trace import start_trace

    _claim_named_cores()
    load_chip_rates()
    start_program()
    start_trace()
    start_telemetry()


def _cost_rows(ranks: list[int], operation: str) -> list[tuple[int, int, int]]:
    from trn_dist.timing.collective_costs import cost_rows

    return cost_rows(ranks, operation)


def _connect_hosts(store: Any, rank: int, size: int, address: str, timeout: Any) -> Any:
    from trn_dist.neuron.distributed import connect_hosts

    return connect_hosts(store, rank, size, address, timeout)


_C._set_chip_rates_loader(_load_chip_rates)
_C._set_cost_table_loader(_cost_rows)
_C._set_network_loader(_connect_hosts)


def is_available() -> bool:
    """Whether the device can be used: always, for it needs no hardware."""
    return True


def is_initialized() -> bool:
    """Whether the device was set up in this process, by its first tensor or by :func:`init`."""
    return _C._is_initialized()


def init() -> None:
    """Sets the device up, which its first tensor would do otherwise.

    Raises:
        RuntimeError: the process was forked from one whose device was set up.
    """
    _C._initialize()


def _lazy_init() -> None:
    _C._refuse_bad_fork()


def _is_in_bad_fork() -> bool:
    return _C._in_bad_fork()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast("neuron")`` accepts."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 works on the device: always, as on every Trainium."""
    return True


def set_float64_norm(enabled: bool) -> None:
    """Sums ``torch.linalg.vector_norm`` and ``torch._foreach_norm`` of float32 tensors in float64.

    Off by default: the norm then has the bits of device ``cpu``, whose kernel sums in float32 and is off by up to 1e-4
    for tensors of half a million elements. On, the norm of a sharded tensor agrees with that of the whole to six
    digits.
    """
    _C._set_float64_norm(enabled)


def __getattr__(name: str) -> Any:
    # The compile backend is imported when it is asked for: importing torch must not wait for it.
    if name in ("get_dynamo_metrics", "reset_dynamo_metrics"):
        return getattr(importlib.import_module("trn_dist.neuron.compile"), name)
    if name in ("strict_mode", "chip_report"):
        return getattr(importlib.import_module("trn_dist.neuron.chip_rules"), name)
    if name == "_initialized":  # asked by torch.utils.checkpoint before it saves the generators' states
        return _C._is_initialized()
    if name == "default_generators":
        return tuple(_C._default_generator(index) for index in range(device_count()))
    raise AttributeError(f"module 'torch.neuron' has no attribute {name!r}")


# Checks of the whole program; nothing of them is imported unless one is asked for.
for _module, _variable in (("sanitizer", "TRN_SANITIZE"), ("chip_rules", "TRN_STRICT"), ("faults", "TRN_FAULTS")):
    if os.environ.get(_variable):
        importlib.import_module(f"trn_dist.neuron.{_module}").enable_from_environment()
