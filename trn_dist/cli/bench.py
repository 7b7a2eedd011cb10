"""``trn bench``: collectives timed as nccom-test does it, with its flags and columns.

The times that nccom-test would print are those of virtual time, a model; beside them stand the times of this host. The
ranks run :mod:`trn_dist.cli.bench_rank`, which takes from here what a row looks like.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from trn_dist.cli.run import complete_cluster, read_cluster, start
from trn_dist.launcher import LaunchPlan, Program
from trn_dist.launcher.host import usable_memory_bytes

# nccom-test's name of a type -> torch's, bytes.
DTYPES = {
    "uint8": ("uint8", 1),
    "int8": ("int8", 1),
    "int16": ("int16", 2),
    "fp16": ("float16", 2),
    "bf16": ("bfloat16", 2),
    "int32": ("int32", 4),
    "fp32": ("float32", 4),
    "int64": ("int64", 8),
    "fp64": ("float64", 8),
}
# nccom-test's name of an operation -> what its cost is looked up under.
COST_OPERATIONS = {
    "allr": "all_reduce",
    "allg": "all_gather",
    "allgv": "all_gather",
    "redsct": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "sendrecv": "send",
    "permute": "send",
}
_STATISTIC = re.compile(r"avg|min|max|p(\d{1,2}(\.\d+)?|100)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the ranks are told.

    Attributes:
        sizes: bytes of the larger of a rank's input and output, one row each.
        statistics: of the host's times, beside their average: ``min``, ``max``, ``p50``, ...
        pairs: source and target of each message of sendrecv and permute, as ranks in the group.
        report: path of a JSON file, "" for none.
    """

    operation: str
    sizes: list[int]
    dtype: str
    iterations: int
    warmup: int
    check: str
    seed: int
    cluster: str
    ranks: int
    nodes: int
    statistics: list[str]
    show_algorithm: bool
    show_sizes: bool
    replica_groups: list[list[int]]
    pairs: list[list[int]]
    report: str
    as_json: bool

    @classmethod
    def from_json(cls, text: str) -> Settings:
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: a size and its times. GB/s are 10^9 bytes a second."""

    size: int
    count: int
    type: str
    time_us: float
    host_us: dict[str, float]
    bus_factor: float
    algorithm: str
    input_bytes: int
    output_bytes: int
    errors: int | None

    @property
    def algbw_gbps(self) -> float:
        return self.size / self.time_us / 1e3 if self.time_us else 0.0

    @property
    def busbw_gbps(self) -> float:
        return self.algbw_gbps * self.bus_factor

    def as_json(self) -> dict[str, Any]:
        """With nccom-test's keys, and ours for the host."""
        row: dict[str, Any] = {
            "size(B)": self.size,
            "count(elems)": self.count,
            "type": self.type,
            "time:avg(us)": round(self.time_us, 3),
            "algbw(GB/s)": round(self.algbw_gbps, 4),
            "busbw(GB/s)": round(self.busbw_gbps, 4),
            "algorithm": self.algorithm,
            "input_size(B)": self.input_bytes,
            "output_size(B)": self.output_bytes,
        }
        row |= {f"host:{name}(us)": round(value, 2) for name, value in self.host_us.items()}
        return row if self.errors is None else row | {"errors": self.errors}


def bus_factor(operation: str, ranks: int) -> float:
    """What a link carries for a byte of the buffer, as nccom-test counts it."""
    if operation in ("sendrecv", "permute"):
        return 1.0
    return (2 if operation == "allr" else 1) * (ranks - 1) / ranks


def _columns(settings: Settings) -> list[tuple[str, int]]:
    columns = [("size(B)", 12), ("count(elems)", 13), ("type", 6), ("time:avg(us)", 13), ("algbw(GB/s)", 12)]
    columns += [("busbw(GB/s)", 12)]
    columns += [(f"host:{name}(us)", 15) for name in ("avg", *settings.statistics)]
    if settings.show_sizes:
        columns += [("input(B)", 12), ("output(B)", 12)]
    if settings.check:
        columns += [("errors", 7)]
    return columns + ([("algorithm", 12)] if settings.show_algorithm else [])


def header(settings: Settings) -> str:
    """What stands above the rows."""
    what = f"{settings.operation} of {settings.ranks} ranks on {settings.nodes} node(s) of {settings.cluster}"
    return (
        f"# {what}, {settings.iterations} iterations after {settings.warmup}\n"
        "# time and bandwidths are predicted for that cluster (a model, not measured); host is this machine\n"
        + " ".join(f"{name:>{width}}" for name, width in _columns(settings))
    )


