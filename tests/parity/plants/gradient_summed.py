"""FSDP2 sums gradients over the data-parallel ranks in place of averaging them."""

from torch.distributed.fsdp import FSDPModule

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)


with_model(plant)
