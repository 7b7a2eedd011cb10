"""``trn flight``: who is behind, and where, by the flight records that the ranks of a failed run have left.

Reads the files of neuron groups and those that PyTorch writes for NCCL and Gloo, pickled or JSON.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

_EXIT_CODES = """\b
Exit codes:
  0  every recorded call was completed
  1  a rank is behind, ranks called different things, or calls were not completed
  2  wrong arguments, or no record could be read
"""
# Their ranks may give tensors of different sizes.
_UNEVEN = ("scatter", "all_to_all", "all_gather_v", "reduce_scatter_v")
_NAME = re.compile(r"(?P<prefix>.*?)(?P<rank>\d+)(\.json)?")


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dictionaries: a file cannot have anything run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a flight record holds plain data only")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one rank."""

    sequence: int
    operation: str
    shapes: str
    dtypes: str
    site: str
    completed: bool

    def __str__(self) -> str:
        what = " of ".join(part for part in (self.operation, f"{self.dtypes} {self.shapes}".strip()) if part)
        return f"#{self.sequence}, {what}{' at ' + self.site if self.site else ''}"

    @property
    def agreed(self) -> tuple[str, ...]:
        """What all ranks must say alike."""
        if self.operation.startswith(_UNEVEN):
            return self.operation, self.dtypes
        return self.operation, self.dtypes, self.shapes


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """What became of one group.

    Attributes:
        group: its name.
        ranks: whose records speak of it.
        unrecorded: its ranks that have left no record.
        behind: by rank, the last call of those that have called fewer collectives than others; None: none at all.
        waiting: by rank, the oldest collective that it has not completed.
        differ: the first collective in which ranks called different things, by rank.
        messages: by rank, the sends and receives that were not completed.
    """

    group: str
    ranks: list[int]
    unrecorded: list[int]
    behind: dict[int, Call | None]
    waiting: dict[int, Call]
    differ: dict[int, Call]
    messages: dict[int, list[Call]]

    @property
    def fine(self) -> bool:
        return not (self.behind or self.waiting or self.differ or self.messages)


def read_records(folder: Path, prefix: str | None) -> dict[int, dict[str, Any]]:
    """The records in ``folder`` by rank; files whose names end in a rank's number count.

    Raises:
        click.UsageError: there is none, a file is no flight record, or several runs lie there and ``prefix`` is None.
    """
    files: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and path.is_file() and (prefix is None or match["prefix"] == prefix):
            files[match["prefix"]][int(match["rank"])] = path
    if not files:
        raise click.UsageError(f"no flight record in {folder}: files are named PREFIX0, PREFIX1, ... by rank")
    if len(files) > 1:
        raise click.UsageError(f"records of several runs in {folder}: choose one by --prefix {' or '.join(files)}")
    records = {}
    for rank, path in next(iter(files.values())).items():
        try:
            with path.open("rb") as file:
                record = json.load(file) if file.peek(1)[:1] == b"{" else _PlainUnpickler(file).load()
            entries = record.get("entries", [])
            record["entries"] = sorted(entries, key=lambda entry: entry["record_id"])
        except (pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError, EOFError, IndexError) as error:
            raise click.UsageError(f"{path} is no flight record: {error}") from None
        records[rank] = record
    return records


def _call(entry: dict[str, Any]) -> Call:
    frames = entry.get("frames") or []
    # PyTorch's recorder lists every frame, the innermost first.
    frame = next((frame for frame in frames if "/site-packages/torch/" not in frame["filename"]), None)
    return Call(
        sequence=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        operation=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        shapes=" ".join(str(list(shape)) for shape in entry["input_sizes"]),
        dtypes=" ".join(dict.fromkeys(entry["input_dtypes"])),
        site=f"{frame['filename']}:{frame['line']} ({frame['name']})" if frame else "",
        completed=entry["state"] == "completed",
    )


def analyse(records: dict[int, dict[str, Any]]) -> list[GroupReport]:
    """What became of each group that the records speak of. Collectives are matched by their number in the group."""
    collectives: dict[str, dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    messages: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    members: dict[str, set[int]] = defaultdict(set)
    for rank, record in records.items():
        for name, group in record.get("pg_config", {}).items():
            members[name].update(json.loads(group["ranks"]))
        for entry in record["entries"]:
            name = entry["process_group"][0]
            members[name].add(rank)
            call = _call(entry)
            if not entry["is_p2p"]:
                collectives[name][rank][call.sequence] = call
            elif not call.completed:
                messages[name][rank].append(call)
    reports = []
    for name in sorted(members):
        calls = collectives[name]
        recorded = sorted(rank for rank in members[name] if rank in records)
        last = max((max(by_number) for by_number in calls.values() if by_number), default=-1)
        behind = {
            rank: calls[rank][max(calls[rank])] if calls.get(rank) else None
            for rank in recorded
            if last >= 0 and max(calls.get(rank) or [-1]) < last
        }
        waiting = {}
        for rank in recorded:
            open_calls = [call for _, call in sorted(calls.get(rank, {}).items()) if not call.completed]
            if open_calls:
                waiting[rank] = open_calls[0]
        differ: dict[int, Call] = {}
        for number in sorted({number for by_number in calls.values() for number in by_number}):
            here = {rank: calls[rank][number] for rank in recorded if number in calls.get(rank, {})}
            unfinished = any(not call.completed for call in here.values())
            if unfinished and len({call.agreed for call in here.values()}) > 1:
                differ = here
                break
        reports.append(
            GroupReport(
                group=name,
                ranks=recorded,
                unrecorded=sorted(members[name] - set(records)),
                behind=behind,
                waiting=waiting,
                differ=differ,
                messages=dict(messages[name]),
            )
        )
    return reports


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _by_call(calls: dict[int, Call]) -> list[str]:
    lines: dict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        lines[str(call)].append(rank)
    return [f"    {_ranks(ranks)}: {line}" for line, ranks in lines.items()]


def describe(report: GroupReport) -> str:
    """The report in words."""
    lines = [f"group {report.group}, {_ranks(report.ranks)}"]
    if report.unrecorded:
        lines.append(f"  no record of {_ranks(report.unrecorded)}")
    for rank, call in report.behind.items():
        lines.append(f"  rank {rank} is behind: " + (f"its last call is {call}" if call else "it has called nothing"))
    if report.differ:
        lines += ["  different calls:", *_by_call(report.differ)]
    elif report.waiting:
        lines += ["  not completed:", *_by_call(report.waiting)]
    for rank, calls in report.messages.items():
        lines += [f"  rank {rank} has not completed {call}" for call in calls]
    if report.fine:
        lines.append("  every call was completed")
    return "\n".join(lines)


@click.command(name="flight", epilog=_EXIT_CODES)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prefix", help="What the names of the files begin with, if records of several runs lie in FOLDER.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def flight(folder: Path, prefix: str | None, as_json: bool) -> None:
    """Say which rank is behind, and where in its program, by the flight records in FOLDER.

    Ranks leave them when a collective fails, if TORCH_FR_DUMP_TEMP_FILE says where:

    \b
    TORCH_FR_DUMP_TEMP_FILE=/tmp/run1/rank torchrun --nproc-per-node 8 train.py
    trn flight /tmp/run1
    """
    reports = analyse(read_records(folder, prefix))
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(report), "fine": report.fine} for report in reports], indent=2))
    else:
        click.echo("\n".join(describe(report) for report in reports))
    sys.exit(0 if all(report.fine for report in reports) else 1)
