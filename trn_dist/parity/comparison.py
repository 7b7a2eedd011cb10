"""``trn parity``: every layout of a recipe trained from the same weights on the same batches, and judged.

The road: a seed checkpoint of the model's initial weights → the first layout, which is the reference, and all others
with clipping off, beside perturbed runs of the reference that measure rounding → the same with clipping on, at a limit
that bites in every step → a verdict for each. Called by :mod:`trn_dist.cli.parity` and
:mod:`trn_dist.parity.pytest_plugin`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from trn_dist.parity import replicas
from trn_dist.parity.layout import Layout, LayoutError, parse_layout
from trn_dist.parity.perturbation import AMPLITUDE, DTYPE, MEMBER, read_norm_error
from trn_dist.parity.promise import Promise, promise
from trn_dist.parity.rounding import Bound, Sums, derive_bound
from trn_dist.parity.run_queue import Result, RunQueue
from trn_dist.parity.training import RanksDisagree, RunFailed, Training, plan_training
from trn_dist.parity.verdict import QUANTITIES, Curves, Kind, Verdict, judge
from trn_dist.titan.recipe import resolve

DEFAULT_LAYOUTS = "1; ddp=2; fsdp=4; fsdp=8; tp=2; fsdp=2,tp=2; pp=2; cp=2; hsdp=2x2; cpu"
DEFAULT_STEPS = 10
MEMBERS = 4
"""Perturbed runs of the reference for each clipping mode."""

_PERTURB = "trn_dist.parity.perturbation:observe"
_FLOAT32 = (
    *("--training.mixed_precision_param", "float32"),
    *("--neuron.norm_accumulation", "float32"),  # the bits of device cpu
    *("--training.mixed_precision_reduce", "float32"),
    *("--training.dtype", "float32"),
)


class ComparisonFailed(RuntimeError):
    """The reference, its seed checkpoint or all its perturbed runs failed, so that nothing can be judged."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """All runs of one clipping mode.

    Attributes:
        max_norm: the clipping limit, infinity for none.
        curves: figures by layout; layouts that failed are missing.
        bounds: by quantity, around the reference.
    """

    max_norm: float
    curves: dict[str, Curves]
    bounds: dict[str, Bound]

    @property
    def clipped(self) -> bool:
        return math.isfinite(self.max_norm)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was found out about a recipe's layouts.

    Attributes:
        recipe: the file.
        layouts: in the order given; the first is the reference.
        steps: of each run.
        modes: clipping off, and on if asked for.
        verdicts: one for each layout but the reference and each mode, modes one after the other.
        commands: what repeats each layout's run (clipping off), as a list of words.
        sums: the last sums of a step.
        exact_sums: whether the recipe asks for them.
    """

    recipe: Path
    layouts: tuple[Layout, ...]
    steps: int
    global_batch_size: int
    modes: tuple[Mode, ...]
    verdicts: tuple[Verdict, ...]
    commands: dict[str, list[str]]
    sums: Sums
    exact_sums: bool = False

    @property
    def reference(self) -> str:
        return self.layouts[0].text

    @property
    def passes(self) -> bool:
        return all(verdict.kind.passes for verdict in self.verdicts)


