"""A comparison shown: a table on the terminal, curves with the rounding band as PNG, one HTML page, JSON.

Called by :mod:`trn_dist.cli.parity`. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trn_dist.parity.comparison import Comparison, Mode
from trn_dist.parity.verdict import QUANTITIES, WORDS, Kind, Verdict

_COLOURS = {
    Kind.BIT_EQUAL: "green",
    Kind.WITHIN_ROUNDING: "green",
    Kind.DIFFERENT: "red",
    Kind.FAILED: "red",
}


def _figures(verdict: Verdict) -> tuple[str, str, str, str]:
    """Where the worst step is, its deviation, bound and ratio."""
    worst = verdict.worst
    if worst is None:
        return "", "", "", ""
    where = f"{'loss' if worst.quantity == 'loss' else 'norm'} {worst.step}"
    return where, f"{worst.deviation:.2g}", f"{worst.bound:.2g}", f"{worst.ratio:.2g}"


def _title(verdict: Verdict) -> str:
    return f"bit-equal to {verdict.against}" if verdict.kind is Kind.BIT_EQUAL else verdict.kind.value


def print_table(comparison: Comparison, console: Console) -> None:
    """One row for each layout and clipping mode; below, the reason for each that does not pass."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layout", "clipping", "verdict", "worst at", "deviation", "bound", "ratio"):
        table.add_column(heading, overflow="fold")
    for verdict in comparison.verdicts:
        clipping = f"at {_mode(comparison, verdict).max_norm:g}" if verdict.clipped else "off"
        table.add_row(verdict.layout, clipping, Text(_title(verdict), style=_COLOURS[verdict.kind]), *_figures(verdict))
    console.print(table)
    for verdict in comparison.verdicts:
        if not verdict.kind.passes:
            clipping = "clipped" if verdict.clipped else "unclipped"
            # Text, not markup: brackets in an error message are its own.
            console.print(Text(f"{verdict.layout} ({clipping}) {verdict.kind.value}: {verdict.reason}"))
    passed = sum(verdict.kind.passes for verdict in comparison.verdicts)
    console.print(
        f"{passed} of {len(comparison.verdicts)} pass; reference {comparison.reference}, {comparison.steps} steps of "
        f"{comparison.global_batch_size} samples, {comparison.sums.dtype}",
        highlight=False,
    )


