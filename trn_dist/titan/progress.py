"""What a person sees of a run: a line a step, a bar for the run if the output is a terminal, a summary at the end.

Also writes the run's ``metrics.jsonl``, one line a step, from the same :class:`~trn_dist.titan.metrics.Step`. Runs in a
thread of the process that launched the ranks, because the launcher keeps the main thread; imports no torch. Called by
:mod:`trn_dist.titan.train`.
"""

import threading
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trn_dist.titan.metrics import METRICS_FILE, InconsistentRanks, Prediction, Step, StepMerger, keep_steps_before

_POLL_S = 0.1


def show_bytes(count: int) -> str:
    """Memory for people: 31.4 MiB, 2.17 GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def show_duration(seconds: float) -> str:
    """A time for people: 41 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def show_short(seconds: float) -> str:
    """A step's time: 1.234 s, 12.3 ms."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def show_prediction(predicted: Prediction) -> str:
    """What the modelled cluster would do: step time, throughput, utilisation."""
    return (
        f"{predicted.cluster} predicted: {show_short(predicted.step_time_s)} a step, "
        f"{predicted.tokens_per_s_per_chip:,.0f} tokens/s/chip, MFU {predicted.mfu_percent:.2f} %"
    )


def show_parts(predicted: Prediction) -> str:
    """Where a predicted step goes, the largest part first; parts below half a percent are left to the file."""
    total = sum(predicted.parts_s.values()) or 1.0
    parts = sorted(predicted.parts_s.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {100 * time / total:.1f} %" for name, time in parts if time / total >= 0.005)


def show_step(step: Step, last_step: int) -> str:
    width = len(str(last_step))
    peak = show_bytes(step.hbm_reserved_peak_bytes)
    predicted = f"   {show_prediction(step.predicted)}" if step.predicted is not None else ""
    return (
        f"step {step.step:>{width}}/{last_step}   loss {step.loss:8.5f}   grad norm {step.grad_norm:8.4f}   "
        f"{step.tokens_per_s:7,.0f} tokens/s   HBM peak {peak} (rank {step.hbm_peak_rank}){predicted}"
    )


class RunProgress:
    """Follows the ranks' metrics files from :meth:`start` to :meth:`finish` and shows and records each step."""

    def __init__(
        self,
        run_dir: Path,
        ranks: int,
        tokens_per_step: int,
        last_step: int,
        bar: bool | None = None,
        stream: TextIO | None = None,
        ranks_each: int = 1,
    ) -> None:
        """``bar``: show a bar; None decides by whether ``stream``, by default stdout, is a terminal.

        ``ranks_each``: for how many each of the ``ranks`` stands (timing mode).
        """
        self.first: Step | None = None
        self.last: Step | None = None
        self.error: InconsistentRanks | None = None
        self.unwritten: OSError | None = None  # why metrics.jsonl does not hold all steps
        self._file = run_dir / METRICS_FILE
        self._merger = StepMerger(run_dir, ranks, tokens_per_step, ranks_each)
        self._ranks = ranks
        self._last_step = last_step
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if self._console.is_terminal if bar is None else bar:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
            times = (TimeElapsedColumn(), TextColumn("remaining"), TimeRemainingColumn())
            self._bar = Progress(*columns, *times, console=self._console, transient=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trn:progress", daemon=True)

    def start(self) -> None:
        self._started = time.monotonic()
        if self._bar is not None:
            self._task = self._bar.add_task(f"starting {self._ranks} ranks", total=self._last_step)
            self._bar.start()
        self._thread.start()

    def finish(self) -> float:
        """Shows what is still to be shown, ends the bar; returns the seconds since :meth:`start`."""
        self._stop.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()
        return time.monotonic() - self._started

    def _follow(self) -> None:
        try:
            while not self._stop.wait(_POLL_S):
                self._take_new_steps()
            self._take_new_steps()
        except InconsistentRanks as error:
            self.error = error
        except OSError as error:  # what shows the steps is full
            self.unwritten = error

    def _take_new_steps(self) -> None:
        for step in self._merger.new_steps():
            try:
                if self.first is None:
                    keep_steps_before(self._file, step.step)
                with self._file.open("a", encoding="utf-8") as stream:
                    stream.write(step.as_json() + "\n")
            except OSError as error:
                self.unwritten = error
            self.first = self.first or step
            self.last = step
            self._console.print(show_step(step, self._last_step))
            if self._bar is not None:
                self._bar.update(self._task, completed=step.step, description="training")
