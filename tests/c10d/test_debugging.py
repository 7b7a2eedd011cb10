"""What a program gets for its own debugging: a prompt that times nobody out, debug levels, checks of replicas."""

from __future__ import annotations

import io
import os
import pdb
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.c10d import ranks


class SlowTyping(io.StringIO):
    """Somebody who thinks for a while at the prompt, then lets the program go on."""

    def readline(self, size: int = -1) -> str:
        time.sleep(2.5)
        return "continue\n"


def at_a_prompt(rank: int, size: int) -> float:
    tensor = torch.ones(4, device=f"neuron:{rank}")
    dist.all_reduce(tensor)
    begin = time.monotonic()
    if rank == 1:
        debugger = pdb.Pdb(stdin=SlowTyping(), stdout=io.StringIO())
        debugger.set_trace()
    work = dist.all_reduce(tensor, async_op=True)
    while rank == 0 and not work.is_completed():
        time.sleep(0.01)
    work.wait()
    dist.barrier()
    return time.monotonic() - begin


def test_a_rank_at_a_prompt_does_not_time_the_others_out() -> None:
    assert min(ranks.run(3, at_a_prompt, timeout_s=1)) > 2


def after_the_prompt(rank: int, size: int) -> None:
    """Deadlines go on once the program does."""
    if rank == 1:
        pdb.Pdb(stdin=SlowTyping(), stdout=io.StringIO()).set_trace()
        time.sleep(4)
    dist.barrier()


def test_deadlines_go_on_after_the_prompt() -> None:
    outcome = ranks.outcomes(2, after_the_prompt, timeout_s=1)[0]
    assert outcome.error_type == "DistBackendError" and "waited" in outcome.error and "for rank 1" in outcome.error
    assert 2 < outcome.seconds < 20


def detailed(rank: int, size: int, port: int) -> str:
    store = dist.PrefixStore("detail", dist.TCPStore("127.0.0.1", port, is_master=False))
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.distributed_c10d._GLOO_AVAILABLE = False
    dist.init_process_group("neuron", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(f"neuron:{rank}"))
    model(torch.ones(2, 4, device=f"neuron:{rank}")).sum().backward()
    with pytest.raises(dist.DistBackendError, match="do not agree"):
        dist.all_reduce(torch.ones(3 + rank, device=f"neuron:{rank}"))
    return type(dist.group.WORLD._get_backend(torch.device("neuron"))).__name__  # type: ignore[union-attr]


def test_the_debug_level_detail_needs_no_gloo() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(2, detailed, server.port, backend="") == ["ProcessGroupNeuron"] * 2


# ---- Replicas --------------------------------------------------------------------------------------------------------


def model_on(rank: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(f"neuron:{rank}")


def diverges(rank: int, size: int) -> str:
    model = model_on(rank)
    torch.neuron.check_replicas(model)  # type: ignore[attr-defined]
    if rank == 2:
        with torch.no_grad():
            model[1].weight[3, 2] = torch.nextafter(model[1].weight[3, 2], torch.tensor(9.0, device=f"neuron:{rank}"))
            model[1].bias += 1
    with pytest.raises(RuntimeError) as raised:
        torch.neuron.check_replicas(model)  # type: ignore[attr-defined]
    return str(raised.value)


def test_replicas_that_differ_in_one_bit_are_found() -> None:
    expected = (
        "replicas have diverged: 1.weight is the first of 2 tensors that differ; "
        "rank 2 has other bits than 2 of the 3 ranks of its group"
    )
    assert ranks.run(3, diverges) == [expected] * 3


def shards(rank: int, size: int) -> str:
    """With HSDP a shard's replicas lie along the first dimension of the mesh; shards themselves differ."""
    mesh = init_device_mesh("neuron", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = model_on(rank)
    fully_shard(model, mesh=mesh)
    torch.neuron.check_replicas(model)  # type: ignore[attr-defined]
    if rank == 3:
        with torch.no_grad():
            model[0].weight.to_local().add_(1)
    try:
        torch.neuron.check_replicas(model)  # type: ignore[attr-defined]
    except RuntimeError as error:
        return str(error)
    return ""


def test_shards_are_compared_with_their_replicas() -> None:
    results = ranks.run(4, shards)
    assert results[0] == results[2] == ""
    assert results[1] == results[3] and "0.weight is the first of 1 tensors that differ; rank" in results[1]


def every_second_step(rank: int, size: int) -> int:
    os.environ["TRN_CHECK_REPLICAS"] = "2"
    from trn_dist.neuron import replicas

    replicas.install()
    model = model_on(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 9):
        model(torch.ones(1, 8, device=f"neuron:{rank}")).sum().backward()
        if rank == 1 and step == 5:
            model[0].bias.grad.add_(1)
        try:
            optimizer.step()
        except replicas.ReplicaDivergenceError as error:
            assert "0.bias is the first of" in str(error)
            return step
    return 0


def test_the_variable_checks_every_n_steps() -> None:
    assert ranks.run(2, every_second_step) == [6, 6]
