"""After loading, the ranks of FSDP2 hold each other's shard of one weight."""

import torch
import torch.distributed as dist

from tests.parity.plants import with_model

WEIGHT = "layers.1.feed_forward.w1.weight"


def plant(model_parts, optimizers, parallel_dims):
    def swap(module, args):
        handle.remove()
        with torch.no_grad():
            local = dict(module.named_parameters())[WEIGHT].to_local()
            parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, local.contiguous())
            local.copy_(parts[dist.get_rank() - 1])

    handle = model_parts[0].register_forward_pre_hook(swap, prepend=True)


with_model(plant)
