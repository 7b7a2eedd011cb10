"""Many runs, one display: starts as many as the host's cores allow, takes finished ones from the cache.

Called by :mod:`trn_dist.parity.comparison` and :mod:`trn_dist.parity.divergence`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trn_dist.parity.training import RanksDisagree, RunFailed, RunningTraining, Training, finished_run
from trn_dist.titan.metrics import Step
from trn_dist.titan.progress import show_duration

_POLL_S = 0.1
Result = list[Step] | RunFailed


class RunQueue:
    """Makes runs and shows one bar over the steps of all of them; lines only where the output is no terminal."""

    def __init__(self, cache: Path, stall_s: float = 300.0, cores: int | None = None, quiet: bool = False) -> None:
        """
        Args:
            cache: folder of finished runs.
            stall_s: a run without a new step for so long is ended.
            cores: ranks that run at a time, each computes on one core; default all of the host. A run of more ranks
                runs alone.
            quiet: show nothing.
        """
        self.cache = cache
        self.stall_s = stall_s
        self.cores = cores or len(os.sched_getaffinity(0))
        self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        cache.mkdir(parents=True, exist_ok=True)

    def run(self, trainings: Sequence[tuple[str, Training]]) -> dict[str, Result]:
        """Makes the named runs; a run that fails gives its error in place of its steps. Equal runs are made once."""
        results: dict[str, Result] = {}
        waiting: list[tuple[str, Training]] = []
        for name, training in trainings:
            steps = finished_run(training, self.cache)
            if steps is None:
                waiting.append((name, training))
            else:
                results[name] = steps
                self.console.print(f"{name}: from the cache")
        total = sum(training.steps for _, training in waiting)
        running: dict[str, tuple[RunningTraining, float]] = {}
        with self._progress() as bar:
            task = bar.add_task("starting", total=total)
            done = 0
            try:
                while waiting or running:
                    busy = [run for run, _ in running.values() if not run.resting]
                    free = self.cores - sum(run.training.layout.ranks for run in busy)
                    keys = {run.training.key for run, _ in running.values()}
                    for name, training in list(waiting):
                        if training.key in keys or (training.layout.ranks > free and busy):
                            continue
                        waiting.remove((name, training))
                        steps = finished_run(training, self.cache)
                        if steps is not None:
                            results[name] = steps
                            done += training.steps
                            continue
                        running[name] = RunningTraining(training, self.cache, self.stall_s), time.monotonic()
                        busy.append(running[name][0])
                        keys.add(training.key)
                        free -= training.layout.ranks
                    for name, (run, started) in list(running.items()):
                        try:
                            if not run.poll():
                                continue
                            results[name] = run.steps
                            ending = f"{len(run.steps)} steps in {show_duration(time.monotonic() - started)}"
                        except RunFailed as error:
                            run.stop()
                            results[name] = error
                            ending = "its ranks disagree" if isinstance(error, RanksDisagree) else "failed"
                        del running[name]
                        done += run.training.steps
                        self.console.print(f"{name}: {ending}")
                    reached = done + sum(len(run.steps) for run, _ in running.values())
                    bar.update(task, completed=reached, description=", ".join(running) or "done")
                    time.sleep(_POLL_S)
            finally:
                for run, _ in running.values():
                    run.stop()
        return results

    def _progress(self) -> Progress:
        columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        return Progress(
            *columns,
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
