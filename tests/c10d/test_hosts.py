"""Ranks on several hosts: the same programs have the same results, bit for bit, and the same virtual times as on one,
and whatever goes wrong ends on every host in an error that names rank and host.

The hosts are network namespaces of this machine with addresses of their own. Where those are impossible the tests that
need them are skipped, and hosts that differ in name alone remain.
"""

from __future__ import annotations

# mypy: disable-error-code="union-attr"
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.c10d import hosts, ranks, test_collectives, test_failures, test_messages, test_training, test_works
from tests.c10d.hosts import Host
from tests.c10d.test_collectives import check, reduced, values
from tests.timing import test_collectives as timing_of

PROGRAM = Path(__file__).parent / "two_hosts_program.py"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    reason = hosts.why_not()
    if reason:
        pytest.skip(reason)
    with hosts.two_hosts() as both:
        yield both


def spread(pair: tuple[Host, Host], size: int) -> list[Host]:
    """Equal blocks of ranks."""
    return [pair[rank * 2 // size] for rank in range(size)]


def one_after_another(rank: int, size: int, kind: str, bodies: list[Callable]) -> None:
    for body in bodies:
        body(rank, size, kind)
        dist.barrier()


def split(rank: int, size: int, kind: str) -> None:
    dist.group.WORLD.bound_device_id = torch.device(f"neuron:{rank}")
    for split_ranks in ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[2, 1, 0], [3]]):
        group = dist.split_group(split_ranks=split_ranks)
        mine = next(members for members in split_ranks if rank in members)
        for numel in (10, 100_000):
            tensor = torch.full((numel,), float(rank), device=f"neuron:{rank}")
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(mine)).all()


# ---- The same results ------------------------------------------------------------------------------------------------

COLLECTIVES = [
    test_collectives.every_size,
    test_collectives.uneven,
    test_collectives.layouts,
    test_collectives.coalesced,
    test_collectives.functional,
    test_collectives.objects,
    test_collectives.all_reduce_every_dtype,
]
MESSAGES = [
    test_messages.ring,
    test_messages.ahead,
    test_messages.tags,
    test_messages.polled,
    test_messages.exchanged,
    test_messages.objects,
]
MESSAGES_OF_MANY = [test_messages.ring, test_messages.any_source, test_messages.batched]
WORKS = [
    test_works.asynchronous,
    test_works.chained,
    test_works.futures,
    test_works.dropped,
    test_works.synchronized,
    test_works.subgroups,
    test_works.blocks,
    split,
]


@pytest.mark.parametrize(
    ("bodies", "size", "kind"),
    [
        (COLLECTIVES, 4, "neuron"),
        (COLLECTIVES[1:4], 4, "cpu"),
        (MESSAGES, 2, "neuron"),
        (MESSAGES_OF_MANY, 4, "neuron"),
        (WORKS, 4, "neuron"),
    ],
)
def test_every_call_on_two_hosts(pair: tuple[Host, Host], bodies: list[Callable], size: int, kind: str) -> None:
    ranks.run(size, one_after_another, kind, bodies, on=spread(pair, size), deadline_s=200)


@pytest.mark.parametrize("body", [test_training.ddp, test_training.fsdp, test_training.hsdp])
def test_training_on_two_hosts(pair: tuple[Host, Host], body: Callable) -> None:
    ranks.run(4, body, "neuron", on=spread(pair, 4))


def in_any_shape(rank: int, size: int) -> None:
    """Sums, for hosts with unequal numbers of ranks and ranks that alternate between hosts."""
    for numel in (1, 129, 70_001, 300_001):
        for dtype in (torch.float32, torch.bfloat16):
            for op in ("SUM", "AVG", "MAX"):
                tensor = values(rank, numel, dtype).to(f"neuron:{rank}")
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                check(tensor, reduced(size, numel, dtype, op), numel, dtype, op)
    test_collectives.every_collective(rank, size, "neuron", 20_011, torch.float32)


@pytest.mark.parametrize("shape", ["aab", "abab", "aabbc", "abcabc"])
def test_hosts_of_any_shape(shape: str) -> None:
    ranks.run(len(shape), in_any_shape, on=hosts.named(*shape))


# ---- The same virtual times ------------------------------------------------------------------------------------------


def times(rank: int, size: int) -> list:
    programs = (timing_of.on_each_operation, timing_of.late_rank, timing_of.queued, timing_of.pipeline)
    return [program(rank, size) for program in programs]


