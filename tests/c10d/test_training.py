"""What is built on the process group: DDP, FSDP2, tensor parallelism, device meshes, and how a group is asked for."""

from __future__ import annotations

# What c10d and DTensor return is declared wider than it is.
# mypy: disable-error-code="union-attr, index, operator, assignment, attr-defined"
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return model.to(device)


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 32, generator=generator)


def train(model: nn.Module, rank: int, device: torch.device, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step).to(device)).square().mean().backward()
        optimizer.step()


@functools.cache
def reference(size: int, steps: int = 4) -> list[torch.Tensor]:
    """One process that averages the gradients of all ranks' batches along the tree."""
    model = make_model(torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        gradients = []
        for rank in range(size):
            replica = copy.deepcopy(model)
            replica(batch(rank, step)).square().mean().backward()
            gradients.append([parameter.grad for parameter in replica.parameters()])
        for i, parameter in enumerate(model.parameters()):
            parts = [gradient[i] / size for gradient in gradients]
            while len(parts) > 1:
                parts = [parts[j] + parts[j + 1] for j in range(0, len(parts), 2)]
            parameter.grad = parts[0]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def ddp(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    model = make_model(device)
    # Small buckets: several are in flight during one backward.
    wrapped = DistributedDataParallel(
        model, device_ids=None if kind == "cpu" else [rank], bucket_cap_mb=0.005, gradient_as_bucket_view=True
    )
    train(wrapped, rank, device)
    for got, expected in zip(model.parameters(), reference(size), strict=True):
        check(got.detach(), expected, "DDP")
    # A communication hook chains futures.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooked = DistributedDataParallel(make_model(device), bucket_cap_mb=0.005)
    hooked.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    train(hooked, rank, device)
    for got, expected in zip(hooked.parameters(), reference(size), strict=True):
        assert torch.allclose(got.detach().cpu(), expected, atol=0.02)


def train_sharded(rank: int, size: int, kind: str, mesh_shape: tuple[int, ...], what: str) -> None:
    """fully_shard over a mesh: one dimension shards, two replicate over the first and shard over the second."""
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = make_model(device)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank, device)
    for got, expected in zip(model.parameters(), reference(size), strict=True):
        check(got.full_tensor().detach(), expected, what)


def fsdp(rank: int, size: int, kind: str) -> None:
    train_sharded(rank, size, kind, (size,), "FSDP2")


def hsdp(rank: int, size: int, kind: str) -> None:
    train_sharded(rank, size, kind, (2, size // 2), "HSDP")


def tensor_parallel(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    mesh = init_device_mesh(device.type, (size,))
    model, whole = make_model(device), make_model(device)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = batch(0, 0).to(device)
    outputs, expected = model(inputs), whole(inputs)
    assert torch.allclose(outputs, expected, atol=1e-5)
    outputs.square().mean().backward()
    expected.square().mean().backward()
    gradient = model[0].weight.grad
    assert isinstance(gradient, DTensor)
    assert torch.allclose(gradient.full_tensor(), whole[0].weight.grad, atol=1e-5)

    tensor = torch.arange(size * 6 * 4, dtype=torch.float32).view(size * 3, 8).to(device)
    sharded = distribute_tensor(tensor, mesh, [Shard(0)])
    check(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), tensor, "redistribute")
    check(sharded.redistribute(mesh, [Replicate()]).to_local(), tensor, "replicate")


@pytest.mark.parametrize("kind", ["neuron", "cpu"])
@pytest.mark.parametrize(("body", "size"), [(ddp, 4), (fsdp, 4), (hsdp, 4), (tensor_parallel, 2)])
def test_training(body, size: int, kind: str) -> None:
    ranks.run(size, body, kind)


# ---- How a group is asked for ----------------------------------------------------------------------------------------


def backends(rank: int, size: int, backend: str | None, served: dict[str, str]) -> None:
    group = dist.group.WORLD
    for kind in ("neuron", "cpu"):
        device = device_of(kind, rank)
        if kind in served:
            assert group._get_backend(device).name() == served[kind]
            tensor = torch.ones(3, device=device)
            dist.all_reduce(tensor)
            assert (tensor == size).all()
        else:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(3, device=device))
    dist.barrier()


@pytest.mark.parametrize(
    ("backend", "served"),
    [
        ("neuron", {"neuron": "neuron", "cpu": "neuron"}),
        ("neuron:neuron,cpu:gloo", {"neuron": "neuron", "cpu": "gloo"}),
        ("cpu:gloo,neuron:neuron", {"neuron": "neuron", "cpu": "gloo"}),
        ("neuron:neuron", {"neuron": "neuron"}),
        ("gloo", {"cpu": "gloo"}),
    ],
)
def test_backend_strings(backend: str, served: dict[str, str]) -> None:
    ranks.run(2, backends, backend, served, backend=backend)


def without_backend(rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    assert dist.get_backend() == "neuron"
    backends(rank, size, None, {"neuron": "neuron", "cpu": "neuron"})


def test_without_a_backend_it_is_a_neuron_group() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(2, without_backend, server.port, backend="")


def on_gloo(rank: int, size: int) -> None:
    """A neuron group in a job whose default group is Gloo has a fabric of its own."""
    group = dist.new_group([0, 2], backend="neuron")
    if rank != 1:
        tensor = torch.full((1000,), float(rank), device=f"neuron:{rank}")
        dist.all_reduce(tensor, group=group)
        assert (tensor == 2).all()
    dist.barrier()


def test_a_neuron_group_beside_gloo() -> None:
    ranks.run(3, on_gloo, backend="gloo")


def split(rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    device = torch.device(f"neuron:{rank}")
    dist.init_process_group("neuron", store=store, rank=rank, world_size=size, device_id=device)
    # Some leave ranks out, who then have taken part in fewer splits; the same ranks come twice.
    for split_ranks in ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[1, 2]], [[0, 1, 2, 3]], [[3, 1]], [[0, 1], [2, 3]]):
        group = dist.split_group(split_ranks=split_ranks)
        mine = next((members for members in split_ranks if rank in members), None)
        assert (group is None) == (mine is None)
        if mine is None:
            continue
        for target in (device, torch.device("cpu")):
            tensor = torch.full((1000,), float(rank), device=target)
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(mine)).all()


def test_split_group() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(4, split, server.port, backend="")


def fake_dimension(rank: int, size: int) -> None:
    """Device meshes use groups that do nothing for dimensions of size one."""
    group = dist.new_group([rank], backend="fake", use_local_synchronization=True)
    tensor = torch.ones(3, device=f"neuron:{rank}")
    dist.all_reduce(tensor, group=group)
    assert (tensor == 1).all()


def test_fake_groups_take_neuron_tensors() -> None:
    ranks.run(2, fake_dimension)


def many(rank: int, size: int) -> None:
    tensor = torch.ones(3, device=f"neuron:{rank}")
    dist.all_reduce(tensor)
    assert (tensor == size).all()
    tensor = torch.full((size * 100,), float(rank), device=f"neuron:{rank}")
    dist.all_reduce(tensor)
    assert (tensor == size * (size - 1) / 2).all()
    output = torch.zeros(size * size, device=f"neuron:{rank}")
    dist.all_gather_single(output, torch.full((size,), float(rank), device=f"neuron:{rank}"))
    assert (output.view(size, size) == torch.arange(size, device=output.device)[:, None]).all()
    for _ in range(40):
        dist.barrier()


def test_many_more_ranks_than_cores() -> None:
    ranks.run(64, many)
