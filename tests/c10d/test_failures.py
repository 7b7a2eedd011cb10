"""Whatever goes wrong ends, on every rank and in time, in an error that says what, where and who."""

from __future__ import annotations

# c10d says that its calls may return None, which they do only outside of a group.
# mypy: disable-error-code="union-attr"
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

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


def other_order(rank: int, size: int) -> None:
    a, b = tensor_on(rank, 3), tensor_on(rank, 5)
    for tensor in (b, a) if rank == 2 else (a, b):
        dist.all_reduce(tensor)


def another_count(rank: int, size: int) -> None:
    for _ in range(2 if rank == 2 else 3):
        dist.all_reduce(tensor_on(rank, 3))
    dist.barrier()


@pytest.mark.parametrize(
    ("fn", "where", "odd_line", "other_line"),
    [
        (other_order, "collective #0", "rank 2: all_reduce(SUM) of float32 [5] at ", "[3] at "),
        (another_count, "collective #2", "rank 2: barrier at ", OTHERS + "all_reduce(SUM) of float32 [3] at "),
    ],
)
def test_another_order_or_count_is_found_at_once(
    fn: Callable[[int, int], None], where: str, odd_line: str, other_line: str
) -> None:
    for outcome in ranks.outcomes(4, fn, timeout_s=300):
        assert outcome.error_type == "DistBackendError", outcome
        assert where in outcome.error and odd_line in outcome.error and other_line in outcome.error
        assert outcome.seconds < 10


def disagree_on_two_lines(rank: int, size: int) -> tuple[int, int]:
    code = disagree_on_two_lines.__code__
    if rank == 0:
        work = dist.all_reduce(tensor_on(rank, 3), async_op=True)
        work.wait()
    dist.all_reduce(tensor_on(rank, 4))
    raise AssertionError(code)


def test_the_table_has_the_lines_of_the_program() -> None:
    """Also of a call that had returned long before: the line is kept with the call."""
    first = disagree_on_two_lines.__code__.co_firstlineno
    for outcome in ranks.outcomes(2, disagree_on_two_lines, timeout_s=300):
        assert outcome.error_type == "DistBackendError", outcome
        where = f"at {__file__}:"
        assert f"rank 0: all_reduce(SUM) of float32 [3] {where}{first + 3} (disagree_on_two_lines)" in outcome.error
        assert f"rank 1: all_reduce(SUM) of float32 [4] {where}{first + 5} (disagree_on_two_lines)" in outcome.error


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


def one_dies_between(rank: int, size: int) -> None:
    """Rank 1 dies after one of many collectives that nobody waits for one by one."""
    works = []
    for step in range(20):
        works.append(dist.all_reduce(tensor_on(rank, 1000), async_op=True))
        if rank == 1 and step == 10:
            works[-1].wait()
            ranks.die()
    for work in works:
        work.wait()


def test_a_rank_that_dies_between_two_collectives() -> None:
    results = ranks.outcomes(4, one_dies_between, timeout_s=300)
    for rank in (0, 2, 3):
        assert results[rank].error_type == "DistBackendError", results[rank]
        assert "all_reduce #11 of group 0 cannot complete: rank 1 has died" in results[rank].error
        assert results[rank].seconds < 10


def stopped(rank: int, size: int) -> float:
    """Rank 0 stops rank 1 in the middle of its collectives and lets it go on a second later."""
    pids = [torch.empty(1, dtype=torch.int64, device=f"neuron:{rank}") for _ in range(size)]
    dist.all_gather(pids, torch.tensor([os.getpid()], device=f"neuron:{rank}"))
    tensor = tensor_on(rank, 500_000)
    if rank == 0:
        other = int(pids[1].item())
        os.kill(other, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(other, signal.SIGCONT))
    begin = time.monotonic()
    for _ in range(10):
        dist.all_reduce(tensor)
        tensor /= size
    assert (tensor == 1).all()
    return time.monotonic() - begin


def test_a_rank_that_is_stopped_and_continued_succeeds() -> None:
    assert max(ranks.run(3, stopped, timeout_s=60)) > 0.9


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


def dies_after_its_post(rank: int, size: int) -> bool:
    tensor = torch.ones(100_000)
    for _ in range(2):
        dist.all_reduce(tensor)  # of the first call on, ranks know whether they may read each other's memory
    if rank == 1:
        dist.all_reduce(tensor, async_op=True)
        ranks.die()
    time.sleep(1)
    dist.all_reduce(tensor)
    return bool((tensor == 8).all())