def show(settings: Settings, row: Row) -> str:
    """One row."""
    cells = [str(row.size), str(row.count), row.type, f"{row.time_us:.2f}"]
    cells += [f"{row.algbw_gbps:.4f}", f"{row.busbw_gbps:.4f}", *(f"{value:.2f}" for value in row.host_us.values())]
    if settings.show_sizes:
        cells += [str(row.input_bytes), str(row.output_bytes)]
    if settings.check:
        cells += [str(row.errors)]
    if settings.show_algorithm:
        cells += [row.algorithm]
    return " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _columns(settings), strict=True))


def summary(rows: list[Row]) -> str:
    """What stands below the rows."""
    lines = [f"Avg bus bandwidth:\t{sum(row.busbw_gbps for row in rows) / len(rows):.4f}GB/s"]
    errors = sum(row.errors or 0 for row in rows)
    if errors:
        lines.append(f"{errors} errors found - test failed")
    return "\n".join(lines)


class Size(click.ParamType):
    """Bytes: ``8``, ``64K``, ``32M``, ``1G`` (powers of 1,024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)([KMG]?)B?", str(value).upper())
        if match is None or not int(match[1]):
            self.fail(f"{value!r} is not a size such as 8, 64K or 32M", param, ctx)
        return int(match[1]) * _UNITS[match[2]]


def _sizes(low: int, high: int, step: int | None, factor: int) -> Iterator[int]:
    size = low
    while size <= high:
        yield size
        size = size + step if step else size * factor


def _read_lists(path: Path | None, key: str, option: str) -> list[list[int]]:
    """A JSON file that holds lists of ranks, bare or under ``key``."""
    if path is None:
        return []
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint=option) from None
    lists = content.get(key) if isinstance(content, dict) else content
    if not isinstance(lists, list) or not all(
        isinstance(inner, list) and inner and all(type(rank) is int for rank in inner) for inner in lists
    ):
        raise click.BadParameter(f'{path}: must be a list of lists of ranks, or {{"{key}": ...}}', param_hint=option)
    return lists


def _check_groups(groups: list[list[int]], ranks: int) -> int:
    """Ranks of a group; raises for groups that are not alike or do not cover the ranks once."""
    if not groups:
        return ranks
    named = sorted(rank for group in groups for rank in group)
    if named != list(range(ranks)):
        raise click.BadParameter(
            f"must name each of the ranks 0 to {ranks - 1} once", param_hint="--custom-replica-groups"
        )
    if len({len(group) for group in groups}) > 1:
        raise click.BadParameter("groups must be of one size", param_hint="--custom-replica-groups")
    return len(groups[0])


def _check_pairs(pairs: list[list[int]], operation: str, size: int) -> None:
    option = "--custom-src-target-pairs"
    if pairs and operation not in ("sendrecv", "permute"):
        raise click.BadParameter(f"belongs to sendrecv and permute, not to {operation}", param_hint=option)
    for pair in pairs:
        if len(pair) != 2 or not all(0 <= rank < size for rank in pair) or pair[0] == pair[1]:
            raise click.BadParameter(f"{pair} is no pair of two ranks below {size}", param_hint=option)
    if len({tuple(pair) for pair in pairs}) != len(pairs):
        raise click.BadParameter("names a pair twice", param_hint=option)
    if operation == "sendrecv" and not pairs and size % 2:
        raise click.UsageError(f"sendrecv pairs neighbours, and {size} ranks are odd; give {option}")


@click.command(name="bench", epilog="Exit codes: 0; 1 when --check found errors or a rank failed; 2 wrong arguments.")
@click.argument("operation", type=click.Choice(list(COST_OPERATIONS)))
@click.option("-r", "--nworkers", "ranks", type=click.IntRange(min=1), help="Ranks in all.  [default: all cores]")
@click.option("-N", "--nnodes", "nodes", type=click.IntRange(min=1), help="Nodes.  [default: as many as they need]")
@click.option(
    "--cluster",
    default="",
    metavar="NAME|FILE",
    shell_complete=complete_cluster,
    help="The cluster to simulate.  [default: TRN_CLUSTER]",
)
@click.option("-b", "--minbytes", type=Size(), default="32M", show_default=True, help="First size.")
@click.option("-e", "--maxbytes", type=Size(), help="Last size.  [default: 32M, or the first]")
@click.option("-i", "--stepbytes", type=Size(), help="Add this from size to size, in place of a factor.")
@click.option("-f", "--stepfactor", type=click.IntRange(min=2), default=2, show_default=True, help="Multiply by this.")
@click.option("-n", "--iters", type=click.IntRange(min=1), default=20, show_default=True, help="Timed iterations.")
@click.option("-w", "--warmup-iters", type=click.IntRange(min=0), default=5, show_default=True, help="Before them.")
@click.option("-d", "--datatype", type=click.Choice(list(DTYPES)), default="uint8", show_default=True)
@click.option(
    "-c",
    "--check",
    is_flag=False,
    flag_value="random",
    default=None,
    metavar="[random|all_ones]",
    help="Also compare the results with what they must be.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the values of --check random.")
@click.option("--stats", default="avg", metavar="LIST", help="Of the host's times: avg,p50,p99,min,max.")
@click.option("--show-algorithm", is_flag=True, help="Also the algorithm that the model takes.")
@click.option("--show-input-output-size", "show_sizes", is_flag=True, help="Also the bytes that a rank gives and gets.")
@click.option(
    "--custom-replica-groups", type=click.Path(path_type=Path), help="JSON: lists of ranks that work at the same time."
)
@click.option("--custom-src-target-pairs", type=click.Path(path_type=Path), help="JSON: [source, target] pairs.")
@click.option(
    "--report-to-json-file",
    "report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the table.")
def bench(
    operation: str,
    ranks: int | None,
    nodes: int | None,
    cluster: str,
    minbytes: int,
    maxbytes: int | None,
    stepbytes: int | None,
    stepfactor: int,
    iters: int,
    warmup_iters: int,
    datatype: str,
    check: str | None,
    seed: int,
    stats: str,
    show_algorithm: bool,
    show_sizes: bool,
    custom_replica_groups: Path | None,
    custom_src_target_pairs: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Time a collective of simulated ranks, as nccom-test does.

    \b
    OPERATION: allr, allg, allgv, redsct, alltoall, alltoallv, sendrecv (neighbours swap), permute (a ring).
    trn bench allr -r 64 -b 8 -e 1M -f 8 -d bf16 --check
    trn bench alltoall -r 8 --json

    Size is the larger of what a rank gives and gets; it is rounded down to what the ranks can divide.
    """
    if check not in (None, "random", "all_ones"):
        raise click.BadParameter(f"{check!r} is neither random nor all_ones", param_hint="--check")
    statistics = [name for name in re.split(r"[,\s]+", stats) if name and name != "avg"]
    for name in statistics:
        if not _STATISTIC.fullmatch(name):
            raise click.BadParameter(f"{name!r} is none of avg, min, max, p50, p99, ...", param_hint="--stats")
    if report is not None and not os.access(report if report.exists() else report.absolute().parent, os.W_OK):
        raise click.BadParameter(f"{report} cannot be written", param_hint="--report-to-json-file")
    last = max(minbytes, Size().convert("32M", None, None)) if maxbytes is None else maxbytes
    if last < minbytes:
        raise click.BadParameter(f"{last} bytes are less than --minbytes, {minbytes}", param_hint="--maxbytes")
    unit = read_cluster(cluster)
    if ranks is None:
        nodes = unit.nodes_per_unit if nodes is None else nodes
        ranks = nodes * unit.cores_per_node
    nodes = unit.nodes_for(ranks) if nodes is None else nodes
    groups = _read_lists(custom_replica_groups, "replica_groups", "--custom-replica-groups")
    pairs = _read_lists(custom_src_target_pairs, "src_target_pairs", "--custom-src-target-pairs")
    _check_pairs(pairs, operation, _check_groups(groups, ranks))
    needed, usable = 2 * last * ranks, usable_memory_bytes()
    if needed > usable:
        raise click.UsageError(
            f"{ranks} ranks with two buffers of {last} bytes each need {needed / _GIB:.1f} GiB of this machine, and "
            f"{usable / _GIB:.1f} GiB can be had; give -e {max(1, usable // (2 * ranks) >> 20)}M or fewer ranks"
        )
    settings = Settings(
        operation=operation,
        sizes=list(_sizes(minbytes, last, stepbytes, stepfactor)),
        dtype=datatype,
        iterations=iters,
        warmup=warmup_iters,
        check=check or "",
        seed=seed,
        cluster=unit.name,
        ranks=ranks,
        nodes=nodes,
        statistics=statistics,
        show_algorithm=show_algorithm,
        show_sizes=show_sizes,
        replica_groups=groups,
        pairs=pairs,
        report=str(report) if report else "",
        as_json=as_json,
    )
    plan = LaunchPlan(
        program=Program("trn_dist.cli.bench_rank", (json.dumps(dataclasses.asdict(settings)),), is_module=True),
        world_size=ranks,
        nodes=nodes,
        cluster=cluster,
        prefixed=False,
    )
    start(plan)