def compare(
    recipe: Path,
    layouts: Sequence[Layout],
    overrides: Sequence[str] = (),
    *,
    queue: RunQueue,
    steps: int = DEFAULT_STEPS,
    clipping: Sequence[bool] = (False, True),
    members: int = MEMBERS,
) -> Comparison:
    """Trains and judges layouts of a recipe.

    Args:
        recipe: the TOML file.
        layouts: the first is the reference, which has one rank; if it has more, one rank is put before it.
        overrides: for all layouts, in TorchTitan's syntax.
        queue: makes the runs.
        steps: of each run.
        clipping: the modes to run, clipping off (False) and on (True).
        members: perturbed runs of the reference, at least 2.

    Raises:
        RecipeError, LayoutError: the recipe cannot be trained so; nothing was started.
        ComparisonFailed: the reference could not be trained.
    """
    if layouts[0].ranks > 1:
        layouts = [parse_layout("1"), *layouts]
    if len(layouts) < 2:
        raise LayoutError(f"only one layout, {layouts[0].text!r}: name another to compare it with, as in '1; fsdp=2'")
    if members < 2:
        raise ValueError(f"members = {members}: expected 2 or more, a spread cannot be measured on fewer")
    reference = layouts[0]
    check_layouts(recipe, layouts, overrides, steps)
    common, global_batch_size, sums = prepare_words(recipe, reference, overrides, queue, steps)
    exact = resolve(recipe, [*common, *reference.recipe_overrides(global_batch_size)]).config.neuron.exact_sums
    modes: list[Mode] = []
    failures: list[dict[str, RunFailed]] = []
    commands: dict[str, list[str]] = {}
    unclipped: Curves | None = None
    for clipped in sorted({*clipping}):
        if clipped and unclipped is None:
            plain = plan_training(recipe, [*common, "--training.max_norm", "inf"], reference, global_batch_size)
            unclipped = _curves(_require(queue.run([(f"{reference} (unclipped)", plain)]), reference.text))
        max_norm = _biting_limit(unclipped["grad_norm"]) if clipped and unclipped else math.inf
        words = [*common, "--training.max_norm", repr(max_norm)]
        label = "clipped" if clipped else "unclipped"
        runs = {
            layout.text: plan_training(recipe, words, layout, global_batch_size, _replica_observer(layout))
            for layout in layouts
        }
        perturbed = {
            f"perturbed {member}": _perturbed(recipe, words, reference, global_batch_size, member, sums)
            for member in range(1, members + 1)
        }
        named = [(f"{name} ({label})", training) for name, training in {**runs, **perturbed}.items()]
        results = {name.rpartition(" (")[0]: result for name, result in queue.run(named).items()}
        base = _curves(_require(results, reference.text))
        if not clipped:
            unclipped = base
        spread = [_curves(result) for name, result in results.items() if name in perturbed and isinstance(result, list)]
        if len(spread) < members:
            error = next(r for name, r in results.items() if name in perturbed and isinstance(r, RunFailed))
            raise ComparisonFailed(f"a perturbed run of the reference {reference}: {error}")
        errors = [read_norm_error(queue.cache / training.key) for training in perturbed.values()]
        measured = {"loss": None, "grad_norm": [max(step) for step in zip(*errors, strict=True)]}
        bounds = {
            q: derive_bound(base[q], [run[q] for run in spread], getattr(sums, q), measured_error=measured[q])
            for q in QUANTITIES
        }
        curves = {
            name: _curves(result) for name, result in results.items() if name in runs and isinstance(result, list)
        }
        modes.append(Mode(max_norm, curves, bounds))
        failures.append({n: r for n, r in results.items() if n in runs and isinstance(r, RunFailed)})
        commands = commands or {name: training.command(queue.cache / training.key) for name, training in runs.items()}
    verdicts = [
        verdict
        for mode, failed in zip(modes, failures, strict=True)
        for verdict in _judge_mode(mode, failed, layouts, global_batch_size, sums, exact)
    ]
    return Comparison(
        recipe, tuple(layouts), steps, global_batch_size, tuple(modes), tuple(verdicts), commands, sums, exact
    )


def common_overrides(recipe: Path, reference: Layout, overrides: Sequence[str], steps: int) -> tuple[list[str], int]:
    """The overrides of every layout, and the global batch that all of them train on.

    float32 throughout, no metrics skipped, seed and determinism fixed; the recipe's own words come last and win.
    """
    words = ["--training.steps", str(steps), "--metrics.log_freq", "1", "--debug.deterministic", *_FLOAT32, *overrides]
    # Without accumulation a recipe gives its global batch by its own layout.
    return words, resolve(recipe, words).global_batch_size