def test_virtual_times_are_those_of_one_host(pair: tuple[Host, Host]) -> None:
    assert ranks.run(4, times, on=spread(pair, 4)) == ranks.run(4, times)


def test_a_training_step_takes_the_virtual_time_of_one_host(pair: tuple[Host, Host]) -> None:
    for program in (timing_of.ddp_step, timing_of.fsdp_step):
        assert ranks.run(2, program, on=spread(pair, 2)) == ranks.run(2, program)


# ---- What goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "odd_line"),
    [
        ("operation", "rank 2: broadcast(root 0) of float32 [3, 4]"),
        ("large shape", "rank 2: all_reduce(SUM) of float32 [300, 500]"),
        ("splits", "rank 2 sends 40 bytes to rank 1, which expects 20 bytes from it"),
    ],
)
def test_a_mismatch_between_hosts_is_found_at_once(pair: tuple[Host, Host], how: str, odd_line: str) -> None:
    for outcome in ranks.outcomes(4, test_failures.disagree, how, timeout_s=300, on=spread(pair, 4)):
        assert outcome.error_type == "DistBackendError", outcome
        assert odd_line in outcome.error
        assert outcome.seconds < 20


@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_that_dies_ends_the_ranks_of_both_hosts(pair: tuple[Host, Host], victim: int) -> None:
    results = ranks.outcomes(4, dies, victim, timeout_s=300, on=spread(pair, 4))
    assert results[victim].exitcode == -signal.SIGKILL
    for rank in {0, 1, 2, 3} - {victim}:
        assert results[rank].error_type == "DistBackendError", results[rank]
        assert f"rank {victim} on " in results[rank].error and pair[victim // 2].address in results[rank].error
        assert "has died" in results[rank].error
        assert results[rank].seconds < 20


def dies(rank: int, size: int, victim: int) -> None:
    dist.all_reduce(torch.ones(300_000, device=f"neuron:{rank}"))
    if rank == victim:
        ranks.die()
    dist.all_reduce(torch.ones(300_000, device=f"neuron:{rank}"))


def never_comes(rank: int, size: int) -> None:
    dist.barrier()
    if rank != 3:
        dist.all_reduce(torch.ones(10, device=f"neuron:{rank}"))
    else:
        time.sleep(6)


def test_a_rank_that_never_comes_is_named_on_both_hosts(pair: tuple[Host, Host]) -> None:
    results = ranks.outcomes(4, never_comes, timeout_s=2, on=spread(pair, 4))
    for rank in (0, 1, 2):
        assert "timed out" in results[rank].error and "for rank 3 on " in results[rank].error, results[rank].error


def aborts(rank: int, size: int) -> None:
    if rank == 0:
        dist.barrier()
        dist.group.WORLD.abort()
        time.sleep(1)
        return
    with pytest.raises(dist.DistBackendError, match="was aborted by rank 0 on "):
        dist.barrier()  # may not have heard of everybody when rank 0 has
        dist.recv(torch.ones(10, device=f"neuron:{rank}"), (rank + 1) % size)


def test_an_abort_ends_the_other_host_too(pair: tuple[Host, Host]) -> None:
    ranks.run(4, aborts, timeout_s=300, on=spread(pair, 4))


def listens(rank: int, size: int) -> set[str]:
    """The local addresses on which this process listens."""
    dist.barrier()
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        target = os.readlink(entry) if entry.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            raw = bytes.fromhex(fields[1].split(":")[0])
            found.add(".".join(str(byte) for byte in reversed(raw)))
    return found


def test_ranks_listen_on_the_address_of_the_rendezvous_alone(pair: tuple[Host, Host]) -> None:
    found = ranks.run(4, listens, on=spread(pair, 4))
    for rank, addresses in enumerate(found):
        if rank != 0:  # the process of rank 0 holds the store too, which torch makes
            assert addresses == {pair[rank // 2].address}


# ---- Under torchrun --------------------------------------------------------------------------------------------------


class Torchrun:
    """A torchrun agent on each host, with two ranks."""

    def __init__(self, pair: tuple[Host, Host], what: str, folder: Path, max_restarts: int = 0) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "TRN_TEST": str(folder)}
        self.agents = []
        self.folder = folder
        for host in pair:
            command = host.command(
                # Its ranks end with it, and it with this process, even if that is killed.
                *("setpriv", "--pdeathsig", "KILL"),
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{pair[0].address}:29400", "--rdzv-id", "test"),
                # In a namespace the name of the machine does not lead to the address by which torchrun knows its host.
                *("--rdzv-conf", f"is_host={int(host == pair[0])}"),
                *("--local-addr", host.address, "--max-restarts", str(max_restarts), str(PROGRAM), what, str(folder)),
            )
            self.agents.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    def ranks(self) -> dict[int, int]:
        """Pids by rank, of those that run."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    environment = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                variables = dict(line.split(b"=", 1) for line in environment if b"=" in line)
                # The folder tells them from those of another test run.
                ours = {str(PROGRAM).encode(), str(self.folder).encode()} <= set(command)
                if ours and b"torch.distributed.run" not in command and b"RANK" in variables:
                    found[int(variables[b"RANK"])] = int(entry.name)
        return found

    def wait_until_running(self, folder: Path) -> None:
        """Waits until every rank has left its file."""
        deadline = time.monotonic() + 120
        while len(list(folder.glob("running*"))) < 4:
            ended = [agent.poll() for agent in self.agents]
            assert ended == [None, None] and time.monotonic() < deadline, self.outputs(within_s=0)
            time.sleep(0.1)

    def wait_until_no_rank_runs(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while left := self.ranks():
            if time.monotonic() > deadline:
                for pid in left.values():
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"ranks are left: {left}: {self.outputs(within_s=10)}")
            time.sleep(0.1)

    def outputs(self, within_s: float) -> list[str]:
        """What the agents and their ranks wrote. An agent that has not ended by then is ended."""
        found = []
        deadline = time.monotonic() + within_s
        for agent in self.agents:
            try:
                output, _ = agent.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                agent.terminate()
                try:
                    output, _ = agent.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(agent.pid, signal.SIGKILL)
                    output, _ = agent.communicate()
            found.append(output.decode())
        return found


def test_torchrun_on_two_hosts_has_the_bits_of_one(pair: tuple[Host, Host], tmp_path: Path) -> None:
    run = Torchrun(pair, "train", tmp_path)
    outputs = run.outputs(within_s=200)
    run.wait_until_no_rank_runs(within_s=0)
    assert [agent.returncode for agent in run.agents] == [0, 0], outputs
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(4)]
    ranks.run(4, train, str(tmp_path))
    expected = [torch.load(tmp_path / f"expected{rank}.pt", weights_only=True) for rank in range(4)]
    for rank in range(4):
        assert found[rank].keys() == expected[rank].keys()
        for name, tensor in expected[rank].items():
            check(found[rank][name], tensor, rank, name)


def train(rank: int, size: int, folder: str) -> None:
    from tests.c10d import two_hosts_program

    torch.save(two_hosts_program.train(rank, size), f"{folder}/expected{rank}.pt")


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_on_two_hosts_meet_again(pair: tuple[Host, Host], tmp_path: Path) -> None:
    run = Torchrun(pair, "dies_once", tmp_path, max_restarts=1)
    outputs = run.outputs(within_s=200)
    run.wait_until_no_rank_runs(within_s=0)
    assert [agent.returncode for agent in run.agents] == [0, 0], outputs
    assert (tmp_path / "died").exists()
    assert {path.name: path.read_text() for path in tmp_path.glob("sum*")} == {f"sum{rank}": "6.0" for rank in range(4)}


def test_a_killed_rank_ends_torchrun_on_both_hosts(pair: tuple[Host, Host], tmp_path: Path) -> None:
    run = Torchrun(pair, "forever", tmp_path)
    run.wait_until_running(tmp_path)
    ranks = run.ranks()
    os.kill(ranks[3], signal.SIGKILL)
    run.wait_until_no_rank_runs(within_s=60)
    outputs = run.outputs(within_s=20)
    named = re.search(r"rank ([23]) on .* has died", outputs[0])
    assert named, outputs[0]
    # torchrun ends rank 2 as soon as it sees rank 3 dead, at times before rank 2 has told the other host of it.
    assert named[1] == "3" or f"Sending process {ranks[2]} closing signal SIGTERM" in outputs[1], outputs
    assert all(agent.returncode != 0 for agent in run.agents)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_agent_ends_the_ranks_of_both_hosts(pair: tuple[Host, Host], tmp_path: Path, host: int) -> None:
    run = Torchrun(pair, "forever", tmp_path)
    run.wait_until_running(tmp_path)
    run.agents[host].kill()
    run.wait_until_no_rank_runs(within_s=60)
    run.outputs(within_s=0)
