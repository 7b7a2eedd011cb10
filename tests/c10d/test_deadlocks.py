"""Ranks that wait for each other are told at once, with the cycle; ranks that can still go on are left alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.c10d import ranks


def tensor_on(rank: int, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=f"neuron:{rank}")


def across_groups(rank: int, size: int) -> None:
    first = dist.new_group([0, 1])
    second = dist.new_group([1, 2])
    third = dist.new_group([0, 2])
    dist.barrier()
    if rank == 0:
        dist.all_reduce(tensor_on(rank, 3), group=first)
    elif rank == 1:
        dist.recv(tensor_on(rank, 4), 2, group=second)
    else:
        dist.all_reduce(tensor_on(rank, 3), group=third, async_op=True).wait()


def test_a_cycle_across_groups_and_messages() -> None:
    for outcome in ranks.outcomes(3, across_groups, timeout_s=300):
        assert outcome.error_type == "DistBackendError", outcome
        assert "deadlock: rank 0 waits for rank 1 waits for rank 2 waits for rank 0" in outcome.error
        assert "rank 0: all_reduce #0 of group 1 at " in outcome.error
        assert "rank 1: recv from rank 1 (2 in the job) (tag 0, 16 bytes) of group 2 at " in outcome.error
        assert f"{__file__}:" in outcome.error and "(across_groups), waits for rank 2" in outcome.error
        assert outcome.seconds < 20


def opposite_orders(rank: int, size: int) -> None:
    one = dist.new_group([0, 1])
    other = dist.new_group([0, 1])
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(tensor_on(rank, 300_000), group=group)


def head_to_head(rank: int, size: int) -> None:
    dist.recv(tensor_on(rank, 4), 1 - rank)


def wrong_tag(rank: int, size: int) -> None:
    if rank == 0:
        dist.isend(tensor_on(rank, 4), 1, tag=7)
        dist.recv(tensor_on(rank, 4), 1)
    else:
        dist.recv(tensor_on(rank, 4), 0, tag=8)


def from_any(rank: int, size: int) -> None:
    dist.recv(tensor_on(rank, 4))


def one_too_few(rank: int, size: int) -> None:
    """Rank 0 calls one collective more than rank 1, which goes on to a message."""
    dist.all_reduce(tensor_on(rank, 4))
    if rank == 0:
        dist.all_reduce(tensor_on(rank, 4))
    else:
        dist.recv(tensor_on(rank, 4), 0)


@pytest.mark.parametrize("fn", [opposite_orders, head_to_head, wrong_tag, from_any, one_too_few])
def test_two_ranks(fn: object) -> None:
    for outcome in ranks.outcomes(2, fn, timeout_s=300):  # type: ignore[arg-type]
        assert outcome.error_type == "DistBackendError", outcome
        assert "deadlock: rank 0 waits for rank 1 waits for rank 0, and nothing can match:" in outcome.error
        assert outcome.seconds < 20


def bystander(rank: int, size: int) -> str:
    """Ranks 0 and 1 wait for each other; rank 2 waits for rank 0, and rank 3 for nobody."""
    pair = dist.new_group([0, 1])
    others = dist.new_group([0, 2])
    if rank < 2:
        dist.recv(tensor_on(rank, 4), 1 - rank, group=pair)
    elif rank == 2:
        dist.all_reduce(tensor_on(rank, 4), group=others)
    return "went on"


def test_who_waits_for_the_cycle_is_told_and_others_go_on() -> None:
    results = ranks.outcomes(4, bystander, timeout_s=300)
    for rank in (0, 1):
        assert "deadlock: rank 0 waits for rank 1 waits for rank 0" in results[rank].error
    # Either it was counted in, or it learned that rank 0 had gone.
    assert results[2].error_type == "DistBackendError" and results[2].seconds < 20
    assert results[3].value == "went on"


def comes_late(rank: int, size: int) -> str:
    """Whatever looks like a cycle for a while and is none."""
    dist.barrier()
    if rank == 0:
        # A second thread sends what rank 1 waits for, while the first waits for rank 1.
        thread = threading.Timer(1.5, lambda: dist.send(tensor_on(rank, 4), 1))
        thread.start()
        dist.recv(tensor_on(rank, 4), 1)
        thread.join()
    else:
        dist.recv(tensor_on(rank, 4), 0)
        dist.send(tensor_on(rank, 4), 0)
    # Every rank waits for one that sleeps.
    if rank == 1:
        time.sleep(1)
    dist.all_reduce(tensor_on(rank, 4))
    return "ok"


def test_ranks_that_can_go_on_are_left_alone() -> None:
    assert ranks.run(2, comes_late, timeout_s=60) == ["ok", "ok"]