def _mode(comparison: Comparison, verdict: Verdict) -> Mode:
    return next(mode for mode in comparison.modes if mode.clipped == verdict.clipped)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything of a comparison, in plain JSON types (NaN and infinity as text)."""

    def number(value: float) -> float | str:
        return value if math.isfinite(value) else repr(value)

    def numbers(values: Any) -> list[float | str]:
        return [number(float(value)) for value in values]

    return {
        "recipe": str(comparison.recipe),
        "reference": comparison.reference,
        "steps": comparison.steps,
        "global_batch_size": comparison.global_batch_size,
        "passes": comparison.passes,
        "sums": dataclasses.asdict(comparison.sums),
        "commands": {name: shlex.join(words) for name, words in comparison.commands.items()},
        "verdicts": [
            {
                "layout": verdict.layout,
                "clipped": verdict.clipped,
                "verdict": verdict.kind.value,
                "reason": verdict.reason,
                "against": verdict.against,
                "first_step": verdict.first_step,
                "worst": None
                if verdict.worst is None
                else {
                    "quantity": verdict.worst.quantity,
                    "step": verdict.worst.step,
                    "deviation": number(verdict.worst.deviation),
                    "bound": number(verdict.worst.bound),
                    "ratio": number(verdict.worst.ratio),
                },
            }
            for verdict in comparison.verdicts
        ],
        "modes": [
            {
                "max_norm": number(mode.max_norm),
                "curves": {
                    name: {quantity: numbers(curve) for quantity, curve in curves.items()}
                    for name, curves in mode.curves.items()
                },
                "bounds": {
                    quantity: {
                        "floor": numbers(bound.floor),
                        "spread": numbers(bound.spread),
                        "quantile": bound.quantile,
                        "total": numbers(bound.total),
                    }
                    for quantity, bound in mode.bounds.items()
                },
            }
            for mode in comparison.modes
        ],
    }


def draw(comparison: Comparison) -> bytes:
    """PNG: for each mode and quantity the curves, and below them each layout's deviation with the rounding band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    columns = [(mode, quantity) for mode in comparison.modes for quantity in QUANTITIES]
    figure, axes = pyplot.subplots(2, len(columns), figsize=(4.2 * len(columns), 6.4), squeeze=False, sharex=True)
    steps = np.arange(1, comparison.steps + 1)
    for (mode, quantity), (above, below) in zip(columns, axes.T, strict=True):
        base = np.asarray(mode.curves[comparison.reference][quantity])
        bound = mode.bounds[quantity].total
        for name, curves in mode.curves.items():
            style = {"color": "black", "linewidth": 2.0} if name == comparison.reference else {"linewidth": 1.0}
            above.plot(steps, curves[quantity], label=name, **style)
            if name != comparison.reference:
                # A logarithmic axis has no zero: equal bits are drawn at the lower edge.
                deviation = np.abs(np.asarray(curves[quantity]) - base)
                below.plot(steps, np.maximum(deviation, np.abs(base) * 2.0**-28), marker=".", linewidth=1.0, label=name)
        below.fill_between(steps, np.abs(base) * 2.0**-28, bound, color="0.85", label="rounding")
        below.set_yscale("log")
        clipping = f"clipped at {mode.max_norm:g}" if mode.clipped else "clipping off"
        above.set_title(f"{WORDS[quantity]}, {clipping}", fontsize=10)
        below.set_xlabel("step")
        below.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes[0][0].set_ylabel("value")
    axes[1][0].set_ylabel(f"|deviation from {comparison.reference}|")
    handles, labels = axes[0][0].get_legend_handles_labels()
    band, name = axes[1][0].get_legend_handles_labels()
    handles, labels = [*handles, band[-1]], [*labels, name[-1]]
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.04 + 0.03 * (len(labels) // 6 + 1), 1, 1))
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    pyplot.close(figure)
    return stream.getvalue()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top;
border-bottom: 1px solid #ddd } .pass { color: #0a7d28 } .fail { color: #b3191e; font-weight: 600 }
img { max-width: 100% } code { font-size: 12px; overflow-wrap: anywhere } .note { color: #555 }
@media (prefers-color-scheme: dark) { body { background: #fff } }
"""


def as_html(comparison: Comparison, picture: bytes) -> str:
    """One page that needs nothing beside itself: the table, the picture, the commands, the figures as JSON."""

    def cell(text: str, style: str = "") -> str:
        return f"<td{f' class={style}' if style else ''}>{html.escape(text)}</td>"

    rows = []
    for verdict in comparison.verdicts:
        clipping = f"at {_mode(comparison, verdict).max_norm:g}" if verdict.clipped else "off"
        style = "pass" if verdict.kind.passes else "fail"
        cells = [cell(verdict.layout), cell(clipping), cell(_title(verdict), style)]
        rows.append("<tr>" + "".join([*cells, *map(cell, _figures(verdict)), cell(verdict.reason)]) + "</tr>")
    headings = "".join(
        f"<th>{name}</th>"
        for name in ("layout", "clipping", "verdict", "worst at", "deviation", "bound", "ratio", "reason")
    )
    commands = "".join(
        f"<p>{html.escape(name)}<br><code>{html.escape(shlex.join(words))}</code></p>"
        for name, words in comparison.commands.items()
    )
    # "</" would end the script element.
    data = json.dumps(as_json(comparison)).replace("</", "<\\/")
    passed = sum(verdict.kind.passes for verdict in comparison.verdicts)
    encoded = base64.b64encode(picture).decode()
    title = f"Parity of {comparison.recipe.name}"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>
<h1>{html.escape(title)}</h1>
<p>{passed} of {len(comparison.verdicts)} pass. Reference {html.escape(comparison.reference)}, {comparison.steps} steps
of {comparison.global_batch_size} samples, {comparison.sums.dtype}, all from the same initial weights and batches.</p>
<table><tr>{headings}</tr>{"".join(rows)}</table>
<p><img alt="Curves and deviations of all layouts" src="data:image/png;base64,{encoded}"></p>
<p class="note">The band is what rounding alone can do: the rounding of the step's last sum, and Student's quantile
times the spread of runs of the reference in which everything is moved by rounding units. Deviations of zero are
drawn at the lower edge.</p>
<h2>Commands that repeat the runs</h2>{commands}
<script type="application/json" id="comparison">{data}</script>
</html>
"""


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes ``parity.json``, ``parity.png`` and ``parity.html``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = draw(comparison)
    files = {
        "parity.json": (json.dumps(as_json(comparison), indent=1) + "\n").encode(),
        "parity.png": picture,
        "parity.html": as_html(comparison, picture).encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]
