"""One rank of DDP starts from other values of one weight."""

import torch
import torch.distributed as dist

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    def change(module, args):
        handle.remove()
        if dist.get_rank() == 1:
            with torch.no_grad():
                dict(module.named_parameters())["layers.3.attention.wq.weight"].mul_(1.01)

    handle = model_parts[0].register_forward_pre_hook(change, prepend=True)


with_model(plant)
