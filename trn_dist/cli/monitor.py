"""``trn monitor``: neuron-monitor's JSON lines over a run that goes on, or over the run folder of ``trn train``."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from trn_dist.cli.top import MEMORY_KINDS, watch
from trn_dist.hardware import ConfigError
from trn_dist.hardware.environment import named_cluster
from trn_dist.launcher.host import memory_bytes
from trn_dist.launcher.usage import Usage

_CPU_FIELDS = ("user", "nice", "system", "idle", "io_wait", "irq", "soft_irq")
_EPILOG = "Exit codes: 0; 1 when a folder holds no figures; 2 for wrong arguments, or when there is no such run."


def runtime_entry(
    pid: int | None,
    tag: str,
    error: str,
    cores: dict[str, dict[str, Any]],
    period_s: float,
    host_bytes: int,
    completed: int,
    cpu: tuple[float, float] | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """An entry of ``neuron_runtime_data``.

    Args:
        cores: by the core's number on its node: ``utilization`` in percent, ``flops`` a second, ``tensors`` and
            ``reserved`` in bytes of HBM.
        cpu: user and system time of this host in percent of a core.
        extra: what neuron-monitor does not have, under the key ``virtual_time``.
    """
    memory = {
        core: {
            "constants": 0,
            "model_code": 0,
            "model_shared_scratchpad": 0,
            "runtime_memory": max(0, figures["reserved"] - figures["tensors"]),
            "tensors": figures["tensors"],
        }
        for core, figures in cores.items()
    }
    failures = dict.fromkeys(("generic", "numerical", "transient", "model", "runtime", "hardware"), 0)
    results = dict.fromkeys(
        (
            "completed",
            "completed_with_err",
            "completed_with_num_err",
            "timed_out",
            "incorrect_input",
            "failed_to_queue",
        ),
        0,
    )
    return {
        "pid": pid,
        "address": "",
        "neuron_runtime_tag": tag,
        "error": error,
        "report": {
            "neuroncore_counters": {
                "period": period_s,
                "neuroncores_in_use": {
                    core: {"neuroncore_utilization": figures["utilization"], "flops": figures["flops"]}
                    for core, figures in cores.items()
                },
                "error": error,
            },
            "execution_stats": {
                "period": period_s,
                "error_summary": failures,
                "execution_summary": {**results, "completed": completed},
                "latency_stats": {"total_latency": None, "device_latency": None},
                "error": "",
            },
            "memory_used": {
                "period": period_s,
                "neuron_runtime_used_bytes": {
                    "host": host_bytes,
                    "neuron_device": sum(figures["reserved"] for figures in cores.values()),
                    "usage_breakdown": {
                        "host": {"application_memory": host_bytes, "constants": 0, "dma_buffers": 0, "tensors": 0},
                        "neuroncore_memory_usage": memory,
                    },
                },
                "loaded_models": [],
                "error": error,
            },
            "neuron_runtime_vcpu_usage": {
                "period": period_s,
                "vcpu_usage": {"user": cpu[0], "system": cpu[1]} if cpu is not None else None,
                "error": "" if cpu is not None else "not recorded",
            },
        },
        "virtual_time": extra,
    }


def live_entry(row: Usage, period_s: float) -> dict[str, Any]:
    """The entry of a rank that runs."""
    figures = row.look.figures or {}
    cores = {
        core: {
            # A rank drives one core; where it has memory on several, its clock does not say which worked.
            "utilization": 100 * row.utilization,
            "flops": round(row.flops_per_s),
            "tensors": memory["tensors"],
            "reserved": memory["reserved"],
        }
        for core, memory in figures.get("memory", {}).items()
    }
    memory = row.memory
    return runtime_entry(
        pid=row.look.rank.pid,
        tag=figures.get("tag") or f"rank{row.look.rank.rank}",
        error=row.look.problem,
        cores=cores,
        period_s=row.period_s or period_s,
        host_bytes=row.look.host_bytes,
        completed=row.launched,
        cpu=(row.user_percent, row.system_percent),
        extra={
            "rank": row.look.rank.rank,
            "node": row.look.rank.node,
            "window_s": row.virtual_s,
            "parts_percent": {name: 100 * share for name, share in row.parts.items()},
            "collectives": row.collectives,
            "hbm_bytes": {kind: memory.get(kind, 0) for kind in MEMORY_KINDS},
            "irreproducible": figures.get("irreproducible", ""),
        },
    )


def recorded_entry(rank: int, line: dict[str, Any], local_world_size: int) -> dict[str, Any]:
    """The entry of a rank for one step of a run folder."""
    predicted = line["predicted"]
    seconds = predicted["time_ps"] / 1e12
    busy = sum(spent for part, spent in predicted["parts_ps"].items() if part.startswith("compute."))
    flops = predicted.get("flops")  # not in folders of earlier versions
    core = {
        "utilization": 100 * busy / predicted["time_ps"] if predicted["time_ps"] else 0.0,
        "flops": round(flops / seconds) if flops is not None and seconds else None,
        "tensors": line["hbm_active_peak_bytes"],
        "reserved": line["hbm_reserved_peak_bytes"],
    }
    whole = max(1, predicted["time_ps"])
    return runtime_entry(
        pid=None,
        tag=f"rank{rank}",
        error="",
        cores={str(rank % local_world_size): core},
        period_s=seconds,
        host_bytes=0,
        completed=predicted["steps"],
        cpu=None,
        extra={
            "rank": rank,
            "node": rank // local_world_size,
            "step": line["step"],
            "window_s": seconds,
            "parts_percent": {name: 100 * spent / whole for name, spent in predicted["parts_ps"].items()},
            "irreproducible": predicted["irreproducible"],
        },
    )


def hardware_info(cluster_name: str | None) -> dict[str, Any]:
    """``neuron_hardware_info`` of a node of the cluster."""
    try:
        unit = named_cluster(cluster_name or "")
    except ConfigError as error:
        return {"error": str(error)}
    return {
        "neuron_device_type": unit.chip.name,
        "neuron_device_version": None,
        "neuroncore_version": None,
        "neuron_device_count": unit.chips_per_node,
        "neuron_device_memory_size": unit.chip.hbm.capacity_bytes,
        "neuroncore_per_device_count": unit.logical_cores_per_chip,
        "logical_neuroncore_config": unit.chip.physical_cores_per_logical,
        "error": "",
    }


def instance_info(cluster_name: str | None) -> dict[str, Any]:
    """``instance_info``: a simulated instance is in no zone of a cloud."""
    fields = dict.fromkeys(
        (
            "instance_name",
            "instance_id",
            "instance_type",
            "instance_availability_zone",
            "instance_availability_zone_id",
            "instance_region",
            "ami_id",
            "subnet_id",
        ),
        "",
    )
    return {**fields, "instance_id": "simulated", "instance_type": cluster_name or "", "error": ""}


class HostCounters:
    """``system_data``: this machine's processors and memory, measured; the modelled HBM has no errors to correct."""

    def __init__(self) -> None:
        self.before = self._cpu_times()

    def _cpu_times(self) -> list[int]:
        return [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]

    def report(self, period_s: float, chips: int) -> dict[str, Any]:
        """Since the last report."""
        now = self._cpu_times()
        spent = [after - before for after, before in zip(now, self.before, strict=True)]
        self.before = now
        nbytes = memory_bytes()
        errors = ("mem_ecc_corrected", "mem_ecc_uncorrected", "sram_ecc_corrected", "sram_ecc_uncorrected")
        return {
            "vcpu_usage": {
                "period": period_s,
                "average_usage": {
                    name: 100 * ticks / max(1, sum(spent)) for name, ticks in zip(_CPU_FIELDS, spent, strict=True)
                },
                "error": "",
            },
            "memory_info": {
                "period": period_s,
                "memory_total_bytes": nbytes["MemTotal"],
                "memory_used_bytes": nbytes["MemTotal"] - nbytes["MemAvailable"],
                "swap_total_bytes": nbytes["SwapTotal"],
                "swap_used_bytes": nbytes["SwapTotal"] - nbytes["SwapFree"],
                "error": "",
            },
            "neuron_hw_counters": {
                "period": period_s,
                "neuron_devices": [{"neuron_device_index": chip, **dict.fromkeys(errors, 0)} for chip in range(chips)],
                "error": "",
            },
        }


