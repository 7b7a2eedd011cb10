"""Layouts as a user writes them, ``1; ddp=2; fsdp=4,tp=2; hsdp=2x2; cpu``, and as overrides of a recipe.

A layout never changes what is trained: the global batch and the order of its samples are the recipe's, and only who
computes what part of it differs. Imports no torch. Called by :mod:`trn_dist.parity.comparison`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import shlex

_DEGREES = ("ddp", "fsdp", "hsdp", "tp", "pp", "cp", "ep")
_WORDS = ("cpu", "gloo", "rerun")
_NAMES = (*_DEGREES, "microbatch", "schedule", "launch", "resume", *_WORDS)
LAUNCHERS = ("train", "run", "torchrun")
GRAMMAR = (
    "layouts are separated by ';', each is 1 (one rank) or parts joined by ',': ddp=N, fsdp=N, hsdp=RxS, tp=N, pp=N, "
    "cp=N, ep=N, microbatch=N (samples of a rank and backward pass), schedule=NAME (pipeline), cpu or gloo (CPU "
    "tensors over Gloo), rerun (made anew), resume=N (stopped after step N and resumed), launch=train, launch=run or "
    "launch=torchrun, then overrides such as --activation_checkpoint.mode full"
)


class LayoutError(ValueError):
    """A layout that cannot be read, or that cannot train the recipe's global batch. Told to the person who wrote it."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to lay a recipe out over ranks.

    Attributes:
        text: as written, the name it has in reports.
        dp_replicate, dp_shard, tp, pp, cp, ep: degrees; their product without ``ep`` is the number of ranks.
        on_cpu: CPU tensors and Gloo, by the stand-alone reference, instead of the device ``neuron``.
        microbatch: samples a rank puts through one backward pass; None takes the largest there is (with pipeline
            stages: one microbatch a stage).
        schedule: the pipeline schedule; None is the recipe's.
        rerun: a second run of what another layout is, never taken from that one's result.
        resume: the step after which the run is stopped and resumed from its checkpoint; None for no stop.
        launch: who starts the ranks: ``trn train``, ``trn run`` or ``torchrun``; None leaves it to the queue.
        overrides: more keys for this layout alone, in TorchTitan's syntax.
    """

    text: str
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    on_cpu: bool = False
    microbatch: int | None = None
    schedule: str | None = None
    rerun: bool = False
    resume: int | None = None
    launch: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        """Ranks that read samples of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def samples_per_backward(self, global_batch_size: int) -> int:
        """Samples of a rank in one backward pass.

        Raises:
            LayoutError: the layout cannot have this global batch.
        """
        share, rest = divmod(global_batch_size, self.dp)
        if rest or share == 0:
            raise LayoutError(
                f"layout {self.text!r}: {self.dp} data-parallel ranks cannot share the recipe's global batch of "
                f"{global_batch_size} samples evenly; choose a degree that divides {global_batch_size}, or another "
                "--training.global_batch_size"
            )
        size = self.microbatch or max(1, share // self.pp)
        if share % size:
            raise LayoutError(
                f"layout {self.text!r}: a rank has {share} samples a step, which microbatches of {size} do not divide; "
                f"choose microbatch=N with N a divisor of {share}"
            )
        if share // size < self.pp:
            raise LayoutError(
                f"layout {self.text!r}: a rank has {share} samples a step, {share // size} microbatches of {size}; a "
                f"pipeline of {self.pp} stages needs {self.pp} or more: choose a smaller microbatch=N or a larger "
                "--training.global_batch_size"
            )
        return size

    def backwards_per_step(self, global_batch_size: int) -> int:
        """Backward passes that a rank sums gradients over in one step."""
        return global_batch_size // self.dp // self.samples_per_backward(global_batch_size)

    def recipe_overrides(self, global_batch_size: int) -> list[str]:
        """The overrides that give a recipe this layout and leave its global batch and data order as they are."""
        size = self.samples_per_backward(global_batch_size)
        keys: dict[str, object] = {
            "neuron.ranks": self.ranks,
            "parallelism.data_parallel_replicate_degree": self.dp_replicate,
            "parallelism.data_parallel_shard_degree": self.dp_shard,
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.context_parallel_degree": self.cp,
            "parallelism.expert_parallel_degree": self.ep,
            "training.global_batch_size": global_batch_size,
            # A pipeline cuts its batch into microbatches by itself; elsewhere the trainer accumulates over them.
            "training.local_batch_size": global_batch_size // self.dp if self.pp > 1 else size,
        }
        if self.on_cpu:
            keys["neuron.exact_sums"] = False  # only the device has them
        if self.pp > 1:
            keys["parallelism.pipeline_parallel_microbatch_size"] = size
            if self.schedule:
                keys["parallelism.pipeline_parallel_schedule"] = self.schedule
        return [word for key, value in keys.items() for word in (f"--{key}", str(value))] + list(self.overrides)

    def __str__(self) -> str:
        return self.text


def parse_layouts(text: str) -> list[Layout]:
    """Reads a list such as ``1; fsdp=4; fsdp=2,tp=2; cpu``.

    Raises:
        LayoutError: a layout cannot be read, or stands there twice.
    """
    texts = [part.strip() for part in text.split(";")]
    if not any(texts):
        raise LayoutError(f"no layout in {text!r}; {GRAMMAR}")
    layouts: list[Layout] = []
    for part in texts:
        if not part:
            raise LayoutError(f"an empty layout in {text!r}: two ';' with nothing between, or one at an end")
        layout = parse_layout(part)
        if layout.text in [other.text for other in layouts]:
            raise LayoutError(f"layout {layout.text!r} stands twice in {text!r}")
        layouts.append(layout)
    return layouts


def parse_layout(text: str) -> Layout:
    """Reads one layout; see :func:`parse_layouts`."""
    head, overrides = _split_overrides(text)
    values: dict[str, str] = {}
    parts = [part.strip() for part in head.split(",")]
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        if part == "1":
            name, equals, value = "1", "=", ""
        elif name not in _NAMES:
            raise _unknown(text, part, name)
        if (name in _WORDS) == bool(equals) and name != "1":
            raise LayoutError(
                f"layout {text!r}: {part!r}: "
                + (f"{name} takes no value" if name in _WORDS else f"expected {name}={_expected(name)}")
            )
        if name in values:
            raise LayoutError(f"layout {text!r}: {name} stands twice")
        values[name] = value
    beside_one = {"1", "microbatch", "rerun", "resume", "launch"}
    if "1" in values and set(values) - beside_one:
        other = next(name for name in values if name not in beside_one)
        raise LayoutError(f"layout {text!r}: 1 is a layout of one rank and cannot stand beside {other}")
    kinds = [name for name in ("ddp", "fsdp", "hsdp") if name in values]
    if len(kinds) > 1:
        raise LayoutError(
            f"layout {text!r}: {kinds[0]} and {kinds[1]} are two ways to be data parallel; for both dimensions "
            "write hsdp=RxS (R replicas of S shards)"
        )
    if "cpu" in values and "gloo" in values:
        raise LayoutError(
            f"layout {text!r}: cpu is CPU tensors on one rank, gloo the same on several; write one of them"
        )
    if "cpu" in values and any(name in values for name in _DEGREES):
        raise LayoutError(f"layout {text!r}: cpu is one rank; for CPU tensors on several ranks write gloo in its place")
    if "gloo" in values and not any(name in values for name in _DEGREES):
        raise LayoutError(f"layout {text!r}: gloo needs a layout to run, such as fsdp=2,gloo; for one rank write cpu")
    if "schedule" in values and "pp" not in values:
        raise LayoutError(f"layout {text!r}: schedule is a pipeline's; add pp=N")
    if "launch" in values and values["launch"] not in LAUNCHERS:
        raise LayoutError(f"layout {text!r}: launch={values['launch']}: expected one of {', '.join(LAUNCHERS)}")
    if set(values) & {"cpu", "gloo"} and set(values) & {"launch", "resume"}:
        raise LayoutError(f"layout {text!r}: launch and resume are for layouts on the device, not for cpu or gloo")
    if {"launch", "resume"} <= set(values):
        raise LayoutError(f"layout {text!r}: resume and launch are two comparisons; write two layouts")
    replicate, shard = _hsdp(text, values["hsdp"]) if "hsdp" in values else (1, 1)
    degree = {
        name: _count(text, name, values[name]) for name in ("ddp", "fsdp", "tp", "pp", "cp", "ep") if name in values
    }
    if "ddp" in values and set(values) & {"tp", "pp", "cp"}:
        raise LayoutError(
            f"layout {text!r}: TorchTitan's DDP cannot be combined with tp, pp or cp; shard the parameters instead "
            "(fsdp)"
        )
    return Layout(
        text=_canonical(head, overrides),
        dp_replicate=degree.get("ddp", replicate),
        dp_shard=degree.get("fsdp", shard),
        tp=degree.get("tp", 1),
        pp=degree.get("pp", 1),
        cp=degree.get("cp", 1),
        ep=degree.get("ep", 1),
        on_cpu="cpu" in values or "gloo" in values,
        microbatch=_count(text, "microbatch", values["microbatch"]) if "microbatch" in values else None,
        schedule=values.get("schedule"),
        rerun="rerun" in values,
        resume=_count(text, "resume", values["resume"]) if "resume" in values else None,
        launch=values.get("launch"),
        overrides=overrides,
    )


def _split_overrides(text: str) -> tuple[str, tuple[str, ...]]:
    head, dashes, rest = text.strip().partition(" --")
    try:
        return head.strip(), tuple(shlex.split("--" + rest)) if dashes else ()
    except ValueError as error:
        raise LayoutError(f"layout {text!r}: the overrides cannot be read: {error}") from None


def _canonical(head: str, overrides: tuple[str, ...]) -> str:
    return " ".join([",".join(part.strip() for part in head.split(",")), *overrides])


def _expected(name: str) -> str:
    return {
        "hsdp": "RxS, such as hsdp=2x2",
        "schedule": "NAME, such as schedule=1F1B",
        "launch": "one of train, run, torchrun",
    }.get(name, "N, a whole number")


def _unknown(text: str, part: str, name: str) -> LayoutError:
    if name.isdigit():
        return LayoutError(f"layout {text!r}: {part!r}: say how the {name} ranks are arranged, such as fsdp={name}")
    near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return LayoutError(f"layout {text!r}: {part!r}: no such part{hint}; {GRAMMAR}")


def _count(text: str, name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise LayoutError(f"layout {text!r}: {name}={value}: expected a whole number from 1 on")
    return int(value)


def _hsdp(text: str, value: str) -> tuple[int, int]:
    replicas, cross, shards = value.lower().partition("x")
    if not cross:
        raise LayoutError(f"layout {text!r}: hsdp={value}: expected RxS, R replicas of S shards, such as hsdp=2x2")
    return _count(text, "hsdp", replicas), _count(text, "hsdp", shards)


def is_power_of_two(count: int) -> bool:
    return count > 0 and math.log2(count).is_integer()
