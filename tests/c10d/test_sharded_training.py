"""FSDP2 and FSDP1 with each of their settings: the weights after training have the bits of one process's."""

from __future__ import annotations

# What c10d and FSDP return is declared wider than it is.
# mypy: disable-error-code="union-attr, index, operator, assignment, attr-defined"
import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of, tree
from tests.c10d.test_training import batch, make_model, reference, train


def layers(model: nn.Module) -> list[nn.Module]:
    return [model[0], model[2], model[4]]


def set_device(rank: int, kind: str) -> torch.device:
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    return device_of(kind, rank)


def sharded(device: torch.device, mesh: DeviceMesh, **settings) -> nn.Module:
    model = make_model(device)
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def check_weights(model: nn.Module, expected: list[torch.Tensor], what: str) -> None:
    for got, right in zip(model.parameters(), expected, strict=True):
        got = got.full_tensor() if isinstance(got, DTensor) else got
        check(got.detach(), right, what)


def resharding(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    mesh = init_device_mesh(device.type, (size,))
    for reshard_after_forward in (True, False, 2, None):
        model = sharded(device, mesh, reshard_after_forward=reshard_after_forward)
        train(model, rank, device)
        check_weights(model, reference(size), f"reshard_after_forward={reshard_after_forward}")


def prefetching(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    model = sharded(device, init_device_mesh(device.type, (size,)))
    first, second, third = layers(model)
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])
    train(model, rank, device)
    check_weights(model, reference(size), "explicit prefetch")
    model = sharded(device, init_device_mesh(device.type, (size,)))
    model.unshard(async_op=True).wait()
    model.reshard()
    model.set_unshard_in_backward(True)
    train(model, rank, device)
    check_weights(model, reference(size), "unshard and reshard by hand")


def accumulation(rank: int, size: int, kind: str) -> None:
    """Two microbatches, reduced after the second, are the sum of the gradients of both."""
    device = set_device(rank, kind)
    model = sharded(device, init_device_mesh(device.type, (size,)))
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(batch(rank, step).to(device)).square().mean().backward()
    expected = []
    for r in range(size):
        replica = make_model(torch.device("cpu"))
        for step in range(2):
            replica(batch(r, step)).square().mean().backward()
        expected.append([parameter.grad for parameter in replica.parameters()])
    for i, parameter in enumerate(model.parameters()):
        mean = tree([gradients[i] for gradients in expected], torch.add) / size
        check(parameter.grad.full_tensor(), mean, "accumulated", i)


