"""Under sequence parallel each rank keeps its own part of one norm weight's gradient, without the sum over them."""

from torch.distributed.tensor import DTensor

from tests.parity.plants import with_model


def plant(model_parts, optimizers, parallel_dims):
    weight = model_parts[0].get_submodule("layers.0.attention_norm").weight

    def keep_own(grad):
        # What arrives is a sum still to be made, or made already: take this rank's addend for the whole.
        placements = weight.placements
        return DTensor.from_local(grad.to_local(), weight.device_mesh, placements, run_check=False)

    weight.register_hook(keep_own)


with_model(plant)
