"""Collectives and messages in virtual time: when they begin, what they cost, who waits, what is exposed."""

import itertools
import json

import pytest
import torch
import torch.distributed as dist

from tests.c10d import ranks
from trn_dist import _C, timing
from trn_dist.timing.collective_costs import communicator

HOST_PS = 5_000_000  # of Trainium2's file, to launch an operator
COUNT = 1 << 18


def host_ps():
    return _C._virtual_host_ps()


def tail_ps():
    return _C._virtual_stream_ps(torch.neuron.current_device(), torch.neuron.current_stream().stream_id)


def cost_ps(size, operation, nbytes):
    return communicator(tuple(range(size))).table(operation).time_ps(nbytes)


def begin():
    """Brings all ranks to one time."""
    torch.neuron.set_device(dist.get_rank())
    dist.barrier()
    timing.mark_step()
    return host_ps()


def delay(rank):
    """Operators that make rank r later than rank r-1."""
    x = torch.zeros(4, device="neuron")
    for _ in range(20 * rank):
        x.add_(1)


def on_each_operation(rank, size):
    x = torch.zeros(COUNT, device=f"neuron:{rank}")
    parts = torch.zeros(size * COUNT, device=f"neuron:{rank}")
    calls = {
        "all_reduce": (4 * COUNT, lambda: dist.all_reduce(x)),
        "all_gather": (4 * COUNT * size, lambda: dist.all_gather_into_tensor(parts, x)),
        "reduce_scatter": (4 * COUNT * size, lambda: dist.reduce_scatter_tensor(x, parts)),
        "all_to_all": (4 * COUNT * size, lambda: dist.all_to_all_single(parts, torch.zeros_like(parts))),
        "broadcast": (4 * COUNT, lambda: dist.broadcast(x, 0)),
        "reduce": (4 * COUNT, lambda: dist.reduce(x, 0)),
    }
    found = {}
    for name, (nbytes, call) in calls.items():
        begin()
        torch.neuron.synchronize()
        dist.barrier()
        timing.mark_step()
        call()
        step = timing.mark_step()
        (group,) = step.groups
        found[name] = (group.busy_ps, nbytes, group.bytes, sum(step.parts().values()) - step.time_ps)
    return found, timing.irreproducible_reason()


def test_each_operation_costs_what_its_table_says():
    for found, reason in ranks.run(4, on_each_operation):
        assert reason == ""
        for name, (busy, nbytes, counted, difference) in found.items():
            assert counted == nbytes, name
            assert busy == cost_ps(4, name, nbytes), name
            assert difference == 0


def late_rank(rank, size):
    x = torch.zeros(COUNT, device=f"neuron:{rank}")
    begin()
    delay(rank)
    ready = max(host_ps() + HOST_PS, tail_ps())
    dist.all_reduce(x)
    end = tail_ps()
    step = timing.mark_step()
    return ready, end, step


def test_all_members_end_when_the_last_one_allows():
    results = ranks.run(4, late_rank)
    ends = {end for _, end, _ in results}
    assert len(ends) == 1
    assert ends.pop() - max(ready for ready, _, _ in results) == cost_ps(4, "all_reduce", 4 * COUNT)
    waits = [step.waiting_ps for _, _, step in results]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[3] == 0
    for _, _, step in results:
        assert sum(step.parts().values()) == step.time_ps
        assert step.groups[0].name == "default_pg"
        assert step.exposed_ps == cost_ps(4, "all_reduce", 4 * COUNT)


def overlapped(rank, size, wait_at_once):
    big = torch.zeros(1 << 22, device=f"neuron:{rank}")
    x = torch.zeros(COUNT, device=f"neuron:{rank}")
    begin()
    work = dist.all_reduce(x, async_op=True)
    if wait_at_once:
        work.wait()
    for _ in range(30):
        big.neg()
    if not wait_at_once:
        work.wait()
    x.add_(1)
    return timing.mark_step()


def test_a_collective_under_way_overlaps_with_operators_until_it_is_waited_for():
    exposed, hidden = ranks.run(2, overlapped, True)[0], ranks.run(2, overlapped, False)[0]
    cost = cost_ps(2, "all_reduce", 4 * COUNT)
    assert exposed.groups[0].busy_ps == hidden.groups[0].busy_ps == cost
    assert exposed.exposed_ps == cost
    assert hidden.exposed_ps == 0
    assert hidden.time_ps < exposed.time_ps


def side_stream(rank, size):
    """As FSDP does it: the collective on a stream of its own, an event for whoever needs the result."""
    big = torch.zeros(1 << 22, device=f"neuron:{rank}")
    x = torch.zeros(COUNT, device=f"neuron:{rank}")
    begin()
    side, done = torch.neuron.Stream(), torch.neuron.Event()
    with torch.neuron.stream(side):
        dist.all_reduce(x)
        done.record(side)
    for _ in range(30):
        big.neg()
    before = tail_ps()
    torch.neuron.current_stream().wait_event(done)
    return timing.mark_step(), tail_ps() - before


def test_a_collective_on_a_side_stream_overlaps():
    for step, waited in ranks.run(2, side_stream):
        assert step.exposed_ps == 0
        assert waited == 0
        assert step.groups[0].busy_ps == cost_ps(2, "all_reduce", 4 * COUNT)


def queued(rank, size):
    x, y = (torch.zeros(COUNT, device=f"neuron:{rank}") for _ in range(2))
    start = begin()
    works = [dist.all_reduce(t, async_op=True) for t in (x, y)]
    for work in works:
        work.wait()
    return tail_ps() - start


