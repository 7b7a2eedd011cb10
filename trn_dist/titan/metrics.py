"""Metrics of a run, in files: what each rank writes, and how the ranks' lines become one line a step.

A rank appends one JSON object a step to ``<job.dump_folder>/metrics/rank-NNNNN.jsonl``, through the hook that
TorchTitan's train spec has for this (:func:`build_rank_metrics_processor`), so figures come as the floats that the
trainer has, in full precision, and no collective is added. Whoever started the ranks joins the files with
:class:`StepMerger`: ``trn train`` while the run goes on, tests and tools afterwards. The second half of this file
imports no torch.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from trn_dist import timing

METRICS_FOLDER = "metrics"
METRICS_FILE = "metrics.jsonl"
# In timing mode: how the last step of the slowest rank is spent, for people.
LAST_STEP_TABLE = "last_step.txt"
# Beside TorchTitan's own figures in TensorBoard and W&B: virtual time of the rank that writes them.
_PREDICTED_IN_TENSORBOARD = ("step_time_s", "tokens_per_s_per_core", "mfu_percent", "hfu_percent")


def rank_metrics_file(dump_folder: Path, rank: int) -> Path:
    return dump_folder / METRICS_FOLDER / f"rank-{rank:05d}.jsonl"


def rank_step_table(dump_folder: Path, rank: int) -> Path:
    """In timing mode: how a rank's last step is spent."""
    return dump_folder / METRICS_FOLDER / f"rank-{rank:05d}.txt"


def build_rank_metrics_processor(
    job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None
) -> Any:
    """TorchTitan's metrics processor, which also appends each logged step to this rank's file.

    Called by TorchTitan's trainer on every rank. A rank's line holds: ``step``; ``loss`` (mean over data-parallel
    ranks) and ``max_loss``, null on a pipeline rank without the last stage; ``grad_norm`` (before clipping); ``lr``;
    ``step_time_s`` (host time a step since the last line); ``hbm_active_peak_bytes``, ``hbm_reserved_peak_bytes``
    (since the last line); ``predicted`` (virtual time since the last line, see :func:`predicted_line`).
    """
    import torch
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.tools.utils import device_module

    from trn_dist import timing
    from trn_dist.timing.virtual_world import timing_only

    class RankMetricsProcessor(MetricsProcessor):
        def __init__(self) -> None:
            super().__init__(job_config, parallel_dims, tag)
            self.rank = torch.distributed.get_rank()
            self.path = rank_metrics_file(Path(job_config.job.dump_folder), self.rank)
            self.lines: TextIO | None = None
            self.steps_since_last_log = 0

        def should_log(self, step: int) -> bool:
            self.steps_since_last_log += 1
            return super().should_log(step)

        def log(
            self,
            step: int,
            global_avg_loss: float,
            global_max_loss: float,
            grad_norm: float,
            extra_metrics: dict[str, Any] | None = None,
        ) -> None:
            # TorchTitan's trainer adds up -1 an accumulation step on pipeline ranks that do not hold the last stage.
            training = job_config.training
            batch = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
            accumulation_steps = max(training.global_batch_size // batch, 1)
            elsewhere = parallel_dims.pp_enabled and global_avg_loss == -accumulation_steps
            memory = device_module.memory_stats()
            times = timing.mark_step()
            line = {
                "step": step,
                "loss": None if elsewhere else global_avg_loss,
                "max_loss": None if elsewhere else global_max_loss,
                "grad_norm": grad_norm,
                "lr": (extra_metrics or {}).get("lr"),
                "step_time_s": (time.perf_counter() - self.time_last_log) / self.steps_since_last_log,
                "hbm_active_peak_bytes": memory["active_bytes.all.peak"],
                "hbm_reserved_peak_bytes": memory["reserved_bytes.all.peak"],
                "predicted": predicted_line(
                    times,
                    steps=self.steps_since_last_log,
                    tokens=self.ntokens_since_last_log / parallel_dims.non_data_parallel_size,
                    flops_per_token=self.num_flops_per_token,
                    peak_flops=self.gpu_peak_flops,
                ),
            }
            try:
                timing.flush_trace()
            except RuntimeError as error:  # the disk is full
                raise SystemExit(str(error)) from None
            try:
                if self.lines is None:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    keep_steps_before(self.path, step)
                    self.lines = self.path.open("a", encoding="utf-8")
                if timing_only():
                    table = rank_step_table(Path(job_config.job.dump_folder), self.rank)
                    table.write_text(times.table(20) + "\n", encoding="utf-8")
                # One write a line, so that a reader never sees half of one and a killed rank leaves whole lines.
                self.lines.write(json.dumps(line) + "\n")
                self.lines.flush()
            except OSError as error:
                raise SystemExit(f"{self.path} cannot be written: {error.strerror}") from None
            self.steps_since_last_log = 0
            shown = {f"predicted/{name}": line["predicted"][name] for name in _PREDICTED_IN_TENSORBOARD}
            super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **shown})

        def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
            # Marked, so that the next step's predicted time does not contain the validation's.
            shown = {"validation_metrics/predicted_time_s": timing.mark_step().time_ps / 1e12}
            super().log_validation(loss, step, {**(extra_metrics or {}), **shown})

        def close(self) -> None:
            if self.lines is not None:
                self.lines.close()
            super().close()

    return RankMetricsProcessor()


