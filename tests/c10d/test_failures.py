"""Whatever goes wrong ends, on every rank and in time, in an error that says what, where and who."""

from __future__ import annotations

# c10d says that its calls may return None, which they do only outside of a group.
# mypy: disable-error-code="union-attr"
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.c10d import ranks


def tensor_on(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=f"neuron:{rank}")


# ---- Ranks that disagree ---------------------------------------------------------------------------------------------


def disagree(rank: int, size: int, how: str) -> None:
    dist.barrier()
    odd = rank == 2
    if how == "operation":
        dist.broadcast(tensor_on(rank, 3, 4), 0) if odd else dist.all_reduce(tensor_on(rank, 3, 4))
    elif how == "shape":
        dist.all_reduce(tensor_on(rank, 3, 5 if odd else 4))
    elif how == "large shape":
        dist.all_reduce(tensor_on(rank, 300, 500 if odd else 400))
    elif how == "dtype":
        dist.all_reduce(tensor_on(rank, 3, dtype=torch.int32 if odd else torch.float32))
    elif how == "root":
        dist.broadcast(tensor_on(rank, 3), 2 if odd else 0)
    elif how == "reduce op":
        dist.all_reduce(tensor_on(rank, 3), ReduceOp.MAX if odd else ReduceOp.SUM)
    elif how == "small and large":
        dist.all_gather_single(tensor_on(rank, 4 * 100000 if odd else 4), tensor_on(rank, 100000 if odd else 1))
    elif how == "splits":
        splits = [1, 1, 1, 1] if not odd else [1, 2, 1, 0]
        dist.all_to_all_single(tensor_on(rank, 4, 5), tensor_on(rank, 4, 5), [1, 1, 1, 1], splits)


OTHERS = "ranks 0, 1, 3: "


@pytest.mark.parametrize(
    ("how", "odd_line", "other_line"),
    [
        (
            "operation",
            "rank 2: broadcast(root 0) of float32 [3, 4]",
            OTHERS + "all_reduce(SUM) of float32 [3, 4]",
        ),
        ("shape", "rank 2: all_reduce(SUM) of float32 [3, 5]", OTHERS + "all_reduce(SUM) of float32 [3, 4]"),
        (
            "large shape",
            "rank 2: all_reduce(SUM) of float32 [300, 500]",
            OTHERS + "all_reduce(SUM) of float32 [300, 400]",
        ),
        ("dtype", "rank 2: all_reduce(SUM) of int32 [3]", OTHERS + "all_reduce(SUM) of float32 [3]"),
        ("root", "rank 2: broadcast(root 2) of float32 [3]", OTHERS + "broadcast(root 0) of float32 [3]"),
        ("reduce op", "rank 2: all_reduce(MAX) of float32 [3]", OTHERS + "all_reduce(SUM) of float32 [3]"),
        ("small and large", "rank 2: all_gather of float32 [100000]", OTHERS + "all_gather of float32 [1]"),
        (
            "splits",
            "rank 2 sends 40 bytes to rank 1, which expects 20 bytes from it",
            "ranks 0-3: all_to_all of float32 [4, 5]",
        ),
    ],
)
def test_a_mismatch_is_found_at_once_on_every_rank(how: str, odd_line: str, other_line: str) -> None:
    for outcome in ranks.outcomes(4, disagree, how, timeout_s=300):
        assert outcome.error_type == "DistBackendError", outcome
        assert "collective #1 of group 0" in outcome.error
        assert odd_line in outcome.error and other_line in outcome.error
        assert outcome.seconds < 10


def fail_then_go_on(rank: int, size: int) -> str:
    with pytest.raises(dist.DistBackendError, match="do not agree"):
        dist.all_reduce(tensor_on(rank, 3 + rank))
    with pytest.raises(dist.DistBackendError, match="do not agree"):
        dist.barrier()
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor_on(rank, 3), group=group)
    return "ok"


def test_a_failed_group_raises_its_first_error_again_and_others_work_on() -> None:
    assert ranks.run(2, fail_then_go_on) == ["ok", "ok"]


