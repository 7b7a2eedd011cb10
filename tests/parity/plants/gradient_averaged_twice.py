"""FSDP2 divides gradients by the square of the number of data-parallel ranks."""

from torch.distributed.fsdp import FSDPModule

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(parallel_dims.dp_shard) ** 2)


with_model(plant)
