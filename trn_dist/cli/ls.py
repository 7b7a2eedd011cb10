"""``trn ls``: the devices of the simulated node, as neuron-ls shows those of a real one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from trn_dist.cli.run import complete_cluster, read_cluster
from trn_dist.hardware import Cluster, Topology
from trn_dist.launcher.running import RunningRank, running_ranks

_GB = 1 << 30  # neuron-ls calls 2^30 bytes a GB


@dataclasses.dataclass(frozen=True)
class Device:
    """One chip of the node, with the keys of neuron-ls' JSON. What a simulated node does not have is None."""

    neuron_device: int
    bdf: str | None
    cpu_affinity: str | None
    numa_node: str | None
    connected_to: list[int]
    nc_count: int
    logical_neuroncore_config: int
    memory_size: int  # bytes
    neuroncore_ids: list[int]
    neuron_processes: list[dict[str, Any]]


def devices(cluster: Cluster, node: int, ranks: list[RunningRank]) -> list[Device]:
    """The chips of a node and the ranks that run on their cores."""
    topology = Topology(cluster)
    cores, first = cluster.logical_cores_per_chip, node * cluster.chips_per_node
    on_node = range(first, first + cluster.chips_per_node)
    found = []
    for index, chip in enumerate(on_node):
        ids = list(range(index * cores, (index + 1) * cores))
        found.append(
            Device(
                neuron_device=index,
                bdf=None,
                cpu_affinity=None,
                numa_node=None,
                connected_to=[other - first for other in topology.connected_chips(chip) if other in on_node],
                nc_count=cores,
                logical_neuroncore_config=cluster.chip.physical_cores_per_logical,
                memory_size=cluster.chip.hbm.capacity_bytes,
                neuroncore_ids=ids,
                neuron_processes=[
                    {"pid": rank.pid, "command": rank.command, "neuron_runtime_version": None}
                    for rank in ranks
                    if rank.node == node and rank.local_rank in ids
                ],
            )
        )
    return found


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A table in neuron-ls' style; a heading may have several lines."""
    split = [heading.split("\n") for heading in headings]
    height = max(map(len, split))
    split = [lines + [""] * (height - len(lines)) for lines in split]
    widths = [max(map(len, (*split[i], *(row[i] for row in rows)))) for i in range(len(headings))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [rule]
    for i in range(height):
        lines.append("| " + " | ".join(cell[i].center(width) for cell, width in zip(split, widths, strict=True)) + " |")
    lines.append(rule)
    for row in rows:
        lines.append("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    return "\n".join([*lines, rule])


def draw(cluster: Cluster) -> str:
    """The links between the chips of a node."""
    level = cluster.levels.node
    if level.kind == "switch":
        return f"{level.size} devices, each with one link to a switch, {level.bandwidth_gbps:g} GB/s each way"
    if len(level.shape) == 1:
        if level.size == 1:
            return "1 device, without links inside the node"
        ring = " <--> ".join(f"[{chip:2}]" for chip in range(level.size))
        return f"* <--> {ring} <--> *    (* is one link)"
    if len(level.shape) > 2:
        return f"a torus of {' x '.join(map(str, level.shape))} devices; --json lists the neighbours of each"
    rows, columns = level.shape
    stars = " " * 8 + "   *  " + "        *  " * (columns - 1)
    bars = " " * 8 + "   |  " + "        |  " * (columns - 1)
    lines = [stars, bars]
    for row in range(rows):
        chips = " <--> ".join(f"[{row * columns + column:3}]" for column in range(columns))
        lines += [f" * <--> {chips} <--> *", bars]
    lines.append(stars)
    return "\n".join(lines) + "\n\nMarks * at opposite ends of a row or a column are one link."


@click.command(name="ls", epilog="Exit codes: 0; 2 wrong arguments.")
@click.option(
    "--cluster",
    default="",
    metavar="NAME|FILE",
    shell_complete=complete_cluster,
    help="Which cluster.  [default: TRN_CLUSTER]",
)
@click.option("--node", type=click.IntRange(min=0), default=0, show_default=True, help="Which of its nodes.")
@click.option("-w", "--wide", is_flag=True, help="Also the processes on each device.")
@click.option("-t", "--topology", is_flag=True, help="Draw how the devices are linked.")
@click.option("-j", "--json", "--json-output", "as_json", is_flag=True, help="Print neuron-ls' JSON.")
def ls(cluster: str, node: int, wide: bool, topology: bool, as_json: bool) -> None:
    """List the Neuron devices of a simulated node, as neuron-ls does.

    A device is a chip. Processes are the ranks of this user that run now. PCI addresses, CPU affinity and NUMA nodes
    belong to a real host; a simulated one has none.
    """
    unit = read_cluster(cluster)
    if node >= unit.nodes and unit.efa is None:
        raise click.BadParameter(f"{node}: a {unit.name} has node 0 to {unit.nodes - 1}", param_hint="--node")
    # Nodes beyond the first unit look alike.
    within = node % unit.nodes_per_unit
    ranks = [dataclasses.replace(rank, node=within) for rank in running_ranks() if rank.node == node]
    rows = devices(unit, within, ranks)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(device) for device in rows], indent=2))
        return
    click.echo(f"instance-type: {unit.name}")
    click.echo(f"instance-id: simulated, node {node}")
    click.echo(f"logical-neuroncore-config: {unit.chip.physical_cores_per_logical}")
    headings = ["NEURON\nDEVICE", "NEURON\nCORES", "NEURON\nCORE IDS", "NEURON\nMEMORY"]
    linked = any(device.connected_to for device in rows)
    if linked:
        headings.append("CONNECTED\nDEVICES")
    headings += ["PCI\nBDF", "CPU\nAFFINITY", "NUMA\nNODE"]
    if wide:
        headings += ["PID", "COMMAND", "RUNTIME\nVERSION"]
    cells = []
    for device in rows:
        ids = device.neuroncore_ids
        row = [
            str(device.neuron_device),
            str(device.nc_count),
            f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0]),
            f"{device.memory_size / _GB:g} GB",
        ]
        if linked:
            row.append(", ".join(map(str, device.connected_to)))
        row += ["-"] * 3
        processes: list[dict[str, Any] | None] = [*device.neuron_processes] or [None]
        first, *others = processes
        cells.append(row + _process_cells(first) if wide else row)
        if wide:
            cells += [[""] * len(row) + _process_cells(other) for other in others]
    click.echo(table(headings, cells))
    if topology:
        click.echo(f"\nDevice topology\n{draw(unit)}")


def _process_cells(process: dict[str, Any] | None) -> list[str]:
    return ["", "", ""] if process is None else [str(process["pid"]), process["command"][:60], "-"]