# ---- Ranks that die --------------------------------------------------------------------------------------------------


def one_dies(rank: int, size: int, when: str) -> None:
    dist.all_reduce(tensor_on(rank, 10))
    large = tensor_on(rank, 5_000_000)
    if when == "before":
        if rank == 1:
            ranks.die()
    elif when == "in the middle":
        if rank == 1:
            work = dist.all_reduce(large, async_op=True)
            time.sleep(0.05)
            ranks.die()
            work.wait()
        elif rank == 0:
            time.sleep(0.2)  # completes the collective, of which the dead rank has posted its part
    elif when == "exits" and rank == 1:
        os._exit(0)
    dist.all_reduce(large)
    dist.barrier()


@pytest.mark.parametrize("when", ["before", "in the middle", "exits"])
def test_a_rank_that_dies_ends_the_others_within_seconds(when: str) -> None:
    results = ranks.outcomes(4, one_dies, when, timeout_s=300)
    assert results[1].exitcode == (0 if when == "exits" else -signal.SIGKILL)
    for rank in (0, 2, 3):
        assert results[rank].error_type == "DistBackendError", results[rank]
        assert "rank 1 has died" in results[rank].error and "of group 0 cannot complete" in results[rank].error
        assert results[rank].seconds < 10


def sender_dies(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 1:
        ranks.die()
    dist.recv(tensor_on(rank, 10), 1)


def test_a_sender_that_dies() -> None:
    outcome = ranks.outcomes(2, sender_dies, timeout_s=300)[0]
    assert outcome.error_type == "DistBackendError"
    assert "recv from rank 1 (tag 0, 40 bytes) of group 0 cannot complete: rank 1 has died" in outcome.error
    assert outcome.seconds < 10


def one_leaves(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 1:
        return
    dist.all_reduce(tensor_on(rank, 10))


def test_a_rank_that_has_destroyed_the_group() -> None:
    results = ranks.outcomes(3, one_leaves, timeout_s=300)
    assert results[1].error == ""
    for rank in (0, 2):
        assert "rank 1 has left the group (destroy_process_group)" in results[rank].error
        assert results[rank].seconds < 10


# ---- Ranks that do not come ------------------------------------------------------------------------------------------


def one_is_late(rank: int, size: int) -> None:
    dist.broadcast(tensor_on(rank, 2), 0)
    if rank == 2:
        time.sleep(4)
    dist.all_reduce(tensor_on(rank, 10))


def test_a_timeout_names_the_missing_rank() -> None:
    results = ranks.outcomes(3, one_is_late, timeout_s=1.0)
    for rank in (0, 1):
        assert results[rank].error_type == "DistBackendError"
        assert "all_reduce #1 of group 0 timed out" in results[rank].error
        assert "waited 1 s for rank 2" in results[rank].error
        assert (
            "rank 2: its last collective in this group was #0, broadcast(root 0) of float32 [2]" in results[rank].error
        )
        assert results[rank].seconds < 5
    assert "timed out" in results[2].error  # the late rank learns of it too


def timeouts(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 0:
        begin = time.monotonic()
        work = dist.all_reduce(tensor_on(rank, 10), async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"waited 0\.2 s for rank 1"):
            work.wait(timedelta(seconds=0.2))  # only this wait is over
        assert time.monotonic() - begin < 3
        work.wait()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3))
        with pytest.raises(dist.DistBackendError, match=r"recv from rank 1 .* waited 0\.3 s for rank 1"):
            dist.recv(tensor_on(rank, 10), 1)
    else:
        time.sleep(1)
        dist.all_reduce(tensor_on(rank, 10))
        time.sleep(1)


def test_timeouts_of_a_wait_and_of_a_group() -> None:
    ranks.run(2, timeouts, timeout_s=30)


def does_not_join(rank: int, size: int, port: int) -> None:
    if rank != 2:
        store = dist.PrefixStore("late", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("neuron", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=1.5))


def test_a_rank_that_does_not_join() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = ranks.outcomes(3, does_not_join, server.port, backend="")
    for rank in (0, 1):
        assert results[rank].error_type == "DistBackendError", results[rank]
        assert "rank 2 of 3 did not join the process group within 1.5 s" in results[rank].error


# ---- Leaving ---------------------------------------------------------------------------------------------------------


def destroyed_with_work_pending(rank: int, size: int) -> float:
    tensor = tensor_on(rank, 100_000)
    works = [dist.all_reduce(tensor, async_op=True)]
    if rank == 0:
        works.append(dist.all_reduce(tensor_on(rank, 10), async_op=True))  # nobody joins in this one
        dist.isend(tensor_on(rank, 100_000), 1)  # and nobody receives this
    begin = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - begin


def test_destroying_a_group_with_work_pending_does_not_wait() -> None:
    assert max(ranks.run(2, destroyed_with_work_pending)) < 2


def again_and_again(rank: int, size: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    for attempt in range(5):
        prefixed = dist.PrefixStore(f"attempt{attempt}", store)
        dist.init_process_group("neuron", store=prefixed, rank=rank, world_size=size)
        group = dist.new_group([0, 1])
        tensor = tensor_on(rank, 10_000)
        dist.all_reduce(tensor, group=group)
        dist.destroy_process_group()
        assert (tensor == 2).all()


def test_groups_can_be_made_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(2, again_and_again, server.port, backend="")


def aborted(rank: int, size: int) -> None:
    dist.barrier()
    if rank == 0:
        time.sleep(0.3)
        dist.group.WORLD.abort()
    else:
        with pytest.raises(dist.DistBackendError, match="group 0 was aborted by rank 0"):
            dist.all_reduce(tensor_on(rank, 10))


def test_abort() -> None:
    for outcome in ranks.outcomes(3, aborted, timeout_s=300):
        assert outcome.error == "", outcome.error
        assert outcome.seconds < 10


def interrupted(rank: int, size: int) -> str:
    dist.barrier()
    if rank == 0:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor_on(rank, 10))
        assert time.monotonic() - begin < 3
    else:
        time.sleep(1.5)
    return "ok"


def test_ctrl_c_ends_a_wait() -> None:
    assert ranks.run(2, interrupted) == ["ok", "ok"]


def forked(rank: int, size: int) -> int:
    """A child that a rank forks, as a DataLoader does, may come and go, but not take part."""
    tensor = tensor_on(rank, 1000)
    dist.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dist.barrier()
        except RuntimeError as error:
            code = 7 if "Cannot re-initialize neuron in forked subprocess" in str(error) else 2
        del tensor
        os._exit(code)
    _, status = os.waitpid(child, 0)
    dist.all_reduce(tensor)
    assert (tensor == size * size).all()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_cannot_take_part() -> None:
    assert ranks.run(2, forked) == [7, 7]


# ---- Arguments -------------------------------------------------------------------------------------------------------


def arguments(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match=r"cannot reduce float32 with ReduceOp\.BAND: bitwise reductions need"):
        dist.all_reduce(tensor_on(rank, 3), ReduceOp.BAND)
    with pytest.raises(TypeError, match="a bool has no average"):
        dist.all_reduce(tensor_on(rank, 3, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(ValueError, match="output tensor size must be equal to world_size times input tensor size"):
        dist.all_gather_single(tensor_on(rank, 3), tensor_on(rank, 3))
    with pytest.raises(TypeError, match="needs tensors of one dtype, got"):
        dist.all_gather_single(tensor_on(rank, 6, dtype=torch.int32), tensor_on(rank, 3))
    with pytest.raises(ValueError, match="must add up to the first dimension, 4"):
        dist.all_to_all_single(tensor_on(rank, 4), tensor_on(rank, 4), [2, 2], [2, 1])
    with pytest.raises(ValueError, match="a first dimension that 2 divides, got 3"):
        dist.all_to_all_single(tensor_on(rank, 3), tensor_on(rank, 3))
    with pytest.raises(ValueError, match="needs tensors on neuron or cpu, got one on meta"):
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([torch.ones(3, device="meta")])
    dist.barrier()


def test_arguments_are_checked_before_anything_is_sent() -> None:
    ranks.run(2, arguments)