def test_collectives_of_a_group_queue():
    (first, second) = ranks.run(2, queued)
    assert first == second == HOST_PS + 2 * cost_ps(2, "all_reduce", 4 * COUNT)


def two_groups(rank, size):
    x, y = (torch.zeros(COUNT, device=f"neuron:{rank}") for _ in range(2))
    other = dist.new_group(list(range(size)), group_desc="another")
    dist.barrier(other)
    start = begin()
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
    for work in works:
        work.wait()
    time = tail_ps() - start
    return time, {group.name for group in timing.mark_step().groups}


def test_collectives_of_different_groups_do_not_queue():
    for time, names in ranks.run(2, two_groups):
        assert time == 2 * HOST_PS + cost_ps(2, "all_reduce", 4 * COUNT)
        assert names == {"default_pg", "another"}


def pipeline(rank, size):
    """Each rank works, then hands on to the next."""
    x = torch.zeros(COUNT, device=f"neuron:{rank}")
    start = begin()
    if rank > 0:
        dist.recv(x, rank - 1)
    received = tail_ps() - start
    delay(1)
    ready = tail_ps() - start
    if rank < size - 1:
        dist.send(x, rank + 1)
    sent = tail_ps() - start
    return received, ready, sent, timing.mark_step()


def test_messages_carry_their_senders_time():
    results = ranks.run(3, pipeline)
    cost = cost_ps(3, "send", 4 * COUNT)
    for (_, ready, sent, _), (received, _, _, step) in itertools.pairwise(results):
        assert sent >= ready + cost
        assert received == sent
        assert step.waiting_ps > 0
        assert sum(step.parts().values()) == step.time_ps
    assert results[0][3].waiting_ps == 0


def barrier_after_work(rank, size):
    begin()
    delay(rank)
    dist.barrier()
    return host_ps()


def test_a_barrier_brings_all_hosts_to_one_time():
    assert len(set(ranks.run(4, barrier_after_work))) == 1


def ddp_step(rank, size):
    torch.neuron.set_device(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))).to("neuron")
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    timing.mark_step()
    steps = []
    for _ in range(3):
        parallel(torch.randn(16, 128, device="neuron")).square().mean().backward()
        steps.append(timing.mark_step())
    return steps, timing.irreproducible_reason()


def fsdp_step(rank, size):
    from torch.distributed.fsdp import fully_shard

    torch.neuron.set_device(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to("neuron")
    # A mesh of one dimension would be the job's default group.
    shape, names = ((2, size // 2), ("dp_replicate", "dp_shard")) if size > 2 else ((size,), ("dp_shard",))
    mesh = dist.init_device_mesh("neuron", shape, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    timing.mark_step()
    steps = []
    for _ in range(3):
        loss = model(torch.randn(16, 512, device="neuron")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(timing.mark_step())
    return steps, timing.irreproducible_reason()


@pytest.mark.parametrize(("program", "group"), [(ddp_step, "default_pg"), (fsdp_step, "mesh_dp_shard")])
def test_training_is_reproducible_to_the_picosecond(program, group):
    size = 4
    once, again = ranks.run(size, program), ranks.run(size, program)
    assert once == again
    for steps, reason in once:
        assert reason == ""
        for step in steps:
            assert sum(step.parts().values()) == step.time_ps
            assert group in {times.name for times in step.groups}


def test_fsdp_hides_some_of_its_collectives():
    for steps, _ in ranks.run(2, fsdp_step):
        (group,) = steps[-1].groups
        # All-gathers forward and backward, reduce-scatters backward.
        assert group.collectives >= 8
        assert group.exposed_ps < group.busy_ps


def polling(rank, size):
    x = torch.zeros(4, device=f"neuron:{rank}")
    begin()
    work = dist.all_reduce(x, async_op=True)
    polls = 0
    while not work.is_completed():
        polls += 1
    work.wait()
    return polls, timing.irreproducible_reason()


def test_polling_a_collective_ends_and_is_told():
    for _, reason in ranks.run(2, polling):
        assert "polled" in reason


def trace(rank, size, folder):
    timing.start_trace(folder, rank)
    late_rank(rank, size)
    if rank == 0:
        dist.send(torch.zeros(8, device="neuron"), 1)
    elif rank == 1:
        dist.recv(torch.zeros(8, device="neuron"), 0)
    timing.flush_trace()


def test_a_trace_links_the_members_of_a_collective(tmp_path):
    ranks.run(4, trace, str(tmp_path))
    entries = json.loads(timing.join_traces(tmp_path).read_text())
    members = [entry for entry in entries if entry["ph"] == "X" and entry["name"] == "all_reduce"]
    assert sorted(entry["pid"] for entry in members) == [0, 1, 2, 3]
    assert len({(entry["ts"], entry["dur"]) for entry in members}) == 1
    flows = [entry for entry in entries if entry.get("cat") == "collective" and entry["ts"] == members[0]["ts"]]
    assert len({entry["id"] for entry in flows}) == 1
    assert sorted((entry["ph"], entry["pid"]) for entry in flows) == [("s", 0), ("t", 1), ("t", 2), ("t", 3)]
    messages = {entry["name"]: entry for entry in entries if entry["ph"] == "X" and entry["name"] in ("send", "recv")}
    assert messages["send"]["args"]["sequence"] == messages["recv"]["args"]["sequence"]
