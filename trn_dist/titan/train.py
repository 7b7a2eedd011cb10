"""``trn train``: a recipe trained by TorchTitan's own trainer on simulated ranks, with a run folder and a summary.

The road: the recipe is checked and resolved (:mod:`trn_dist.titan.recipe`), written to the run folder, and every rank
runs ``python -m torchtitan.train --job.config_file <run folder>/recipe.toml`` under the launcher, unchanged. Figures
come back through the ranks' metrics files (:mod:`trn_dist.titan.metrics`, :mod:`trn_dist.titan.progress`). Called by
:mod:`trn_dist.cli.train`.

A run folder holds

==================  ==================================================================================================
``recipe.toml``     the resolved recipe: every key, paths absolute; runs again with ``trn train`` or plain torchrun
``run.json``        what ran: versions, layout, fingerprint of the text, host; at the end the exit code and the losses
``metrics.jsonl``   one JSON object a step, see :class:`trn_dist.titan.metrics.Step`
``metrics/``        the same before the ranks were joined, one file a rank
``logs/``           everything a rank printed, one file a rank
``trace/``          with ``--trace``: virtual time for Perfetto, ``trace.json`` of all ranks and one file a rank
``program/``        with ``--record``: what the ranks launched, for ``trn replay``, two files a rank
==================  ==================================================================================================

beside what TorchTitan writes to ``job.dump_folder`` (checkpoints, TensorBoard, traces).
"""

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from trn_dist.faults import Fault, parse_fault
from trn_dist.timing.program import RECORD_VARIABLE
from trn_dist.timing.trace import JOINED_TRACE, TRACE_VARIABLE, join_traces
from trn_dist.timing.virtual_world import TIMING_ONLY_VARIABLE
from trn_dist.titan.metrics import (
    LAST_STEP_TABLE,
    METRICS_FILE,
    METRICS_FOLDER,
    Step,
    rank_step_table,
    recover_steps,
)
from trn_dist.titan.progress import RunProgress, show_bytes, show_duration, show_parts, show_prediction
from trn_dist.titan.recipe import Recipe, RecipeError, resolve, to_toml

RUNS_FOLDER = Path("runs")
FACTS_FILE = "run.json"
TRACE_FOLDER = "trace"
PROGRAM_FOLDER = "program"
_FULL_BYTES = 1 << 20
"""With less room than this on its disk, a run that failed is told that it is full."""

# Imported once, before the ranks are forked. Not torchtitan.train itself: each rank runs that as its main program.
_PRELOAD = (
    "trn_dist.titan.config",
    "torchtitan.components.checkpoint",
    "torchtitan.components.ft",
    "torchtitan.tools.profiling",
)


