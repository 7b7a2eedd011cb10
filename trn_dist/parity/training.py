"""One run of one layout: what decides its numbers, where its result is kept, and the process that makes it.

A run's ranks are forked from :mod:`trn_dist.parity.warm_process`; :mod:`trn_dist.parity.cpu_reference` makes those on
the CPU, and a layout can ask for ``trn train``, ``trn run`` or ``torchrun``. Its result, the metrics of every step,
is kept under a key that is a digest of everything the numbers depend on, so a finished run is never made twice.
Called by :mod:`trn_dist.parity.run_queue` and :mod:`trn_dist.parity.comparison`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import trn_dist
from trn_dist.parity.layout import Layout, LayoutError
from trn_dist.parity.replicas import find_disagreement
from trn_dist.parity.warm_process import LOGS, WarmRun, warm_process
from trn_dist.titan.metrics import InconsistentRanks, Step, StepMerger
from trn_dist.titan.recipe import Recipe, resolve, to_toml

_PACKAGE = Path(trn_dist.__file__).parent
_CPU_REFERENCE = _PACKAGE / "parity" / "cpu_reference.py"
_OBSERVER_IMPORT = "trn_dist.titan.observe"
_TERMINATE_S = 15.0
FINISHED = "finished.json"
RECIPE = "recipe.toml"


class RunFailed(RuntimeError):
    """A layout's run ended without its steps. The text holds the exit code and the end of what it printed."""