def test_a_rank_that_dies_takes_its_cpu_tensors_along() -> None:
    outcome = ranks.outcomes(2, dies_after_its_post, timeout_s=300)[0]
    # Where the system keeps processes apart, the tensor was copied into shared memory and outlives its rank.
    if outcome.error:
        assert outcome.error_type == "DistBackendError"
        assert "cannot read the tensor of rank 1 (process_vm_readv: No such process)" in outcome.error
    else:
        assert outcome.value
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
        dist.distributed_c10d._get_default_store().set("interrupted", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["interrupted"])
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


def aborted_from_a_thread(rank: int, size: int) -> str:
    """While the main thread waits. All waiters of all ranks are woken, in every group."""
    group = dist.new_group([0, 1, 2])
    dist.barrier()
    if rank == 0:
        aborts = threading.Timer(0.5, dist.distributed_c10d._abort_process_group)
        aborts.start()
    if rank < 2:
        with pytest.raises(dist.DistBackendError, match="was aborted by rank 0"):
            dist.all_reduce(tensor_on(rank, 10))
    else:
        with pytest.raises(dist.DistBackendError, match=f"group {group.group_name} was aborted by rank 0"):
            dist.recv(tensor_on(rank, 10), 0, group=group)
        # Its own group may be the first to go; leaving the other one before that too would be another failure.
        with pytest.raises(dist.DistBackendError, match="was aborted by rank 0"):
            dist.recv(tensor_on(rank, 10), 0)
    if rank == 0:
        aborts.join()
        assert not dist.is_initialized()
    return "ok"


def test_an_abort_by_another_thread_wakes_everybody() -> None:
    results = ranks.outcomes(3, aborted_from_a_thread, timeout_s=300)
    assert [result.value for result in results] == ["ok"] * 3, results
    assert max(result.seconds for result in results) < 10


