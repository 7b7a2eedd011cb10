"""Run folders of ``trn train`` shown: one run by its steps and where the last one goes, several side by side.

Called by :mod:`trn_dist.cli.report`. It reads ``run.json`` and ``metrics.jsonl`` (:mod:`trn_dist.titan.train` writes
them) and changes nothing, so it works while a run goes on and after one that was killed. matplotlib is imported when a
picture is drawn.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trn_dist.report.page import as_page
from trn_dist.titan.metrics import LAST_STEP_TABLE, METRICS_FILE, Prediction, Step
from trn_dist.titan.progress import show_bytes, show_duration, show_short
from trn_dist.titan.train import FACTS_FILE, finite

_SHOWN_STEPS = 12
"""Steps of a run on the terminal; a page has them all."""


class RunFolderError(ValueError):
    """A folder is not that of a run, or a file in it is damaged."""


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        folder: as the user named it.
        facts: of ``run.json``.
        steps: that all ranks completed, in order.
        last_step_table: in timing mode, how the last step is spent, operator by operator; else empty.
    """

    folder: Path
    facts: dict[str, Any]
    steps: list[Step]
    last_step_table: str

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def ended(self) -> bool:
        return "exit_code" in self.facts

    @property
    def failed(self) -> bool:
        return bool(self.facts.get("exit_code"))

    @property
    def outcome(self) -> str:
        if not self.ended:
            return "still going on, or its launcher was killed"
        duration = show_duration(self.facts["duration_s"])
        if self.failed:
            return f"ended early after {duration}, exit code {self.facts['exit_code']}"
        return f"done in {duration}"


def read_run(folder: Path) -> Run:
    """Reads a run folder.

    Raises:
        RunFolderError: it is none, or a file in it is damaged; a last line that is still being written is not.
    """
    facts = _read_facts(folder)
    table = folder / LAST_STEP_TABLE
    return Run(
        folder, facts, _read_steps(folder / METRICS_FILE), table.read_text(encoding="utf-8") if table.exists() else ""
    )


def _read_facts(folder: Path) -> dict[str, Any]:
    file = folder / FACTS_FILE
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        for name in ("recipe", "model", "layout", "ranks", "started"):
            facts[name]
    except FileNotFoundError:
        raise RunFolderError(f"{folder}: no run folder of `trn train` (there is no {FACTS_FILE})") from None
    except (ValueError, TypeError) as error:
        raise RunFolderError(f"{file}: not what `trn train` writes: {error}") from None
    except KeyError as error:
        raise RunFolderError(f"{file}: not what `trn train` writes: {error} is missing") from None
    return facts


