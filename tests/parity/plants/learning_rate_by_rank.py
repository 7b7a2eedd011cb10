"""The learning rate depends on the rank."""

import torch.distributed as dist

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 1 + dist.get_rank()
            group["initial_lr"] = group["lr"]


with_model(plant)
