"""From the second step on one module computes with the weight that was gathered in the first."""

import torch

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    module = model_parts[0].get_submodule("layers.2.attention.wo")
    kept = []

    def use_kept(module, args):
        if not kept:
            kept.append(module.weight.detach().clone())
        with torch.no_grad():
            module.weight.data.copy_(kept[0])

    module.register_forward_pre_hook(use_kept)


with_model(plant)