def _read_steps(file: Path) -> list[Step]:
    try:
        whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    except FileNotFoundError:  # no step was completed
        return []
    steps = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            values = json.loads(line)
            predicted = values.pop("predicted")
            steps.append(Step(**values, predicted=None if predicted is None else Prediction(**predicted)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(f"{file}, line {number}: not what `trn train` writes: {error}") from None
    return steps


def newest_run(runs: Path) -> Path:
    """The run folder in ``runs`` that was started last. Raises RunFolderError when there is none."""
    folders = [file.parent for file in runs.glob(f"*/{FACTS_FILE}") if file.is_file()]
    if not folders:
        raise RunFolderError(f"no run folder in {runs}; name one, or make one with `trn train`")
    return max(folders, key=lambda folder: _read_facts(folder)["started"])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


_STEP_HEADINGS = ("step", "loss", "grad norm", "tokens/s here", "HBM peak", "predicted", "tokens/s/chip", "MFU %")


def _step_row(step: Step) -> list[str]:
    predicted = step.predicted
    return [
        str(step.step),
        _number(step.loss, ".5f"),
        _number(step.grad_norm, ".4f"),
        _number(step.tokens_per_s, ",.0f"),
        show_bytes(step.hbm_reserved_peak_bytes),
        *_prediction_cells(predicted),
    ]


def _prediction_cells(predicted: Prediction | None) -> list[str]:
    if predicted is None:
        return ["-", "-", "-"]
    return [
        show_short(predicted.step_time_s),
        _number(predicted.tokens_per_s_per_chip, ",.0f"),
        _number(predicted.mfu_percent, ".2f"),
    ]


def _facts(run: Run) -> list[tuple[str, str]]:
    """What ran, in words."""
    facts = run.facts
    predicted = run.steps[-1].predicted if run.steps else None
    text = facts.get("text", {})
    versions = facts.get("versions", {})
    lines = [
        ("result", run.outcome + ("" if run.steps else ": no step was completed")),
        ("model", facts["model"]),
        ("layout", f"{facts['layout']}, {facts['ranks']} ranks"),
        ("batch", f"{facts.get('global_batch_size', '?')} samples, {facts.get('tokens_per_step', '?')} tokens a step"),
        ("text", " ".join(str(text[key]) for key in ("dataset", "fingerprint") if key in text)),
        ("recipe", facts["recipe"]),
        ("started", facts["started"]),
        ("versions", ", ".join(f"{package} {version}" for package, version in versions.items())),
    ]
    if predicted is not None:
        lines.insert(3, ("cluster", f"{predicted.cluster} (simulated)"))
    if predicted is not None and predicted.irreproducible:
        lines.append(("predicted times", f"may differ from run to run: {predicted.irreproducible}"))
    lines.extend(("fault", fault) for fault in facts.get("faults", ()))
    if run.failed:
        lines.append(("what the ranks printed", str(run.folder / "logs")))
    return [(name, value) for name, value in lines if value]


def _parts(run: Run) -> list[tuple[str, str, str]]:
    """Where the last step goes on the modelled cluster, the largest part first: name, time, share."""
    predicted = run.steps[-1].predicted if run.steps else None
    if predicted is None or not predicted.step_time_s:
        return []
    parts = sorted(predicted.parts_s.items(), key=lambda part: -part[1])
    return [(name, show_short(time), f"{100 * time / predicted.step_time_s:.1f} %") for name, time in parts if time > 0]


_RUN_HEADINGS = ("run", "layout", "ranks", "steps", "loss", "grad norm", "HBM peak", *_STEP_HEADINGS[5:], "result")


def _run_row(run: Run) -> list[str]:
    """The run in a line: figures of its last step, and the highest memory of all its steps."""
    head = [run.name, run.facts["layout"], str(run.facts["ranks"])]
    if not run.steps:
        return [*head, "0", "-", "-", "-", "-", "-", "-", run.outcome]
    last = run.steps[-1]
    return [
        *head,
        str(last.step),
        _number(last.loss, ".5f"),
        _number(last.grad_norm, ".4f"),
        show_bytes(max(step.hbm_reserved_peak_bytes for step in run.steps)),
        *_prediction_cells(last.predicted),
        run.outcome,
    ]


def differences(runs: list[Run]) -> list[str]:
    """Why the losses of these runs are not comparable, a sentence each."""
    reasons = []
    for key, what in (
        ("model", "models"),
        ("text", "texts"),
        ("tokenizer_sha256", "tokenizers"),
        ("global_batch_size", "global batch sizes"),
        ("tokens_per_step", "numbers of tokens a step"),
        ("versions", "versions"),
    ):
        values = [run.facts.get(key) for run in runs]
        if any(value != values[0] for value in values):
            reasons.append(f"These runs have different {what}: their losses need not agree.")
    return reasons


def _chosen(steps: list[Step]) -> list[Step]:
    """At most ``_SHOWN_STEPS``, evenly spaced, with the first and the last."""
    if len(steps) <= _SHOWN_STEPS:
        return steps
    return [steps[round(place * (len(steps) - 1) / (_SHOWN_STEPS - 1))] for place in range(_SHOWN_STEPS)]


def _print_table(headings: tuple[str, ...], rows: list[list[str]], text_columns: int, console: Console) -> None:
    """The first ``text_columns`` columns to the left, figures to the right. Columns that do not fit beside the others
    follow in another table, with the first column again.
    """
    widths = [3 + max(map(len, column)) for column in zip(headings, *rows, strict=True)]  # two blanks and a divider
    blocks = [[0]]
    for column in range(1, len(headings)):
        if len(blocks[-1]) > 1 and sum(widths[shown] for shown in (*blocks[-1], column)) - 1 > console.width:
            blocks.append([0])
        blocks[-1].append(column)
    for block in blocks:
        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in block:
            table.add_column(headings[column], overflow="fold", justify="left" if column < text_columns else "right")
        for row in rows:
            table.add_row(*(Text(row[column]) for column in block))
        console.print(table)


def print_runs(runs: list[Run], console: Console) -> None:
    """One run: facts, steps, where the last step goes. Several: a row each and what makes them incomparable."""
    if len(runs) > 1:
        _print_table(_RUN_HEADINGS, [_run_row(run) for run in runs], 2, console)
        for reason in differences(runs):
            console.print(reason)
        return
    (run,) = runs
    console.print(Text(run.name, style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in _facts(run):
        grid.add_row(Text(name, style="dim"), Text(value, style="red" if name == "result" and run.failed else ""))
    console.print(grid)
    if run.steps:
        _print_table(_STEP_HEADINGS, [_step_row(step) for step in _chosen(run.steps)], 0, console)
    if parts := _parts(run):
        console.print(f"predicted step {run.steps[-1].step} of the slowest rank:", highlight=False)
        _print_table(("part", "time", "share"), [list(part) for part in parts], 1, console)


def as_json(runs: list[Run]) -> list[dict[str, Any]]:
    """Everything of the runs, in plain JSON types: no number is null."""
    return [
        {
            "run_folder": str(run.folder),
            **finite(run.facts),
            "steps": [finite(dataclasses.asdict(step)) for step in run.steps],
        }
        for run in runs
    ]


def draw(runs: list[Run]) -> bytes:
    """PNG: loss and gradient norm by step, and below them where the last step of each run goes.

    Raises:
        ValueError: no run has completed a step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    runs = [run for run in runs if run.steps]
    if not runs:
        raise ValueError("no run has completed a step: there is nothing to draw")
    learned = [run for run in runs if any(math.isfinite(step.loss) for step in run.steps)]
    timed = [(run, prediction) for run in runs if (prediction := run.steps[-1].predicted) is not None]
    rows = bool(learned) + bool(timed)
    heights = [*([4.0] if learned else []), *([1.6 + 0.5 * len(timed)] if timed else [])]
    figure = pyplot.figure(figsize=(11, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(max(rows, 1), 2, height_ratios=heights or None)
    if learned:
        for place, (quantity, title) in enumerate((("loss", "loss"), ("grad_norm", "gradient norm"))):
            axes = figure.add_subplot(grid[0, place])
            for run in learned:
                values = [getattr(step, quantity) for step in run.steps]
                axes.plot([step.step for step in run.steps], values, label=run.name, linewidth=1.2)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            if len(learned) > 1:
                axes.legend(fontsize=7)
    if timed:
        axes = figure.add_subplot(grid[rows - 1, :])
        names = sorted({name for _, prediction in timed for name, time in prediction.parts_s.items() if time > 0})
        colours = pyplot.get_cmap("tab20")
        left = [0.0] * len(timed)
        for place, name in enumerate(names):
            times_ms = [1e3 * prediction.parts_s.get(name, 0.0) for _, prediction in timed]
            axes.barh([run.name for run, _ in timed], times_ms, left=left, label=name, color=colours(place % 20))
            left = [start + time for start, time in zip(left, times_ms, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("predicted time of the last step in ms")
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    pyplot.close(figure)
    return stream.getvalue()


def as_html(runs: list[Run]) -> str:
    """One page that needs nothing beside itself: the runs side by side, curves, and each with all its steps."""
    return as_page(
        "runs.html",
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        run_headings=_RUN_HEADINGS,
        step_headings=_STEP_HEADINGS,
        runs=[
            {
                "name": run.name,
                "failed": run.failed,
                "row": _run_row(run),
                "facts": _facts(run),
                "steps": [_step_row(step) for step in run.steps],
                "parts": _parts(run),
                "last_step_table": run.last_step_table,
            }
            for run in runs
        ],
        differences=differences(runs),
        picture=draw(runs) if any(run.steps for run in runs) else None,
        data=as_json(runs),
    )
