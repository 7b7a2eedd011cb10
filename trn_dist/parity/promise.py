"""What two layouts of one recipe must have in common: every bit, or all but rounding. The rules of DESIGN, "Numerics".

A promise is made before anything runs, from the layouts alone; :mod:`trn_dist.parity.verdict` holds the runs to it.
Imports no torch.
"""

from __future__ import annotations

import dataclasses

from trn_dist.parity.layout import Layout, is_power_of_two


@dataclasses.dataclass(frozen=True)
class Promise:
    """What must be bit-equal between two layouts, and why.

    Attributes:
        loss: the loss of every step.
        grad_norm: the gradient norm of every step too; without it, it agrees within rounding.
        reason: the rule, as a phrase for the report.
    """

    loss: bool
    grad_norm: bool
    reason: str


def _numerics(layout: Layout) -> tuple[object, ...]:
    """What decides the bits of one forward and backward pass beside the data-parallel arrangement."""
    return (layout.tp, layout.cp, layout.ep)


def promise(
    a: Layout,
    b: Layout,
    global_batch_size: int,
    clipped: bool,
    exact_sums: bool = False,
    dtype: str = "float32",
) -> Promise | None:
    """The bits that ``b`` must share with ``a``, or None when only rounding may differ.

    In another ``dtype`` of activations than float32, TorchTitan rounds in other places under FSDP2 than without it, and
    autocast is not the same list of operators on every device. With exact sums, data-parallel layouts of the same
    microbatch share all bits as long as what the loss and the sums are divided by, ranks and microbatches, are powers
    of two.

    Overrides that a layout carries are taken to change nothing but bookkeeping when both carry the same; of others
    only activation checkpointing is known to keep the bits.
    """
    same_pass = (
        _numerics(a) == _numerics(b)
        and a.samples_per_backward(global_batch_size) == b.samples_per_backward(global_batch_size)
        and _keeps_bits(a.overrides, b.overrides)
    )
    if not same_pass:
        return None
    same_degrees = (a.dp_replicate, a.dp_shard, a.pp, a.schedule) == (b.dp_replicate, b.dp_shard, b.pp, b.schedule)
    if same_degrees:
        if a.on_cpu == b.on_cpu:
            return Promise(True, True, _how(a, b))
        if a.ranks == 1 and not exact_sums and dtype == "float32":
            return Promise(True, True, "the device runs the CPU's kernels")
        return None  # Gloo sums in another order
    if dtype != "float32":
        return None
    if a.on_cpu and b.on_cpu and max(a.ranks, b.ranks) > 1:
        return None
    if a.on_cpu != b.on_cpu:
        return None
    if exact_sums:
        divisors = (a.dp, b.dp, a.backwards_per_step(global_batch_size), b.backwards_per_step(global_batch_size))
        if a.pp == b.pp == 1 and all(map(is_power_of_two, divisors)):
            return Promise(True, True, "exact sums of the same microbatches, each rounded once")
        return None
    one_backward = a.backwards_per_step(global_batch_size) == 1 == b.backwards_per_step(global_batch_size)
    if a.dp == b.dp and a.pp == b.pp == 1 and one_backward and is_power_of_two(a.dp) and not clipped:
        return Promise(True, False, f"the same tree of sums over {a.dp} data-parallel ranks")
    if a.dp == b.dp == 1 and a.pp != b.pp and not clipped and a.schedule == b.schedule:
        return Promise(True, False, "pipeline stages compute what one rank computes, microbatch by microbatch")
    return None


def _how(a: Layout, b: Layout) -> str:
    """Why two runs of the same degrees do the same arithmetic."""
    ways = []
    if b.rerun != a.rerun:
        ways.append("a run repeats its own numbers")
    if b.resume != a.resume:
        ways.append("a resumed run goes on as if it had not stopped")
    if b.launch != a.launch:
        ways.append("who starts the ranks does not reach the numbers")
    if b.overrides != a.overrides:
        ways.append("activation checkpointing computes the same activations again")
    return "; ".join(ways) or "the same arithmetic in the same order"


def _keeps_bits(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    def others(overrides: tuple[str, ...]) -> list[str]:
        kept: list[str] = []
        skip = False
        for word in overrides:
            if word.startswith("--"):
                skip = word.startswith("--activation_checkpoint.")
            if not skip:
                kept.append(word)
        return kept

    return others(a) == others(b)
