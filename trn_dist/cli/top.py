"""``trn top``: what the ranks of a running job do, live, as neuron-top shows it."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trn_dist.launcher.usage import Look, NoSuchRun, Usage, find_run, look_at, usages
from trn_dist.titan.progress import show_bytes

MEMORY_KINDS = ("parameters", "gradients", "optimizer_state", "other")
_HEAD_LINES = 12
_EPILOG = "Exit codes: 0; 1 when no rank answered; 2 when there is no such run."


def _core(of: Usage) -> str:
    cores = ",".join((of.look.figures or {}).get("memory", {})) or str(of.look.rank.local_rank)
    return f"{of.look.rank.node}:{cores}"


def _bar(share: float, width: int = 10) -> str:
    return "█" * round(share * width) + "·" * (width - round(share * width))


def ranks_table(rows: list[Usage], width: int) -> Table:
    """One line a rank; on a narrow terminal the most important columns only."""
    wide = width >= 115
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("rank", justify="right")
    if wide:
        table.add_column("node:core")
        table.add_column("pid", justify="right")
    table.add_column("core util", justify="right", no_wrap=True)
    if width >= 60:
        table.add_column("TFLOPS", justify="right")
        table.add_column("comm", justify="right")
        table.add_column("wait", justify="right")
    table.add_column("HBM", justify="right", no_wrap=True)
    if wide:
        table.add_column("virtual", justify="right", no_wrap=True)
        table.add_column("host CPU", justify="right")
        table.add_column("host RSS", justify="right", no_wrap=True)
    for row in rows:
        look = row.look
        cells: list[str | Text] = [str(look.rank.rank)]
        if wide:
            cells += [_core(row), str(look.rank.pid)]
        if look.problem:
            table.add_row(*cells, Text(look.problem, style="red"))
            continue
        bar = f"{_bar(row.utilization)} " if width >= 80 else ""
        cells.append(f"{bar}{100 * row.utilization:5.1f} %")
        if width >= 60:
            cells += [
                f"{row.flops_per_s / 1e12:.2f}",
                f"{100 * row.communication:.1f} %",
                f"{100 * row.waiting:.1f} %",
            ]
        cells.append(show_bytes(row.memory.get("reserved", 0)))
        if wide:
            cpu = f"{row.user_percent + row.system_percent:.0f} %" if row.period_s else "-"
            cells += [f"{1e3 * row.virtual_s:,.2f} ms", cpu, show_bytes(look.host_bytes)]
        table.add_row(*cells)
    return table


def view(launcher: int, rows: list[Usage], width: int, height: int | None) -> RenderableType:
    """The whole picture; ``height`` lines at most, all ranks without it."""
    answered = [row for row in rows if not row.look.problem]
    look = next((row.look for row in answered), rows[0].look)
    figures = look.figures or {}
    lines = [
        f"trn top: {look.rank.command[:60]} (pid {launcher})",
        f"{figures.get('world_size', len(rows))} ranks on {figures.get('cluster', '?')}, LNC={figures.get('lnc', '?')}",
        "utilization, TFLOPS and HBM are predicted, not measured",
    ]
    if answered:
        shares = [100 * row.utilization for row in answered]
        window_s = max(row.virtual_s for row in answered)
        over = "since the start" if not rows[0].period_s else "since the last look"
        lines.append(
            f"NeuronCore utilization: mean {statistics.fmean(shares):.1f} %, {min(shares):.1f} to {max(shares):.1f} % "
            f"of {1e3 * window_s:,.2f} ms of virtual time {over}"
        )
        if not window_s:
            lines.append("virtual time stands still: no rank has launched anything meanwhile (trn stacks says where)")
        fullest = max(answered, key=lambda row: row.memory.get("reserved", 0))
        memory = fullest.memory
        if memory:
            kinds = ", ".join(f"{kind.replace('_', ' ')} {show_bytes(memory[kind])}" for kind in MEMORY_KINDS)
            spare = memory["reserved"] - memory["tensors"]
            lines.append(
                f"HBM of rank {fullest.look.rank.rank}, the fullest: {show_bytes(memory['reserved'])} of "
                f"{show_bytes(memory['total'])} (peak {show_bytes(memory['reserved_peak'])}): "
                f"{kinds}, free in segments {show_bytes(spare)}"
            )
        reasons = sorted({(row.look.figures or {})["irreproducible"] for row in answered} - {""})
        if reasons:
            lines.append(f"predicted times may differ from run to run: {reasons[0]}")
    shown = rows if height is None else rows[: max(1, height - _HEAD_LINES)]
    parts: list[RenderableType] = [Text(line) for line in lines]
    parts.append(ranks_table(shown, width))
    if len(shown) < len(rows):
        parts.append(Text(f"{len(rows) - len(shown)} more ranks; --ranks 8-15 chooses"))
    return Group(*parts)


def as_json(launcher: int, rows: list[Usage]) -> dict[str, Any]:
    """The picture as plain data; shares in percent, memory in bytes by kind."""
    first = next((row.look.figures for row in rows if row.look.figures), {})
    return {
        "launcher": launcher,
        "command": rows[0].look.rank.command,
        "cluster": first.get("cluster"),
        "lnc": first.get("lnc"),
        "world_size": first.get("world_size"),
        "ranks": [
            {
                "rank": row.look.rank.rank,
                "pid": row.look.rank.pid,
                "node": row.look.rank.node,
                "cores": [int(core) for core in (row.look.figures or {}).get("memory", {})],
                "problem": row.look.problem or None,
                "period_s": row.period_s,
                "virtual_s": row.virtual_s,
                "neuroncore_utilization": 100 * row.utilization,
                "flops": row.flops_per_s,
                "parts": {name: 100 * share for name, share in row.parts.items()},
                "operators": row.launched,
                "collectives": row.collectives,
                "hbm_bytes": row.memory,
                "host_cpu_percent": {"user": row.user_percent, "system": row.system_percent},
                "host_bytes": row.look.host_bytes,
                "irreproducible": (row.look.figures or {}).get("irreproducible") or None,
            }
            for row in rows
        ],
    }


def parse_ranks(ctx: click.Context, parameter: click.Parameter, value: str | None) -> frozenset[int] | None:
    """``0-3,8`` as a set; None when the option was not given."""
    if value is None:
        return None
    chosen: set[int] = set()
    for part in value.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) < int(first):
            raise click.BadParameter(f"{value!r} is not a list of ranks such as 0-3,8")
        chosen.update(range(int(first), int(last or first) + 1))
    return frozenset(chosen)


@dataclasses.dataclass
class Watch:
    """Looks at one run again and again; each look is compared with the one before."""

    launcher: int
    ranks: frozenset[int] | None = None
    before: list[Look] = dataclasses.field(default_factory=list)

    def again(self) -> list[Usage]:
        """What the ranks did since the last call; empty when the run is over."""
        now = look_at(self.launcher)
        if self.ranks is not None:
            chosen = [look for look in now if look.rank.rank in self.ranks]
            if now and not chosen:
                last = max(look.rank.rank for look in now)
                raise click.BadParameter(f"no such rank; ranks go from 0 to {last}", param_hint="--ranks")
            now = chosen
        rows = usages(now, self.before)
        self.before = now
        return rows


def watch(pid: int | None, ranks: frozenset[int] | None = None) -> Watch:
    """Finds the run. Raises click.UsageError."""
    try:
        return Watch(find_run(pid), ranks)
    except NoSuchRun as error:
        raise click.UsageError(str(error)) from None


@click.command(name="top", epilog=_EPILOG)
@click.argument("pid", type=int, required=False)
@click.option(
    "--period-s", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Time between two looks."
)
@click.option("--ranks", callback=parse_ranks, metavar="0-3,8", help="Only these ranks.")
@click.option("--once", is_flag=True, help="Show one picture and end, as when the output is no terminal.")
@click.option("--json", "as_json_", is_flag=True, help="Print one picture as JSON and end.")
def top(pid: int | None, period_s: float, ranks: frozenset[int] | None, once: bool, as_json_: bool) -> None:
    """Show what the ranks of a run do: utilization of their cores on virtual time, and what lies in their memory.

    PID is the process of `trn run`, `trn train` or torchrun; it can be left out when only one run is there. On a
    terminal the picture is renewed until Ctrl-C or the end of the run. Ranks go on as if nobody looked.

    \b
    core util   share of virtual time in which an engine worked
    comm, wait  transfers that nothing covers, and waits for other ranks
    """
    seen = watch(pid, ranks)
    console = Console()
    rows = seen.again()
    if once or as_json_ or not console.is_terminal or console.is_dumb_terminal:
        time.sleep(period_s)
        rows = seen.again() or rows
        if not rows:
            raise click.ClickException("the run has ended")
        if as_json_:
            click.echo(json.dumps(as_json(seen.launcher, rows), indent=2))
        else:
            console.print(view(seen.launcher, rows, console.width, None))
        sys.exit(0 if any(not row.look.problem for row in rows) else 1)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while rows:
                live.update(view(seen.launcher, rows, console.width, console.height), refresh=True)
                time.sleep(period_s)
                rows = seen.again()
    except KeyboardInterrupt:
        return
    click.echo("trn top: the run has ended", err=True)
