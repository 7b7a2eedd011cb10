"""Distributed checkpoints: saved from one layout, loaded into others and into one process."""

from __future__ import annotations

# What FSDP and DTensor return is declared wider than it is.
# mypy: disable-error-code="union-attr, attr-defined"
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of
from tests.c10d.test_training import batch, make_model, train


def laid_out(device: torch.device, mesh: DeviceMesh, seed: int) -> nn.Module:
    """FSDP2; HSDP where there is a dimension "replicate"; with tensor parallelism where there is one "tensor"."""
    model = make_model(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["shard"]
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().cpu() if isinstance(p, DTensor) else p.detach().cpu() for p in model.parameters()]


def resharding(rank: int, size: int, kind: str, folder: str) -> None:
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    meshes = [
        init_device_mesh(device.type, (size,), mesh_dim_names=("shard",)),
        init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard")),
        init_device_mesh(device.type, (size // 2, 2), mesh_dim_names=("shard", "tensor")),
    ]
    for i, source in enumerate(meshes):
        model = laid_out(device, source, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, rank, device, steps=1)
        model(batch(0, 0).to(device)).square().mean().backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        path = f"{folder}/{i}"
        pending = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=path)
        pending.result()
        expected = whole(model)
        for target in meshes:
            other = laid_out(device, target, seed=1)
            other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
            weights, moments = get_state_dict(other, other_optimizer)
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
            set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
            for got, right in zip(whole(other), expected, strict=True):
                check(got, right, source, target)
            for left, right in zip(other.parameters(), model.parameters(), strict=True):
                for moment in ("exp_avg", "exp_avg_sq"):
                    got, saved = other_optimizer.state[left][moment], optimizer.state[right][moment]
                    check(got.full_tensor(), saved.full_tensor(), moment)
        if rank == 0:
            dcp_to_torch_save(path, f"{folder}/{i}.pt")
            alone = torch.load(f"{folder}/{i}.pt", weights_only=False)["model"]
            for got, right in zip(alone.values(), expected, strict=True):
                check(got, right, "in one process")
        dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["neuron", "cpu"])
def test_resharding(kind: str, tmp_path: Path) -> None:
    # Asynchronous saving asks for a group that serves CPU tensors; ours does.
    ranks.run(4, resharding, kind, str(tmp_path))
