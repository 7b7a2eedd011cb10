"""One rank of DDP has other values of one weight."""

import torch
import torch.distributed as dist

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    def change(module, args):
        # Here, since DDP sends rank 0's values to all when the model is first called.
        handle.remove()
        if dist.get_rank() == 1:
            with torch.no_grad():
                module.weight.mul_(1.01)

    handle = model_parts[0].get_submodule("layers.3.attention.wq").register_forward_pre_hook(change, prepend=True)


with_model(plant)