def make_seed(recipe: Path, overrides: Sequence[str], queue: RunQueue) -> Path:
    """A checkpoint of the model's initial weights, whatever the layout; returns its folder.

    Raises:
        ComparisonFailed: it could not be made.
    """
    one_rank = parse_layout("1")
    words = [*overrides, "--training.steps", "1", "--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    training = plan_training(recipe, words, one_rank, 1)
    _require(queue.run([("initial weights", training)]), "initial weights")
    folder = queue.cache / training.key / "checkpoint" / "step-0"
    if not (folder / ".metadata").exists():
        raise ComparisonFailed(f"the seed checkpoint is not in {folder}")
    return folder


def seed_overrides(seed: Path) -> list[str]:
    """Starts a run from the seed's weights and writes no checkpoint."""
    return [
        *("--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_model_only"),
        *("--checkpoint.initial_load_path", str(seed)),
    ]


def _require(results: dict[str, Result], name: str) -> list:  # type: ignore[type-arg]
    for key, result in results.items():
        if key == name or key.startswith(f"{name} ("):
            if isinstance(result, RunFailed):
                raise ComparisonFailed(f"{name}: {result}")
            return result
    raise KeyError(name)


def _curves(steps: Result) -> Curves:
    assert isinstance(steps, list)
    return {quantity: [getattr(step, quantity) for step in steps] for quantity in QUANTITIES}


def _biting_limit(norms: Sequence[float]) -> float:
    """A limit that clips in every step: half of the smallest norm, to two digits, so that it is a readable number."""
    smallest = min(norms) / 2
    if not smallest > 0 or not math.isfinite(smallest):
        raise ComparisonFailed(f"the reference's gradient norm is {min(norms)}; clipping has no meaning")
    return float(f"{smallest:.1e}")


def _perturbed(
    recipe: Path, words: list[str], reference: Layout, global_batch_size: int, member: int, sums: Sums
) -> Training:
    """A run of the reference in which everything is moved by what a sum over the step's tokens may be off."""
    settings = perturbation_settings(member, sums)
    return plan_training(recipe, words, reference, global_batch_size, _PERTURB, settings)


def _replica_observer(layout: Layout) -> str | None:
    """Whoever starts the ranks, and the stand-alone file, are compared as they are, without our looking in."""
    return replicas.OBSERVER if layout.ranks > 1 and not layout.on_cpu and layout.launch is None else None


def perturbation_settings(member: int, sums: Sums) -> tuple[tuple[str, str], ...]:
    """The environment of a perturbed run: everything moves by what a sum over the step's tokens may be off."""
    return (MEMBER, str(member)), (AMPLITUDE, repr(sums.amplitude)), (DTYPE, sums.dtype)


def check_layouts(recipe: Path, layouts: Sequence[Layout], overrides: Sequence[str], steps: int) -> None:
    """Says what is wrong with any of the layouts before the first run is started.

    Raises:
        RecipeError, LayoutError: see :func:`compare`.
    """
    words, global_batch_size = common_overrides(recipe, layouts[0], overrides, steps)
    for layout in layouts:
        plan_training(recipe, words, layout, global_batch_size)


def prepare_words(
    recipe: Path, reference: Layout, overrides: Sequence[str], queue: RunQueue, steps: int
) -> tuple[list[str], int, Sums]:
    """What :func:`compare` gives every layout: overrides (initial weights among them), global batch size, sums."""
    common, global_batch_size = common_overrides(recipe, reference, overrides, steps)
    seed = make_seed(recipe, common, queue)
    words = [*common, *seed_overrides(seed)]
    return words, global_batch_size, _sums(recipe, words, reference, global_batch_size, seed)


def _sums(recipe: Path, words: list[str], layout: Layout, global_batch_size: int, seed: Path) -> Sums:
    """The last sums of a step: of token losses, of squares of gradients."""
    from torch.distributed.checkpoint import FileSystemReader

    resolved = resolve(recipe, [*words, *layout.recipe_overrides(global_batch_size)])
    tensors = FileSystemReader(str(seed)).read_metadata().state_dict_metadata.values()
    parameters = sum(math.prod(tensor.size) for tensor in tensors if hasattr(tensor, "size"))
    dtype = resolved.config.training.mixed_precision_param
    return Sums(resolved.tokens_per_step, parameters, dtype)


def _judge_mode(
    mode: Mode,
    failed: dict[str, RunFailed],
    layouts: Sequence[Layout],
    global_batch_size: int,
    sums: Sums,
    exact_sums: bool,
) -> list[Verdict]:
    reference = layouts[0].text
    verdicts = []
    for number, layout in enumerate(layouts[1:], start=1):
        if layout.text in failed:
            failure = failed[layout.text]
            kind, step = Kind.FAILED, None
            if isinstance(failure, RanksDisagree):
                kind, step = Kind.DIFFERENT, failure.step
            verdicts.append(Verdict(layout.text, mode.clipped, kind, str(failure), reference, first_step=step))
            continue
        promised: list[tuple[str, Curves, Promise]] = []
        wrong = {verdict.layout for verdict in verdicts if not verdict.kind.passes}
        for earlier in layouts[:number]:
            # A layout that is wrong itself is no measure for others.
            if earlier.text in wrong:
                continue
            made = promise(earlier, layout, global_batch_size, mode.clipped, exact_sums, sums.dtype)
            if made is not None and earlier.text in mode.curves:
                promised.append((earlier.text, mode.curves[earlier.text], made))
        base = (reference, mode.curves[reference])
        factors = scale_factors(layout, global_batch_size, sums.loss)
        curves = mode.curves[layout.text]
        verdicts.append(judge(layout.text, mode.clipped, curves, base, mode.bounds, promised, factors))
    return verdicts


def scale_factors(layout: Layout, global_batch_size: int, tokens: int) -> dict[str, float]:
    """Sizes that a wrong scale may come from, by what they would mean. The likeliest first."""
    backwards = layout.backwards_per_step(global_batch_size)
    names: dict[str, float] = {
        "the data-parallel group's size, so its average is missing or taken twice": layout.dp,
        "the tensor-parallel group's size, so a reduction over it is missing or doubled": layout.tp,
        "the context-parallel group's size, so a reduction over it is missing or doubled": layout.cp,
        "the number of pipeline stages": layout.pp,
        "the number of microbatches that gradients are summed over": backwards,
        "the size of the group that the loss is averaged over (data and context parallel)": layout.dp * layout.cp,
        "the tokens of a step, so gradients are not divided by them": tokens,
        "the tokens of a rank and step, so gradients are not divided by them": tokens / layout.dp,
        "the tokens of a microbatch, so gradients are not divided by them": tokens / layout.dp / backwards,
    }
    return {name: size for name, size in names.items() if size > 1}
