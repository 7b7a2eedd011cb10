"""Pipeline schedules and context parallelism over the process group, against the same computation in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of

WIDTH, BATCH, MICROBATCHES = 8, 16, 8
ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
LOOPED = (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def inputs_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def in_one_process(stages: int) -> tuple[list[Layer], list[torch.Tensor]]:
    """Gradients added up over the microbatches in their order, and the loss of each."""
    layers = [Layer(i) for i in range(stages)]
    inputs, targets = inputs_and_targets()
    losses = []
    for x, target in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        for layer in layers:
            x = layer(x)
        loss = F.mse_loss(x, target, reduction="sum")
        loss.backward()
        losses.append(loss.detach())
    return layers, losses


def schedules(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    if kind == "neuron":
        torch.accelerator.set_device_index(rank)
    inputs, targets = (tensor.to(device) for tensor in inputs_and_targets())
    for schedule_class in (*ONE_STAGE, *LOOPED, *V_SHAPED):
        mine = [rank]
        if schedule_class in LOOPED:
            mine = [rank, rank + size]
        elif schedule_class in V_SHAPED:
            mine = [rank, 2 * size - 1 - rank]
        stages = size * len(mine)
        parts = [PipelineStage(Layer(i).to(device), i, stages, device) for i in mine]
        options = {
            "n_microbatches": MICROBATCHES,
            "loss_fn": lambda output, target: F.mse_loss(output, target, reduction="sum"),
            "scale_grads": False,
        }
        schedule = schedule_class(parts[0] if schedule_class in ONE_STAGE else parts, **options)
        expected, expected_losses = in_one_process(stages)
        for _ in range(2):
            for part in parts:
                part.submod.zero_grad()
            losses: list[torch.Tensor] = []
            last = stages - 1 in mine
            arguments = (inputs,) if rank == 0 else ()
            schedule.step(*arguments, **({"target": targets, "losses": losses} if last else {}))
            for index, part in zip(mine, parts, strict=True):
                for name, parameter in part.submod.named_parameters():
                    right = expected[index].get_parameter(name).grad
                    assert parameter.grad is not None and right is not None
                    check(parameter.grad, right, schedule_class.__name__, index, name)
            for got, loss in zip(losses, expected_losses if last else [], strict=True):
                check(got.detach(), loss, schedule_class.__name__, "loss")


def ring_attention(rank: int, size: int, kind: str) -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    device = device_of(kind, rank)
    torch.accelerator.set_device_index(rank)
    mesh = init_device_mesh(device.type, (size,))
    generator = torch.Generator().manual_seed(5)
    # Batch, heads, sequence, features.
    whole = [torch.randn(2, 4, 16 * size, 8, generator=generator) for _ in range(3)]
    weights = torch.randn(2, 4, 16 * size, 8, generator=generator)
    for method in ("allgather", "alltoall"):
        set_rotate_method(method)
        for causal in (False, True):
            alone = [tensor.clone().requires_grad_() for tensor in whole]
            expected = F.scaled_dot_product_attention(*alone, is_causal=causal)
            (expected * weights).sum().backward()
            together = [tensor.to(device) for tensor in (*whole, weights)]
            with context_parallel(mesh, buffers=together, buffer_seq_dims=[2, 2, 2, 2]):
                for tensor in together[:3]:
                    tensor.requires_grad_()
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
                    output = F.scaled_dot_product_attention(*together[:3], is_causal=causal)
                (output * together[3]).sum().backward()
                gradients = [tensor.grad for tensor in together[:3]]
                for tensor in together[:3]:
                    tensor.requires_grad_(False)
                results = context_parallel_unshard(mesh, [output.detach(), *gradients], [2] * 4)
            for got, right in zip(results, [expected.detach(), *(tensor.grad for tensor in alone)], strict=True):
                torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind"), [(2, "neuron"), (4, "neuron"), (2, "cpu")])
def test_schedules(size: int, kind: str) -> None:
    ranks.run(size, schedules, kind)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallelism(size: int) -> None:
    ranks.run(size, ring_attention, "neuron")