def offloading(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    mesh = init_device_mesh(device.type, (size,))
    for pin_memory in (True, False):
        model = sharded(device, mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
        train(model, rank, device)
        assert all(parameter.to_local().device.type == "cpu" for parameter in model.parameters())
        for got, right in zip(model.parameters(), reference(size), strict=True):
            parts = DTensor.from_local(
                got.to_local().to(device), mesh, got.placements, shape=got.shape, stride=got.stride()
            )
            check(parts.full_tensor().detach(), right, "offloaded")


def mixed_precision(rank: int, size: int, kind: str) -> None:
    """bfloat16 layers, gradients added in float32: against the same by hand."""
    device = set_device(rank, kind)
    mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outermost = dataclasses.replace(policy, output_dtype=torch.float32)
    for each in (mesh, mesh["shard"]):
        model = make_model(device)
        for layer in layers(model):
            fully_shard(layer, mesh=each, mp_policy=policy)
        fully_shard(model, mesh=each, mp_policy=outermost)
        dtypes = []
        model[2].register_forward_hook(lambda module, inputs, output, seen=dtypes: seen.append(output.dtype))
        output = model(batch(rank, 0).to(device))
        assert output.dtype == torch.float32 and dtypes == [torch.bfloat16]
        output.square().mean().backward()
        members = range(size) if each is mesh else [rank - rank % each.size() + i for i in range(each.size())]
        gradients = []
        for r in members:
            replica = make_model(torch.device("cpu")).bfloat16()
            replica(batch(r, 0).bfloat16()).float().square().mean().backward()
            gradients.append([parameter.grad.float() for parameter in replica.parameters()])
        for i, parameter in enumerate(model.parameters()):
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            mean = tree([each[i] for each in gradients], torch.add) / len(gradients)
            check(parameter.grad.full_tensor(), mean, "mixed precision", i)


def ignoring(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    mesh = init_device_mesh(device.type, (size,))
    model = make_model(device)
    ignored = set(model[4].parameters())
    for layer in layers(model)[:2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    model(batch(rank, 0).to(device)).square().mean().backward()
    replica = make_model(torch.device("cpu"))
    replica(batch(rank, 0)).square().mean().backward()
    for parameter, alone in zip(model.parameters(), replica.parameters(), strict=True):
        assert isinstance(parameter, DTensor) == (parameter not in ignored)
        if parameter in ignored:
            check(parameter.grad, alone.grad, "ignored")


def clipping(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for each in (init_device_mesh(device.type, (size,)), mesh):
        model = sharded(device, each)
        model(batch(rank, 0).to(device)).square().mean().backward()
        whole = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        expected = torch.cat([gradient.flatten() for gradient in whole]).norm()
        torch.testing.assert_close(norm.full_tensor(), expected)
        for parameter, gradient in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient * (0.01 / (expected + 1e-6)))


def state_dict(rank: int, size: int, kind: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
    )

    device = set_device(rank, kind)
    model = sharded(device, init_device_mesh(device.type, (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch(rank, 0).to(device)).square().mean().backward()
    optimizer.step()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(whole) == (rank == 0)
    fresh = sharded(device, init_device_mesh(device.type, (size,)))
    set_model_state_dict(fresh, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for left, right in zip(fresh.parameters(), model.parameters(), strict=True):
        check(left.full_tensor().detach(), right.full_tensor().detach(), "state dict from rank 0")
    _, moments = get_state_dict(model, optimizer)
    assert len(moments["state"]) == len(list(model.parameters()))


def fsdp1(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    strategies: list[tuple[ShardingStrategy, object]] = [
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.SHARD_GRAD_OP, None),
        (ShardingStrategy.NO_SHARD, None),
        (ShardingStrategy.HYBRID_SHARD, init_device_mesh(device.type, (2, size // 2))),
    ]
    for strategy, mesh in strategies:
        for use_orig_params in (False, True):
            model = make_model(device)
            for i in (0, 2, 4):
                model[i] = FullyShardedDataParallel(
                    model[i],
                    device_id=device,
                    sharding_strategy=strategy,
                    device_mesh=mesh,
                    use_orig_params=use_orig_params,
                )
            wrapped = FullyShardedDataParallel(
                model,
                device_id=device,
                sharding_strategy=strategy,
                device_mesh=mesh,
                use_orig_params=use_orig_params,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                forward_prefetch=True,
            )
            train(wrapped, rank, device)
            with FullyShardedDataParallel.summon_full_params(wrapped):
                weights = [parameter.detach().flatten() for parameter in wrapped.parameters()]
                expected = [parameter.flatten() for parameter in reference(size)]
                check(torch.cat(weights), torch.cat(expected), strategy, use_orig_params)


def fsdp1_settings(rank: int, size: int, kind: str) -> None:
    device = set_device(rank, kind)
    # PyTorch's flat parameter cannot become a CPU tensor on a PrivateUse1 device; FSDP2 offloads, see above.
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        FullyShardedDataParallel(make_model(device), device_id=device, cpu_offload=CPUOffload(True))
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed = FullyShardedDataParallel(make_model(device), device_id=device, mixed_precision=low)
    before = copy.deepcopy([parameter.detach().clone() for parameter in mixed.parameters()])
    train(mixed, rank, device)
    assert any(not torch.equal(old, new) for old, new in zip(before, mixed.parameters(), strict=True))
    norm = mixed.clip_grad_norm_(0.5)
    assert norm.isfinite()
    dist.barrier()


BODIES: list[Callable[[int, int, str], None]] = [resharding, accumulation, ignoring, clipping, state_dict]
LONGER: list[Callable[[int, int, str], None]] = [prefetching, offloading, mixed_precision, fsdp1, fsdp1_settings]


@pytest.mark.parametrize("body", BODIES)
def test_sharded_training(body: Callable[[int, int, str], None]) -> None:
    ranks.run(4, body, "neuron")


@pytest.mark.slow
@pytest.mark.parametrize("body", LONGER)
def test_more_settings(body: Callable[[int, int, str], None]) -> None:
    ranks.run(4, body, "neuron", deadline_s=250.0)