def run(
    recipe: Path,
    overrides: list[str],
    run_dir: Path | None = None,
    show_rank: int | None = None,
    trace: bool = False,
    record: bool = False,
    timing_only: bool = False,
    faults: tuple[Fault, ...] = (),
    as_json: bool = False,
) -> int:
    """Trains a recipe and shows it on the terminal.

    Args:
        recipe: the TOML file.
        overrides: in TorchTitan's syntax, ``--training.steps 10``.
        run_dir: the run folder; default ``runs/<recipe>-<time>``. A folder that holds a run is refused, unless
            checkpoints are enabled, which then resume it.
        show_rank: also show what this rank prints, TorchTitan's own log lines; they are in ``logs/`` in any case.
        trace: write a trace of virtual time to ``trace/trace.json``, for Perfetto.
        faults: what goes wrong on purpose, beside what the recipe asks for.
        record: write what the ranks launch to ``program/``, for ``trn replay``.
        timing_only: compute no numbers; one process stands for all ranks of a pipeline stage, see
            :mod:`trn_dist.timing.virtual_world`.
        as_json: print what ``run.json`` holds, the run folder and the last step as one object, and all else on stderr.

    Returns:
        0 when all ranks ended with 0; 2 for a wrong recipe; 1 when the ranks' figures contradict each other; else the
        launcher's exit code.
    """
    from trn_dist.launcher import LaunchError, LaunchPlan, Program, launch
    from trn_dist.launcher.plan import simulated_cluster

    try:
        resolved = resolve(recipe, overrides)
        if timing_only:
            _check_timing_only(resolved, faults)
        nodes = simulated_cluster().nodes_for(resolved.ranks)
        folder = _run_folder(resolved, run_dir)
    except (RecipeError, LaunchError) as error:
        for problem in error.problems if isinstance(error, RecipeError) else [str(error)]:
            print(f"trn train: {problem}", file=sys.stderr)
        return 2
    faults = (*(parse_fault(text) for text in resolved.config.neuron.faults), *faults)
    try:
        facts = _prepare(resolved, folder, faults)
    except OSError as error:
        _complain(folder, error)
        return 1
    shown = sys.stderr if as_json else sys.stdout
    print(_announcement(resolved, folder), file=shown, flush=True)
    program = Program("torchtitan.train", ("--job.config_file", str(folder / "recipe.toml")), is_module=True)
    processes = resolved.ranks
    if timing_only:
        processes = resolved.layout.pp
        program = program.as_lone_rank(resolved.ranks, nodes, processes)
        nodes = 1
    ranks_each = resolved.ranks // processes
    plan = LaunchPlan(
        program=program,
        world_size=processes,
        nodes=nodes,
        faults=faults,
        preload=_PRELOAD,
        shown_local_ranks=frozenset() if show_rank is None else frozenset({show_rank // ranks_each}),
        log_dir=folder / "logs",
    )
    settings = resolved.config.neuron
    bar = None if settings.progress == "auto" else settings.progress == "bar"
    progress = RunProgress(
        folder,
        processes,
        resolved.tokens_per_step,
        resolved.config.training.steps,
        bar,
        shown,
        ranks_each,
    )
    for fault in faults:
        print(f"fault: {fault.text}", file=shown, flush=True)
    progress.start()
    exit_code = 1
    environment = {
        **({TRACE_VARIABLE: str(folder / TRACE_FOLDER)} if trace else {}),
        **({RECORD_VARIABLE: str(folder / PROGRAM_FOLDER)} if record else {}),
        **({TIMING_ONLY_VARIABLE: "1"} if timing_only else {}),
    }
    os.environ |= environment
    try:
        exit_code = launch(plan)
    except LaunchError as error:
        print(f"trn train: {error}", file=sys.stderr)
    finally:
        seconds = progress.finish()
        if progress.error is not None:
            print(f"trn train: the ranks contradict each other: {progress.error}", file=sys.stderr)
            exit_code = exit_code or 1
        for name in environment:
            del os.environ[name]
        if record and exit_code == 0 and len(list((folder / PROGRAM_FOLDER).glob("rank-*.json"))) < processes:
            print(f"trn train: --record: not every rank could write to {folder / PROGRAM_FOLDER}", file=sys.stderr)
            exit_code = 1
        try:
            if progress.unwritten is not None:
                raise progress.unwritten
            if trace:
                with contextlib.suppress(FileNotFoundError):  # no rank came as far as an operator
                    join_traces(folder / TRACE_FOLDER)
            if timing_only and progress.last is not None and progress.last.predicted is not None:
                shutil.copy(rank_step_table(folder, progress.last.predicted.rank), folder / LAST_STEP_TABLE)
            _conclude(facts, folder, progress, exit_code, seconds)
            if exit_code and shutil.disk_usage(folder).free < _FULL_BYTES:  # whatever else was said about it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            _complain(folder, error)
            exit_code = exit_code or 1
    print(_summary(resolved, folder, progress, exit_code, seconds), file=shown, flush=True)
    if as_json:
        last = None if progress.last is None else dataclasses.asdict(progress.last)
        print(json.dumps(finite({**facts, "run_folder": str(folder), "last_step": last}), indent=2), flush=True)
    return exit_code


def _check_timing_only(recipe: Recipe, faults: tuple[Fault, ...]) -> None:
    """Raises RecipeError for what has no meaning without numbers, or with one rank in the place of all."""
    config = recipe.config
    problems = []
    if recipe.layout.ep > 1:
        problems.append(
            f"parallelism.expert_parallel_degree = {recipe.layout.ep}: with --timing-only no token is routed, and how "
            "many go where decides the shapes; must be 1"
        )
    if config.checkpoint.enable or config.checkpoint.create_seed_checkpoint:
        problems.append("checkpoint.enable = true: with --timing-only there are no numbers to save; must be false")
    if faults or config.neuron.faults:
        problems.append(
            "neuron.faults, --fault: with --timing-only all ranks of a stage are one process; none goes wrong"
        )
    if problems:
        raise RecipeError(problems)


def _run_folder(recipe: Recipe, run_dir: Path | None) -> Path:
    """Makes the run folder."""
    if run_dir is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = RUNS_FOLDER / f"{recipe.name}-{now}"
        number = 2
        while run_dir.exists():
            run_dir = RUNS_FOLDER / f"{recipe.name}-{now}-{number}"
            number += 1
    elif (run_dir / METRICS_FILE).exists() and not recipe.config.checkpoint.enable:
        raise RecipeError(
            [
                f"--run-dir {run_dir}: holds a run already; name another folder, or resume that run from its "
                "checkpoints "
                "with --checkpoint.enable"
            ]
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError([f"--run-dir {run_dir}: {error.strerror}"]) from error
    # The ranks' files of an earlier run would be taken for this run's.
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, KeyError):
        earlier = json.loads((run_dir / FACTS_FILE).read_text(encoding="utf-8"))
        recover_steps(run_dir, earlier["ranks"], earlier["tokens_per_step"])
    shutil.rmtree(run_dir / METRICS_FOLDER, ignore_errors=True)
    return run_dir.resolve()


def _prepare(recipe: Recipe, folder: Path, faults: tuple[Fault, ...]) -> dict[str, Any]:
    """Writes the resolved recipe and what is known of the run before it starts; returns the latter."""
    import torch

    from trn_dist.titan.corpus import CORPORA, open_corpus

    config = recipe.config
    config.job.dump_folder = str(folder)
    config.job.config_file = None
    config.metrics.disable_color_printing = True  # what TorchTitan prints goes to files
    head = f"# Resolved from {recipe.path.resolve()}\n\n"
    (folder / "recipe.toml").write_text(head + to_toml(config), encoding="utf-8")
    tokenizer = Path(config.model.hf_assets_path) / "tokenizer.json"
    facts: dict[str, Any] = {
        "recipe": str(recipe.path.resolve()),
        "model": f"{config.model.name} {config.model.flavor}",
        "layout": str(recipe.layout),
        "ranks": recipe.ranks,
        "global_batch_size": recipe.global_batch_size,
        "accumulation_steps": recipe.accumulation_steps,
        "tokens_per_step": recipe.tokens_per_step,
        "text": {"dataset": config.training.dataset},
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else None,
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "torchtitan")},
        },
        # Bits of the numbers depend on these two.
        "threads_per_rank": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "host_cores": os.cpu_count(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if config.training.dataset in CORPORA:
        corpus = open_corpus(config.training.dataset, config.training.dataset_path, config.neuron.text_field)
        facts["text"] |= {"files": len(corpus.files), "fingerprint": corpus.fingerprint()}
    if faults:
        facts["faults"] = [fault.text for fault in faults]
    _write_json(folder / FACTS_FILE, facts)
    return facts


def _complain(folder: Path, error: OSError) -> None:
    print(f"trn train: {error.filename or f'run folder {folder}'}: {error.strerror}", file=sys.stderr)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(file)


def finite(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _announcement(recipe: Recipe, folder: Path) -> str:
    config = recipe.config
    accumulation = f", {recipe.accumulation_steps} accumulation steps" if recipe.accumulation_steps > 1 else ""
    if config.checkpoint.create_seed_checkpoint:
        work = "initial weights are drawn and saved, nothing is trained"
    else:
        work = (
            f"{config.training.steps} steps of {recipe.global_batch_size} x {config.training.seq_len} tokens"
            f"{accumulation}, text: {config.training.dataset}"
        )
    cores = "NeuronCore" if recipe.ranks == 1 else "NeuronCores"
    return (
        f"{config.model.name} {config.model.flavor} on {recipe.ranks} simulated {cores}: {recipe.layout}\n{work}\n"
        f"run folder: {_shown_path(folder)}"
    )


def _shown_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _conclude(facts: dict[str, Any], folder: Path, progress: RunProgress, exit_code: int, seconds: float) -> None:
    def loss(step: Step | None) -> dict[str, float] | None:
        return None if step is None else {"step": step.step, "loss": step.loss}

    facts |= {
        "exit_code": exit_code,
        "duration_s": round(seconds, 3),
        "first": loss(progress.first),
        "last": loss(progress.last),
    }
    _write_json(folder / FACTS_FILE, finite(facts))


def _summary(recipe: Recipe, folder: Path, progress: RunProgress, exit_code: int, seconds: float) -> str:
    first, last = progress.first, progress.last
    steps = recipe.config.training.steps
    checkpoint = recipe.config.checkpoint
    if exit_code == 0 and checkpoint.create_seed_checkpoint:
        result = f"seed checkpoint in {_shown_path(folder / checkpoint.folder / 'step-0')}"
    elif first is None or last is None:
        result = "no step was completed"
    elif math.isnan(last.loss) and (folder / LAST_STEP_TABLE).exists():
        result = f"no numbers were computed, HBM peak {show_bytes(last.hbm_reserved_peak_bytes)}"
    elif last.step == first.step:
        result = f"loss {last.loss:.4f} in step {last.step}"
    else:
        result = f"loss {first.loss:.4f} -> {last.loss:.4f} from step {first.step} to {last.step}"
        peak = max(first.hbm_reserved_peak_bytes, last.hbm_reserved_peak_bytes)
        result += f", HBM peak {show_bytes(peak)}"
    if exit_code == 0:
        ended = f"done in {show_duration(seconds)}"
    else:
        reached = last.step if last is not None else 0
        ended = f"ended early (exit code {exit_code}) after {show_duration(seconds)}, step {reached} of {steps}"
    lines = []
    if last is not None and last.predicted is not None:
        lines.append(f"last step, rank {last.predicted.rank}, {show_prediction(last.predicted)}")
        lines.append(f"of which {show_parts(last.predicted)}")
        if (folder / LAST_STEP_TABLE).exists():
            lines.append((folder / LAST_STEP_TABLE).read_text(encoding="utf-8").rstrip())
        if last.predicted.irreproducible:
            lines.append(f"predicted times may differ from run to run: {last.predicted.irreproducible}")
    if exit_code == 0 and (folder / TRACE_FOLDER / JOINED_TRACE).exists():
        lines.append(f"trace: {_shown_path(folder / TRACE_FOLDER / JOINED_TRACE)} (https://ui.perfetto.dev)")
    if exit_code == 0 and (folder / PROGRAM_FOLDER).exists():
        lines.append(f"recorded: trn replay {_shown_path(folder)} --cluster NAME")
    return "\n".join([*lines, f"{ended}: {result}", f"run folder: {_shown_path(folder)}"])
