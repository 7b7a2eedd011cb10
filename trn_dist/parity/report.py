"""A comparison shown: a table on the terminal, curves with the rounding band as PNG, one HTML page, JSON.

Called by :mod:`trn_dist.cli.parity`. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import dataclasses
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
from trn_dist.report.page import as_page

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


_HEADINGS = ("layout", "clipping", "verdict", "worst at", "deviation", "bound", "ratio")


def _row(comparison: Comparison, verdict: Verdict) -> list[str]:
    clipping = f"at {_mode(comparison, verdict).max_norm:g}" if verdict.clipped else "off"
    return [verdict.layout, clipping, _title(verdict), *_figures(verdict)]


def print_table(comparison: Comparison, console: Console) -> None:
    """One row for each layout and clipping mode; below, the reason for each that does not pass."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for verdict in comparison.verdicts:
        layout, clipping, title, *figures = _row(comparison, verdict)
        table.add_row(layout, clipping, Text(title, style=_COLOURS[verdict.kind]), *figures)
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


def as_html(comparison: Comparison, picture: bytes) -> str:
    """One page that needs nothing beside itself: the table, the picture, the commands, the figures as JSON."""
    return as_page(
        "parity.html",
        title=f"Parity of {comparison.recipe.name}",
        comparison=comparison,
        passed=sum(verdict.kind.passes for verdict in comparison.verdicts),
        headings=(*_HEADINGS, "reason"),
        rows=[(verdict.kind.passes, [*_row(comparison, verdict), verdict.reason]) for verdict in comparison.verdicts],
        commands=[(name, shlex.join(words)) for name, words in comparison.commands.items()],
        picture=picture,
        data=as_json(comparison),
    )


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
