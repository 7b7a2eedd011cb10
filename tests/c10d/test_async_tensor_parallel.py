"""Asynchronous tensor parallelism: torch.compile puts fused operators in the graph, and the numbers stay the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.c10d import ranks
from trn_dist import _C


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x):
        return x + self.feed_forward(self.norm(x))


def on_training(rank, size, asynchronous, width, steps):
    import torch._inductor.config
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.neuron.set_device(rank)
    torch.neuron.reset_dynamo_metrics()
    mesh = init_device_mesh("neuron", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(Block(width), Block(width)).to("neuron")
    for block in model:
        plan = {
            "norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        block.compile()
    if asynchronous:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 32, width, device="neuron")
        loss = model(x).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().to_local().cpu().numpy().tobytes() for parameter in model.parameters()]
    dist.barrier()
    return losses, weights, torch.neuron.get_dynamo_metrics()["fused_collectives"], _C._virtual_host_ps()


@pytest.mark.parametrize("size", [2])
def test_training_has_the_bits_of_synchronous_tensor_parallelism(size):
    plain = ranks.run(size, on_training, False, 64, 3)
    fused = ranks.run(size, on_training, True, 64, 3)
    for (losses, weights, none, _), (fused_losses, fused_weights, collectives, _) in zip(plain, fused, strict=True):
        assert none == 0
        # Of each of two blocks: forward the gathers before gate and up and the scatter after down, and their backward.
        assert collectives >= 6
        assert losses == fused_losses
        assert weights == fused_weights
