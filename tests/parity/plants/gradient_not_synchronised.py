"""DDP is never told to synchronise: each rank keeps its own gradients."""

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    for part in model_parts:
        part.set_requires_gradient_sync(False)


with_model(plant)