def predicted_line(
    times: "timing.StepTimes", steps: int, tokens: float, flops_per_token: float, peak_flops: float
) -> dict[str, Any]:
    """What one rank's steps would take on the modelled cluster.

    Args:
        times: of ``steps`` steps.
        tokens: that this rank stands for: its batches' tokens over the ranks that share them.
        flops_per_token: of the model, forward and backward, as TorchTitan counts them.
        peak_flops: of one logical core, as TorchTitan has it.

    Returns:
        ``cluster``, ``cores_per_chip``, ``ranks`` of the job; ``step_time_s``; ``parts_ps``, which add up to
        ``time_ps``, of all ``steps``; ``flops`` of the matrix engine in them;
        ``tokens_per_s_per_core``; ``mfu_percent`` (model FLOPs utilisation in TorchTitan's definition);
        ``hfu_percent`` (of the matrix engine's operations that were carried out, recomputation included);
        ``irreproducible``: why the times may differ from run to run, or an empty text.
    """
    from trn_dist import timing

    seconds = times.time_ps / 1e12
    rate = tokens / seconds if seconds else 0.0
    return {
        "cluster": timing.cluster().name,
        "cores_per_chip": timing.cluster().logical_cores_per_chip,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "step_time_s": seconds / steps,
        "steps": steps,
        "time_ps": times.time_ps,
        "parts_ps": times.parts(),
        "flops": times.flops,
        "tokens_per_s_per_core": rate,
        "mfu_percent": 100 * flops_per_token * rate / peak_flops,
        "hfu_percent": 100 * times.flops / seconds / peak_flops if seconds else 0.0,
        "irreproducible": timing.irreproducible_reason(),
    }


def keep_steps_before(file: Path, step: int) -> None:
    """Cuts a metrics file of an earlier run back to the steps before ``step``: nothing for a new run, and for a
    resumed one what the checkpoint had seen. A last line that was cut off by the end of its process goes too.
    """
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            before = json.loads(line)["step"] < step
        except (json.JSONDecodeError, KeyError):
            continue
        if before:
            kept.append(line + "\n")
    part = file.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(file)


@dataclass(frozen=True)
class Prediction:
    """A step on the modelled cluster.

    Attributes:
        cluster: its name.
        step_time_s: of the slowest rank. In the first step it includes building the model.
        tokens_per_s_per_chip: of all ranks together, a chip being several logical cores.
        mfu_percent: model FLOPs utilisation in TorchTitan's definition.
        hfu_percent: matrix operations carried out, recomputation included, against the same peak.
        parts_s: how that rank's step was spent; they add up to ``step_time_s``.
        rank: that rank.
        irreproducible: why the times may differ from run to run, or an empty text.
    """

    cluster: str
    step_time_s: float
    tokens_per_s_per_chip: float
    mfu_percent: float
    hfu_percent: float
    parts_s: dict[str, float]
    rank: int
    irreproducible: str