class RanksDisagree(RunFailed):
    """The run came to its end, but its ranks report different figures for what is the same on all of them.

    Attributes:
        step: the first step in which they do.
    """

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Training:
    """A run that can be started, or taken from the cache.

    Attributes:
        layout: whose run this is.
        recipe: the resolved recipe, the layout's overrides applied.
        overrides: all that were applied, to show the command that repeats the run.
        observer: ``module:function`` that is called in every rank with the built model, or None; see
            :mod:`trn_dist.titan.observe`.
        settings: what the observer reads, as environment variables.
    """

    layout: Layout
    recipe: Recipe
    overrides: tuple[str, ...]
    observer: str | None = None
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def steps(self) -> int:
        return self.recipe.config.training.steps

    @functools.cached_property
    def key(self) -> str:
        """Digest of everything that the numbers depend on, in hexadecimal."""
        import torch

        config = self.recipe.config
        facts: dict[str, Any] = {
            "recipe": _portable_toml(config),
            "on_cpu": self.layout.on_cpu,
            "way": (self.layout.rerun, self.layout.resume, self.layout.launch),
            "observer": self.observer,
            "settings": self.settings,
            "text": _text_fingerprint(self.recipe),
            "tokenizer": _digest_of([Path(config.model.hf_assets_path) / "tokenizer.json"]),
            "weights": _origin(config.checkpoint.initial_load_path),
            "code": _code_digest(self.layout.on_cpu, self.observer),
            "own_code": _module_digest(config.experimental.custom_import),
            "versions": {p: importlib.metadata.version(p) for p in ("torch", "torchtitan", "numpy")},
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "environment": {k: v for k, v in os.environ.items() if k.startswith("TRN_")},
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def command(self, folder: Path) -> list[str]:
        """The command that makes this run in ``folder``. Where no launcher was asked for, one that repeats it."""
        if not self.layout.on_cpu and self.layout.launch in (None, "train"):
            words = [sys.executable, "-m", "trn_dist.cli", "train", str(self.recipe.path), "--run-dir", str(folder)]
            # An observer of a run whose ranks are forked here is no part of what repeats its numbers.
            return [*words, *self.overrides, *(self._observer_overrides() if self.layout.launch else [])]
        ranks = str(self.layout.ranks)
        arguments = ["--job.config_file", str(folder / RECIPE)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        if self.layout.launch == "run":
            return [sys.executable, "-m", "trn_dist.cli", "run", "-n", ranks, "-m", "torchtitan.train", *arguments]
        if self.layout.launch == "torchrun":
            return [*torchrun, "-m", "torchtitan.train", *arguments]
        start = [sys.executable] if self.layout.ranks == 1 else torchrun
        return [*start, str(_CPU_REFERENCE), *arguments]

    def _observer_overrides(self) -> list[str]:
        return ["--experimental.custom_import", _OBSERVER_IMPORT] if self.observer else []

    def environment(self, folder: Path) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **dict(self.settings)}
        if self.observer:
            environment["TRN_OBSERVER"] = self.observer
            environment["TRN_OBSERVER_FOLDER"] = str(folder)
            environment["TRN_OBSERVED_IMPORT"] = self.recipe.config.experimental.custom_import
        if self.layout.on_cpu:
            environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
            # A script's own folder comes first on sys.path otherwise; modules that the recipe names are looked for in
            # the working folder, as `python -m` does for the other layouts.
            environment["PYTHONSAFEPATH"] = "1"
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
            if self.layout.ranks == 1:
                environment |= {name: "0" for name in ("RANK", "LOCAL_RANK")}
                environment |= {name: "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return environment

    def prepare(self, folder: Path, resumed: bool = False) -> None:
        """Makes the run folder and its recipe, if ``trn train`` does not write that by itself.

        A run that is resumed has two folders: the first keeps a checkpoint of the step, the second starts from that.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.layout.launch == "train":
            return
        config = resolve(self.recipe.path, [*self.overrides, *self._observer_overrides()]).config
        config.job.dump_folder = str(folder)
        config.job.config_file = None
        config.metrics.disable_color_printing = True
        if self.layout.resume is not None:
            config.checkpoint.load_only = False
            config.checkpoint.interval = self.layout.resume if not resumed else self.steps + 1
            if resumed:
                config.checkpoint.load_step = self.layout.resume
        (folder / RECIPE).write_text(to_toml(config), encoding="utf-8")


def plan_training(
    recipe: Path,
    overrides: list[str],
    layout: Layout,
    global_batch_size: int,
    observer: str | None = None,
    settings: tuple[tuple[str, str], ...] = (),
) -> Training:
    """A run of a layout; checks the recipe under that layout.

    Raises:
        RecipeError, LayoutError: the recipe cannot be trained so.
    """
    words = [*overrides, *layout.recipe_overrides(global_batch_size)]
    resolved = resolve(recipe, words)
    steps = resolved.config.training.steps
    if layout.resume is not None and layout.resume >= steps:
        raise LayoutError(
            f"layout {layout.text!r}: resume={layout.resume}: expected less than the {steps} steps of a run"
        )
    return Training(layout, resolved, tuple(words), observer, settings)


class RunningTraining:
    """A started run: followed by :meth:`poll`, ended by itself, by its deadline or by :meth:`stop`."""

    def __init__(self, training: Training, cache: Path, stall_s: float) -> None:
        self.training = training
        self.result = cache / training.key
        self.steps: list[Step] = []
        self.disagreement: RanksDisagree | None = None
        # Two comparisons may make the same run at the same time: each in a folder of its own, the first is kept.
        self.folder = cache / f"{training.key}-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self._stall_s = stall_s
        self._before_stop: list[Step] = []
        self._start(self.folder / "before_stop" if training.layout.resume is not None else self.folder)

    def _start(self, folder: Path, resumed: bool = False) -> None:
        training = self.training
        training.prepare(folder, resumed)
        self._merger = StepMerger(folder, training.layout.ranks, training.recipe.tokens_per_step)
        self._last_news = time.monotonic()
        self._process: subprocess.Popen[bytes] | WarmRun
        if training.layout.on_cpu or training.layout.launch is not None:
            with (folder / "output.log").open("wb") as output:
                self._process = subprocess.Popen(
                    training.command(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=training.environment(folder),
                    start_new_session=True,
                )
        else:
            environment = training.environment(folder)
            self._process = warm_process().start(folder, training.layout.ranks, folder / RECIPE, environment)

    def _resume(self) -> None:
        """Starts the second part from the checkpoint of the first."""
        stop = self.training.layout.resume
        assert stop is not None
        self._before_stop, self.steps = self.steps[:stop], self.steps[:stop]
        saved = self.folder / "before_stop" / "checkpoint" / f"step-{stop}"
        (self.folder / "checkpoint").mkdir()
        saved.rename(self.folder / "checkpoint" / saved.name)
        self._start(self.folder, resumed=True)

    @property
    def resting(self) -> bool:
        """All steps are there; what the ranks still do (TorchTitan sleeps for two seconds) needs no core."""
        return len(self.steps) == self.training.steps and (
            self.training.layout.resume is None or bool(self._before_stop)
        )

    def poll(self) -> bool:
        """Takes in new steps; True once the run has ended and its result lies in the cache.

        Raises:
            RanksDisagree: it has come to its end, and its ranks contradict each other.
            RunFailed: it ended too early or has stalled.
        """
        self._take_new_steps()
        exit_code = self._process.poll()
        stop = self.training.layout.resume
        if stop is not None and not self._before_stop and exit_code is None and self._last_step() > stop:
            # A step that is logged has its predecessor's checkpoint written.
            self.stop()
            self._resume()
            return False
        if exit_code is None:
            if time.monotonic() - self._last_news > self._stall_s:
                self.stop()
                raise RunFailed(
                    f"no new step for {self._stall_s:.0f} s after step {self._last_step()} of {self.training.steps}; "
                    f"ended. {self._tail()}"
                )
            return False
        self._take_new_steps()
        replicas = find_disagreement(self.folder, (stop or 0) + 1)
        if replicas is not None and (self.disagreement is None or replicas[0] <= self.disagreement.step):
            self.disagreement = RanksDisagree(replicas[1], replicas[0])
        if self.disagreement is not None:
            self._keep()
            raise self.disagreement
        is_seed = self.training.recipe.config.checkpoint.create_seed_checkpoint
        wanted = [] if is_seed else list(range(1, self.training.steps + 1))
        if exit_code != 0 or [step.step for step in self.steps] != wanted:
            raise RunFailed(
                f"exit code {exit_code} after step {self._last_step()} of {self.training.steps}. {self._tail()}"
            )
        if stop is not None and not self._before_stop:  # it was faster than this loop
            self._resume()
            return False
        self._keep()
        return True

    def _take_new_steps(self) -> None:
        if self.disagreement is not None:
            return  # the run goes on to its end, for what its observer records
        try:
            for step in self._merger.new_steps():
                self.steps.append(step)
                self._last_news = time.monotonic()
        except InconsistentRanks as error:
            self.disagreement = RanksDisagree(f"the ranks contradict each other: {error}", self._last_step() + 1)

    def stop(self) -> None:
        """Ends the run's processes and waits for them."""
        if isinstance(self._process, WarmRun):
            self._process.stop()
            return
        for kill in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kill)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)

    def _keep(self) -> None:
        finished = {
            "layout": self.training.layout.text,
            "command": self.training.command(self.result),
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "disagreement": str(self.disagreement) if self.disagreement else None,
            "first_step": self.disagreement.step if self.disagreement else None,
        }
        (self.folder / FINISHED).write_text(json.dumps(finished), encoding="utf-8")
        try:
            self.folder.rename(self.result)
        except OSError:  # another comparison was faster
            shutil.rmtree(self.folder, ignore_errors=True)

    def _last_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    def _tail(self) -> str:
        """The last lines that the run printed, its ranks' own logs before the summary of whoever started them."""
        lines: list[str] = []
        folders = (self.folder, self.folder / "before_stop")
        for file in [f for at in folders for f in (at / "output.log", *sorted((at / LOGS).glob("*")))]:
            text = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
            errors = [line for line in text if "Error" in line or "error" in line]
            lines += [line for line in (errors or text)[-3:] if line not in lines]
            if errors:
                break
        return f"Its output, in {self.folder}, ends:\n  " + "\n  ".join(lines[-8:])


