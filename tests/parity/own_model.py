"""A model and a trainer that know nothing of TorchTitan: what a user's own program looks like to the recorder.

One block with sequence and tensor parallelism written by hand, dropout, biases, data parallelism; run by
test_own_model.py with a planted bug or none, as ``own_model.py FOLDER LAYOUT BUG`` under torchrun's environment.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trn_dist.parity.recorder import Recorder

WIDTH, HIDDEN, LENGTH, SAMPLES, STEPS = 16, 32, 8, 4, 2
BUGS = ("none", "bias_not_reduced", "norm_not_reduced", "same_dropout_over_samples", "other_dropout_over_tp")


class GatherSequence(torch.autograd.Function):
    """The whole sequence from the ranks' parts; backward sums the gradients and keeps the own part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class ScatterSequence(torch.autograd.Function):
    """The ranks' addends summed, of which each keeps its part of the sequence; backward gathers."""

    @staticmethod
    def forward(ctx, addend, group):
        ctx.group = group
        total = addend.contiguous()
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, dim=1), None


class Dropout(nn.Module):
    """Draws for each sample from a stream of its own, so that the draw does not depend on the layout."""

    def __init__(self, bug: str, dp_rank: int, tp: int, tp_rank: int) -> None:
        super().__init__()
        self.bug, self.dp_rank, self.tp, self.tp_rank = bug, dp_rank, tp, tp_rank

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        masks = []
        for i in range(activation.shape[0]):
            sample = self.dp_rank * activation.shape[0] + i
            seed = {"same_dropout_over_samples": i, "other_dropout_over_tp": sample + 100 * self.tp_rank}
            generator = torch.Generator().manual_seed(seed.get(self.bug, sample))
            masks.append(torch.rand(LENGTH, WIDTH, generator=generator) > 0.25)
        mask = torch.stack(masks).to(activation.device)
        return activation * mask.chunk(LENGTH // activation.shape[1], dim=1)[self.tp_rank if self.tp > 1 else 0]


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh, bug: str) -> None:
        super().__init__()
        self.mesh, self.tp = mesh, mesh["tp"].size()
        generator = torch.Generator().manual_seed(1)
        up = torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        down = torch.randn(WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(self._sharded(up, 0))
        self.down = nn.Parameter(self._sharded(down, 1))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator).to(mesh.device_type))
        self.dropout = Dropout(bug, mesh["dp"].get_local_rank(), self.tp, mesh["tp"].get_local_rank())
        self.to(mesh.device_type)

    def _sharded(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        whole = whole.to(self.mesh.device_type)
        if self.tp == 1:
            return whole
        local = whole.chunk(self.tp, dim=dim)[self.mesh["tp"].get_local_rank()].contiguous()
        return DTensor.from_local(local, self.mesh["tp"], [Shard(dim)])

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        group = self.mesh["tp"].get_group()
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        hidden = self.norm(activation)
        if self.tp > 1:
            hidden = GatherSequence.apply(hidden, group)
        hidden = torch.tanh(hidden @ up.T) @ down.T
        if self.tp > 1:
            hidden = ScatterSequence.apply(hidden, group)
        return activation + self.dropout(hidden + self.bias)


def main(folder: Path, layout: str, bug: str) -> None:
    device = os.environ.get("OWN_MODEL_DEVICE", "neuron")
    dist.init_process_group("gloo" if device == "cpu" else device)
    world, rank = dist.get_world_size(), dist.get_rank()
    dp, tp = (world, 1) if layout == "dp" else (1, world)
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    block = Block(mesh, bug)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01, foreach=False)
    coordinates = {"dp": (mesh["dp"].get_local_rank(), dp), "tp": (mesh["tp"].get_local_rank(), tp)}
    recorder = Recorder([block], [optimizer], coordinates, folder, range(1, STEPS + 1), rank)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(1000 + step)
        whole = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
        part = whole.chunk(dp)[coordinates["dp"][0]].chunk(tp, dim=1)[coordinates["tp"][0]].to(device)
        loss = block(part).square().sum() / whole.numel() * dp
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in block.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            elif (
                tp > 1
                and not (bug == "bias_not_reduced" and name == "bias")
                and not (bug == "norm_not_reduced" and name.startswith("norm"))
            ):
                dist.all_reduce(gradient, group=mesh["tp"].get_group())
            if dp > 1:
                dist.all_reduce(gradient, group=mesh["dp"].get_group())
                gradient /= dp
        recorder.before_clipping()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
