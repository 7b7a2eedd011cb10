"""Exact sums in TorchTitan's trainer: what ``neuron.exact_sums`` of a recipe switches on.

Gradients and their norm are the business of :mod:`trn_dist.neuron.exact_sums`; here the reduction is deferred to the
last microbatch and the losses of microbatches are added without error. Called by :mod:`trn_dist.titan.train_spec`,
through hooks of the train spec alone.
"""

import itertools
from typing import Any

import torch


def defer_reduction(model: Any, accumulation_steps: int) -> None:
    """Reduces gradients in the last microbatch of a step alone; TorchTitan itself does so after each one."""
    if accumulation_steps == 1 or not hasattr(model, "set_requires_gradient_sync"):
        return
    microbatches = itertools.count(1)

    def before_forward(*_: Any) -> None:
        if torch.is_grad_enabled():  # else a validation
            model.set_requires_gradient_sync(next(microbatches) % accumulation_steps == 0)

    model.register_forward_pre_hook(before_forward, prepend=True)


class ExactSums:
    """What the key ``neuron.exact_sums`` changes in a train spec; configured when the data loader is built."""

    def __init__(self) -> None:
        self.on = False
        self.accumulation_steps = 1

    def configure(self, job_config: Any, dp_world_size: int) -> None:
        training = job_config.training
        if hasattr(torch, "neuron"):
            self.on = job_config.neuron.exact_sums or torch.neuron.distributed.exact_sums()
            torch.neuron.distributed.set_exact_sums(self.on)
        elif job_config.neuron.exact_sums:
            raise ValueError("neuron.exact_sums = true: only the device neuron sums so; write false")
        if training.global_batch_size > 0:
            self.accumulation_steps = training.global_batch_size // (training.local_batch_size * dp_world_size)

    def wrap_optimizers(self, build: Any) -> Any:
        def build_optimizers(model_parts: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
            if self.on:
                (model,) = model_parts
                torch.neuron.distributed.accumulate_exactly(model)  # type: ignore[attr-defined]
                defer_reduction(model, self.accumulation_steps)
            return build(model_parts, *args, **kwargs)

        return build_optimizers

    def wrap_loss(self, build: Any) -> Any:
        def build_loss(*args: Any, **kwargs: Any) -> Any:
            loss_fn = build(*args, **kwargs)
            # The trainer adds up the microbatches' losses; float64 does so without error, for they are of like size.
            return (lambda *a, **k: loss_fn(*a, **k).double()) if self.on else loss_fn

        return build_loss
