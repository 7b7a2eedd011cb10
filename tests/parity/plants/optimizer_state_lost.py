"""The optimizer's state is lost before the second step, as by a checkpoint that leaves it out."""

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    for optimizer in optimizers.optimizers:
        steps = iter(range(1, 1000))

        def lose(optimizer, args, kwargs, steps=steps):
            if next(steps) == 2:
                optimizer.state.clear()

        optimizer.register_step_pre_hook(lose)


with_model(plant)