def shrinks(rank: int, size: int, excluded: int, whole: bool) -> list[float]:
    """The excluded rank has died; the others go on with a smaller group, made without the store."""
    group = None if whole else dist.new_group(range(size))
    dist.all_reduce(tensor_on(rank, 3), group=group)
    if rank == excluded:
        ranks.die()
    with pytest.raises(dist.DistBackendError, match=f"rank {excluded} has died"):
        dist.all_reduce(tensor_on(rank, 3), group=group)
    smaller = dist.shrink_group([excluded], group=group, shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    assert smaller.size() == size - 1
    tensor = tensor_on(rank, 3) * (rank + 1)
    dist.all_reduce(tensor, group=smaller)
    on_cpu = torch.ones(2)
    dist.all_reduce(on_cpu, group=smaller)
    assert on_cpu.tolist() == [size - 1] * 2
    return tensor.tolist()


@pytest.mark.parametrize(("excluded", "whole"), [(0, False), (1, False), (2, True)])
def test_a_group_shrinks_without_a_dead_rank(excluded: int, whole: bool) -> None:
    results = ranks.outcomes(3, shrinks, excluded, whole, timeout_s=300)
    expected = [float(6 - (excluded + 1))] * 3
    for rank in range(3):
        if rank != excluded:
            assert results[rank].value == expected, results[rank]


def monitored(rank: int, size: int) -> str:
    dist.monitored_barrier()
    if rank == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(dist.DistBackendError) as raised:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    return str(raised.value)


def test_a_monitored_barrier_names_who_did_not_come() -> None:
    results = ranks.run(3, monitored)
    for rank in (0, 2):
        assert "monitored_barrier #1 of group 0 timed out" in results[rank]
        assert "waited 0.5 s for rank 1" in results[rank]


# ---- What is not there -----------------------------------------------------------------------------------------------


def store_goes_away(rank: int, size: int, port: int) -> str:
    """Rank 2 holds the store and dies. The groups work on without it; only making groups needs it."""
    meeting = dist.TCPStore("127.0.0.1", port, is_master=False)
    store: dist.Store
    if rank == 2:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
        meeting.wait(["joined0", "joined1"])
        ranks.die()
    store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)
    store.set_timeout(timedelta(seconds=5))
    dist.init_process_group("neuron", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    meeting.set(f"joined{rank}", "")
    while True:
        try:
            store.add("alive", 1)
        except dist.DistError:
            break
        time.sleep(0.02)
    tensor = tensor_on(rank, 100_000)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    assert (tensor == 4).all()
    begin = time.monotonic()
    with pytest.raises(dist.DistError):
        dist.new_group([0, 1])
    assert time.monotonic() - begin < 8
    return "ok"


def test_the_store_goes_away() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = ranks.outcomes(3, store_goes_away, server.port, backend="")
    for rank in (0, 1):
        assert results[rank].value == "ok", results[rank]


def without_descriptors(rank: int, size: int) -> None:
    """Collectives, and looking after each other, open nothing that they could not do without."""

    def calls(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

    calls(tensor_on(rank, 100_000))  # the first ones price the group's collectives and messages, from files
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    if rank == 1:
        time.sleep(1)  # long enough for the others to look whether it lives
    tensor = tensor_on(rank, 100_000)
    calls(tensor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert (tensor == size).all()


def test_out_of_file_descriptors() -> None:
    ranks.run(2, without_descriptors)


def joins_without_descriptors(rank: int, size: int, port: int, left: int) -> None:
    store = dist.PrefixStore("few", dist.TCPStore("127.0.0.1", port, is_master=False))
    torch.ones(3, device=f"neuron:{rank}")
    if rank == 1:
        free = [os.dup(0) for _ in range(8)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for descriptor in free[:left]:
            os.close(descriptor)
    dist.init_process_group("neuron", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=3))
    dist.barrier()


@pytest.mark.parametrize("left", range(3))
def test_joining_without_file_descriptors_says_so(left: int) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = ranks.outcomes(2, joins_without_descriptors, server.port, left, backend="")
    assert "is out of file descriptors (ulimit -n)" in results[1].error, results[1]
    assert results[0].error_type == "DistBackendError" and results[0].seconds < 15, results[0]


FULL_DEV_SHM = """
mount -t tmpfs -o size=4k tmpfs /dev/shm
head -c 4096 /dev/zero >/dev/shm/full
! head -c 1 /dev/zero >/dev/shm/no_room 2>/dev/null
exec "$@"
"""


def test_a_full_dev_shm_does_not_matter() -> None:
    program = (
        "from tests.c10d import ranks, test_failures; print(sum(ranks.run(2, test_failures.large_sum, timeout_s=30)))"
    )
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a mount namespace (root, or user namespaces)")
    command = [*namespace, "sh", "-ec", FULL_DEV_SHM, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.strip() == "4.0", done.stderr


def large_sum(rank: int, size: int) -> float:
    tensor = tensor_on(rank, 1_000_000)
    dist.all_reduce(tensor)
    return float(tensor[-1].item())


def killed_together(rank: int, size: int, found_path: str) -> None:
    """Tells the test what there is to find of it, then is killed in the middle of a collective."""
    tensor = tensor_on(rank, 2_000_000)
    dist.all_reduce(tensor)
    arena = next(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if "memfd:trn" in _target(fd))
    inode = next(
        os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if "memfd:trn" in _target(fd)
    )
    store = dist.distributed_c10d._get_default_store()
    store.set(f"found{rank}", f"{os.getpid()} {inode} {arena}")
    if rank == 0:
        store.wait([f"found{other}" for other in range(size)])
        found = [store.get(f"found{other}").decode() for other in range(size)]
        with open(found_path, "w") as file:
            file.write("\n".join([*found, _socket_name(store)]))
        for line in found[1:]:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        ranks.die()
    while True:
        dist.all_reduce(tensor)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def _socket_name(store: dist.Store) -> str:
    return store.get("neuron//trn/fabric/0").decode().split()[0]


def test_nothing_is_left_of_ranks_that_were_killed(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    results = ranks.outcomes(3, killed_together, str(tmp_path / "found"), timeout_s=300)
    assert [result.exitcode for result in results] == [-signal.SIGKILL] * 3, results
    *found, socket_name = (tmp_path / "found").read_text().split("\n")
    for line in found:
        assert not os.path.exists(f"/proc/{line.split()[0]}")
    inodes = {line.split()[1] for line in found}
    assert not [line for line in mapped_memfds() if line.split()[4] in inodes]
    assert socket_name.startswith("trn_dist-") and socket_name not in Path("/proc/net/unix").read_text()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "trn" in name}


def mapped_memfds() -> list[str]:
    """The lines of all processes' memory maps that are arenas."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines += [line for line in (process / "maps").read_text().split("\n") if "/memfd:trn" in line]
    return lines


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