@dataclass(frozen=True)
class Step:
    """One step of the whole run, as written to ``metrics.jsonl``.

    Attributes:
        step: counted from 1.
        loss: mean over the global batch.
        grad_norm: of all parameters, before clipping.
        lr: learning rate of this step.
        step_time_s: time on this host, of the slowest rank. In the first step it includes building the model.
        tokens_per_s: of all ranks together, on this host.
        hbm_reserved_peak_bytes: memory that the fullest rank's allocator held at its highest during the step: what must
            fit in the core's HBM.
        hbm_active_peak_bytes: memory in live tensors of that rank, at its highest.
        hbm_peak_rank: that rank.
        predicted: what the modelled cluster would take for this step, of the slowest rank; none of it was measured.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float | None
    step_time_s: float
    tokens_per_s: float
    hbm_reserved_peak_bytes: int
    hbm_active_peak_bytes: int
    hbm_peak_rank: int
    predicted: Prediction | None = None

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class InconsistentRanks(RuntimeError):
    """Two ranks report different values of a quantity that is the same on all ranks."""


def merge_step(lines: list[dict[str, Any]], tokens_per_step: int, ranks_each: int = 1) -> Step:
    """Joins the lines that the ranks (in order) wrote for one step, each for ``ranks_each`` from itself on.

    Raises:
        InconsistentRanks: ranks disagree on the loss or the gradient norm, or none of them has the loss.
    """
    step = lines[0]["step"]
    values: dict[str, float] = {}
    for key in ("loss", "grad_norm"):
        for rank, line in enumerate(lines):
            # NaN is not equal to itself; all ranks having it is agreement.
            if line[key] is not None and repr(values.setdefault(key, line[key])) != repr(line[key]):
                raise InconsistentRanks(
                    f"step {step}: {key} is {line[key]!r} on rank {rank * ranks_each}, {values[key]!r} before it"
                )
        if key not in values:
            raise InconsistentRanks(f"step {step}: no rank reports {key}")
    step_time_s = max(line["step_time_s"] for line in lines)
    fullest = max(range(len(lines)), key=lambda rank: lines[rank]["hbm_reserved_peak_bytes"])
    return Step(
        step=step,
        loss=values["loss"],
        grad_norm=values["grad_norm"],
        lr=lines[0]["lr"],
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_step / step_time_s,
        hbm_reserved_peak_bytes=lines[fullest]["hbm_reserved_peak_bytes"],
        hbm_active_peak_bytes=lines[fullest]["hbm_active_peak_bytes"],
        hbm_peak_rank=fullest * ranks_each,
        predicted=merge_prediction(lines, tokens_per_step, ranks_each) if lines[0].get("predicted") else None,
    )


def merge_prediction(lines: list[dict[str, Any]], tokens_per_step: int, ranks_each: int = 1) -> Prediction:
    """Joins the ranks' ``predicted`` of one step; the rest as for :func:`merge_step`."""
    predictions = [line["predicted"] for line in lines]
    slowest = max(range(len(lines)), key=lambda rank: predictions[rank]["step_time_s"])
    of_slowest = predictions[slowest]
    step_time_s = of_slowest["step_time_s"]
    # In timing mode a rank stands for many.
    chips = max(len(lines), of_slowest.get("ranks", 1)) / of_slowest["cores_per_chip"]
    return Prediction(
        cluster=of_slowest["cluster"],
        step_time_s=step_time_s,
        tokens_per_s_per_chip=tokens_per_step / step_time_s / chips if step_time_s else 0.0,
        mfu_percent=of_slowest["mfu_percent"],
        hfu_percent=of_slowest["hfu_percent"],
        parts_s={name: time / of_slowest["steps"] / 1e12 for name, time in of_slowest["parts_ps"].items()},
        rank=slowest * ranks_each,
        irreproducible=next((reason for p in predictions if (reason := p["irreproducible"])), ""),
    )


class StepMerger:
    """Follows the ranks' files while they grow and yields each step once all ranks have written it.

    In timing mode the ``ranks`` that have a process write for ``ranks_each`` each.
    """

    def __init__(self, dump_folder: Path, ranks: int, tokens_per_step: int, ranks_each: int = 1) -> None:
        self.files = [rank_metrics_file(dump_folder, rank * ranks_each) for rank in range(ranks)]
        self.tokens_per_step = tokens_per_step
        self.ranks_each = ranks_each
        self._offsets = [0] * ranks
        self._waiting: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]

    def new_steps(self) -> Iterator[Step]:
        """Yields the steps that became complete since the last call; returns at once if there are none."""
        for rank, file in enumerate(self.files):
            self._waiting[rank].extend(self._new_lines(rank, file))
        while all(self._waiting):
            lines = [waiting.pop(0) for waiting in self._waiting]
            steps = sorted({line["step"] for line in lines})
            if len(steps) > 1:
                raise InconsistentRanks(
                    f"the ranks' files do not hold the same steps: {steps[0]} and {steps[-1]} side by side"
                )
            yield merge_step(lines, self.tokens_per_step, self.ranks_each)

    def _new_lines(self, rank: int, file: Path) -> list[dict[str, Any]]:
        try:
            with file.open("rb") as stream:
                stream.seek(self._offsets[rank], os.SEEK_SET)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._offsets[rank] += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line]


def recover_steps(run_dir: Path, ranks: int, tokens_per_step: int) -> None:
    """Joins what the ranks of an earlier run wrote, into its ``metrics.jsonl``: a launcher that was killed left out the
    last steps, whose checkpoint may be there. Without ranks' files nothing changes, and nothing either if they
    contradict each other, which that run said itself.
    """
    try:
        steps = read_steps(run_dir, ranks, tokens_per_step)
    except InconsistentRanks:
        return
    if not steps:
        return
    file = run_dir / METRICS_FILE
    keep_steps_before(file, steps[0].step)
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(step.as_json() + "\n" for step in steps)


def read_steps(dump_folder: Path, ranks: int, tokens_per_step: int) -> list[Step]:
    """All complete steps of a finished run, from the ranks' files."""
    return list(StepMerger(dump_folder, ranks, tokens_per_step).new_steps())
