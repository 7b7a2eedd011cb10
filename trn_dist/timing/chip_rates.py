"""A chip's figures in the units that the virtual clock counts in: picoseconds for a byte, an element, an operation.

Peak rates times efficiencies, of one logical core. Called once a process, by the C++ side at its first operator.
"""

from __future__ import annotations

import os
from typing import Any

from trn_dist.faults import Fault, faults_of_environment
from trn_dist.hardware import Chip
from trn_dist.hardware.chip import DTYPES, ElementEngine

PS_PER_US = 1_000_000


def load_chip_rates(step: int = 0) -> None:
    """Gives the rates of this job's chip to the C++ side, slowed by the faults that hold in optimizer step ``step``."""
    from trn_dist import _C
    from trn_dist.timing.cluster import cluster

    rates = chip_rates(cluster().chip)
    for fault in faults_of_environment():
        if fault.kind == "slow_chip" and (fault.step or 0) <= step and on_own_chip(fault):
            rates = slowed(rates, fault.factor)
    _C._set_chip_rates(rates)


def on_own_chip(fault: Fault) -> bool:
    """Whether this rank is on the same chip as the rank of a fault."""
    from trn_dist.timing.cluster import cluster_topology
    from trn_dist.timing.collective_costs import core_of

    topology = cluster_topology()
    own, other = core_of(int(os.environ.get("RANK", "0"))), core_of(fault.rank or 0)
    return topology.chip_of(own) == topology.chip_of(other)


def slowed(rates: dict[str, Any], factor: float) -> dict[str, Any]:
    """The rates of a chip that takes ``factor`` times as long for everything; the host keeps its own."""

    def slower(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: slower(key, inner) for key, inner in value.items()}
        return value * factor if isinstance(value, float) else round(value * factor) if name.endswith("_ps") else value

    return {
        name: value if name.startswith("host_") or isinstance(value, str) else slower(name, value)
        for name, value in rates.items()
    }


def chip_rates(chip: Chip) -> dict[str, Any]:
    """The fields of ``ChipRates`` in ``csrc/timing/ChipRates.h``."""
    efficiency = chip.efficiency
    cores = chip.physical_cores_per_logical
    peak = chip.engines.tensor.tflops
    return {
        "chip": chip.name,
        "host_operator_ps": round(chip.launch.host_operator_us * PS_PER_US),
        "host_poll_ps": max(1, round(chip.launch.host_poll_us * PS_PER_US)),
        "device_operator_ps": round(chip.launch.device_operator_us * PS_PER_US),
        "dma_start_ps": round(chip.dma.start_latency_us * PS_PER_US),
        "cores": cores,
        "tensor_rows": chip.engines.tensor.rows,
        "tensor_columns": chip.engines.tensor.columns,
        # TFLOPS are operations a picosecond.
        "tensor_ps_per_flop": {name: 1.0 / (peak.get(name, peak["float32"]) * efficiency.tensor) for name in DTYPES},
        "vector": _element_rates(chip.engines.vector, cores, efficiency.vector),
        "scalar": _element_rates(chip.engines.scalar, cores, efficiency.scalar),
        "gpsimd": _element_rates(chip.engines.gpsimd, cores, efficiency.gpsimd),
        # GB/s are bytes a nanosecond.
        "hbm_ps_per_byte": 1e3 / (chip.hbm_bandwidth_gbps_per_logical_core * efficiency.hbm),
        "dma_ps_per_byte": 1e3 / (chip.dma_bandwidth_gbps_per_logical_core * efficiency.dma),
        "host_ps_per_byte": 1e3 / chip.host_link.bandwidth_gbps,
    }


def _element_rates(engine: ElementEngine, cores: int, efficiency: float) -> dict[str, Any]:
    return {
        "ps_per_element": {name: 1e3 / (engine.gelements_per_s(name) * cores * efficiency) for name in DTYPES},
        "instruction_ps": engine.instruction_overhead_cycles * 1e3 / engine.clock_ghz,
    }