def recorded_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """A line for each step of a run folder. Raises click.ClickException when there is none."""
    by_step: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    files = sorted((folder / "metrics").glob("rank-*.jsonl"))
    for file in files:
        rank = int(file.stem.removeprefix("rank-"))
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                by_step[line["step"]][rank] = line
                line["predicted"]["parts_ps"]
            except (ValueError, KeyError, TypeError) as error:
                raise click.ClickException(f"{file}, line {number}: is no line of metrics: {error}") from None
    if not by_step:
        raise click.ClickException(
            f"{folder} holds no figures of a step: a run folder of `trn train` has them in metrics/rank-*.jsonl"
        )
    for _, ranks in sorted(by_step.items()):
        cluster = next(iter(ranks.values()))["predicted"]["cluster"]
        hardware = hardware_info(cluster)
        cores = hardware.get("neuron_device_count", 1) * hardware.get("neuroncore_per_device_count", len(files))
        yield {
            "neuron_runtime_data": [recorded_entry(rank, line, cores) for rank, line in sorted(ranks.items())],
            "system_data": None,
            "instance_info": instance_info(cluster),
            "neuron_hardware_info": hardware,
        }


def live_lines(pid: int | None, period_s: float) -> Iterator[dict[str, Any]]:
    """A line each period until the run ends."""
    seen = watch(pid)
    host = HostCounters()
    seen.again()
    while True:
        time.sleep(period_s)
        rows = seen.again()
        if not rows:
            return
        cluster = next((row.look.figures["cluster"] for row in rows if row.look.figures), None)
        hardware = hardware_info(cluster)
        yield {
            "neuron_runtime_data": [live_entry(row, period_s) for row in rows],
            "system_data": host.report(period_s, hardware.get("neuron_device_count", 0)),
            "instance_info": instance_info(cluster),
            "neuron_hardware_info": hardware,
        }


@click.command(name="monitor", epilog=_EPILOG)
@click.argument("target", metavar="[PID|FOLDER]", required=False)
@click.option(
    "--period-s", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Time between two lines."
)
@click.option("--count", type=click.IntRange(min=1), metavar="LINES", help="End after so many lines.  [default: never]")
def monitor(target: str | None, period_s: float, count: int | None) -> None:
    """Print what the ranks of a run do as JSON lines, in neuron-monitor's format.

    PID is the process of `trn run`, `trn train` or torchrun; it can be left out when only one run is there. Of FOLDER,
    the run folder of `trn train`, there is one line a step. Utilization, FLOPS and device memory are predictions on
    virtual time; vcpu_usage and host memory are measured on this machine. What neuron-monitor does not have stands
    under virtual_time. NEURON_PROCESS_TAG names the ranks.
    """
    if target is None or target.isdigit():
        lines = live_lines(None if target is None else int(target), period_s)
    elif Path(target).is_dir():
        lines = recorded_lines(Path(target))
    else:
        raise click.UsageError(f"{target!r} is neither a process nor a folder (looked in {os.getcwd()})")
    try:
        for number, line in enumerate(lines, 1):
            click.echo(json.dumps(line))
            if number == count:
                return
    except KeyboardInterrupt:
        return