def finished_run(training: Training, cache: Path) -> list[Step] | RanksDisagree | None:
    """What came of a run that was made before, or None."""
    try:
        finished = json.loads((cache / training.key / FINISHED).read_text(encoding="utf-8"))
        steps = [Step(**step) for step in finished["steps"]]
        if finished["disagreement"]:
            return RanksDisagree(finished["disagreement"], finished["first_step"])
        return steps
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/trn_dist/parity``, or the same below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trn_dist" / "parity"


# --- What the numbers depend on


def _portable_toml(config: Any) -> str:
    """The recipe without the paths that do not reach the numbers."""
    copy = dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder="", config_file=None, description=""),
        checkpoint=dataclasses.replace(config.checkpoint, initial_load_path=None),
        model=dataclasses.replace(config.model, hf_assets_path=""),
    )
    return to_toml(copy)


def _origin(initial_load_path: str | None) -> str | None:
    """The key of the run that made a checkpoint: a seed lies in ``<cache>/<key>/checkpoint/step-0``."""
    if initial_load_path is None:
        return None
    path = Path(initial_load_path)
    return path.parents[1].name if (path.parents[1] / FINISHED).exists() else str(path.resolve())


def _text_fingerprint(recipe: Recipe) -> str:
    from trn_dist.titan.corpus import CORPORA, open_corpus

    training = recipe.config.training
    if training.dataset not in CORPORA:
        return f"{training.dataset} {training.dataset_path}"
    return _corpus_fingerprint(training.dataset, training.dataset_path, recipe.config.neuron.text_field, open_corpus)


@functools.cache
def _corpus_fingerprint(dataset: str, path: str | None, text_field: str, open_corpus: Any) -> str:
    return open_corpus(dataset, path, text_field).fingerprint()


@functools.cache
def _code_digest(on_cpu: bool, observer: str | None) -> str:
    """Digest of this package's code that runs in the ranks."""
    folders = ["titan"] if on_cpu else ["titan", "neuron", "launcher", "hardware", "collectives"]
    files = [file for folder in folders for file in (_PACKAGE / folder).rglob("*.py")]
    if observer:
        files += (_PACKAGE / "parity" / name for name in ("perturbation.py", "recorder.py", "replicas.py"))
    if on_cpu:
        files.append(_CPU_REFERENCE)
    else:
        files += _PACKAGE.glob("_C*.so")
    return _digest_of(sorted(files))


def _module_digest(name: str) -> str | None:
    """Digest of a module that the recipe imports and of what lies beside it in its package."""
    spec = importlib.util.find_spec(name) if name else None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return _digest_of(sorted(origin.parent.glob("*.py")) if spec.parent else [origin])


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + (file.read_bytes() if file.exists() else b""))
    return digest.hexdigest()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
