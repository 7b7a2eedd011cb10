"""The stream sanitizer: what it finds and names, what it lets pass; memory of collectives in flight."""

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from tests.c10d import ranks
from trn_dist.neuron.sanitizer import disable_sanitizer, enable_sanitizer

UNORDERED = "two uses of the same memory that nothing orders"


@pytest.fixture
def sanitizer():
    enable_sanitizer()
    yield
    disable_sanitizer()


def line_of(text: str) -> int:
    """The number of the line of this file that says `text` in a comment."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))


def test_missing_wait_stream_names_both_lines(sanitizer):
    side = torch.neuron.Stream()
    with torch.neuron.stream(side):
        t = torch.zeros(64, device="neuron")
        t.add_(1)  # written on the side
    with pytest.raises(RuntimeError, match=UNORDERED) as error:
        t * 2  # read on the main stream
    message = str(error.value)
    first, then = re.search(r"first: (.*)\n\s+then: +(.*)\n", message).groups()
    assert first == f"aten::add_ writes it on stream {side.stream_id} of neuron:0, at {first.split('at ')[-1]}"
    assert f"test_sanitizer.py:{line_of('written on the side')} in test_missing" in first
    assert "aten::mul reads it on stream 0" in then
    assert f"test_sanitizer.py:{line_of('read on the main stream')} in test_missing" in then
    assert f"let stream 0 wait for stream {side.stream_id}" in message


@pytest.mark.parametrize("how", ["wait_stream", "wait_event", "stream", "event", "device", "query", "item"])
def test_ordered_uses_pass(sanitizer, how):
    side = torch.neuron.Stream()
    with torch.neuron.stream(side):
        t = torch.zeros(64, device="neuron").add_(1)
        event = torch.neuron.Event()
        event.record()
        if how == "item":
            t[0].item()
    if how == "wait_stream":
        torch.neuron.current_stream().wait_stream(side)
    elif how == "wait_event":
        torch.neuron.current_stream().wait_event(event)
    elif how == "stream":
        side.synchronize()
    elif how == "event":
        event.synchronize()
    elif how == "device":
        torch.neuron.synchronize()
    elif how == "query":
        while not event.query():
            pass
    assert (t * 2).sum().item() == 128


def test_an_event_covers_what_came_before_it_alone(sanitizer):
    side = torch.neuron.Stream()
    with torch.neuron.stream(side):
        first = torch.zeros(8, device="neuron")
        event = side.record_event()
        second = torch.zeros(8, device="neuron")
    torch.neuron.current_stream().wait_event(event)
    first.sum()
    with pytest.raises(RuntimeError, match=UNORDERED):
        second.sum()


def test_order_goes_through_a_third_stream(sanitizer):
    one, two = torch.neuron.Stream(), torch.neuron.Stream()
    with torch.neuron.stream(one):
        t = torch.zeros(8, device="neuron")
    two.wait_stream(one)
    torch.neuron.current_stream().wait_stream(two)
    t.sum()


def test_reads_do_not_clash_and_a_write_after_a_read_does(sanitizer):
    side = torch.neuron.Stream()
    t = torch.zeros(8, device="neuron")
    side.wait_stream(torch.neuron.current_stream())
    with torch.neuron.stream(side):
        t.sum()
    t.sum()
    with pytest.raises(RuntimeError, match=r"(?s)aten::sum reads it.*aten::zero_ writes it"):
        t.zero_()


def test_parts_of_a_tensor_are_told_apart(sanitizer):
    side = torch.neuron.Stream()
    t = torch.zeros(64, device="neuron")
    side.wait_stream(torch.neuron.current_stream())
    with torch.neuron.stream(side):
        t[32:].add_(1)
    t[:32].add_(1)
    with pytest.raises(RuntimeError, match=UNORDERED):
        t[16:48].add_(1)


def test_memory_used_again_is_new_memory(sanitizer):
    side = torch.neuron.Stream()
    for _ in range(20):
        with torch.neuron.stream(side):
            torch.zeros(1000, device="neuron").add_(1)
        torch.zeros(1000, device="neuron").add_(1)


def test_training_on_one_stream_passes(sanitizer):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to("neuron")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 8, device="neuron")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_backward_names_the_line_that_waits_for_it(sanitizer):
    side = torch.neuron.Stream()
    x = torch.ones(8, device="neuron", requires_grad=True)
    y = (x * x).sum()
    side.wait_stream(torch.neuron.current_stream())
    with torch.neuron.stream(side), torch.no_grad():
        x.data.add_(0)  # which autograd does not see
    with pytest.raises(RuntimeError, match=r"test_sanitizer.py:\d+ in test_backward_names\w+ \(backward\)"):
        y.backward()


def test_warnings_once_a_pair_of_lines():
    enable_sanitizer(warn_only=True)
    try:
        side = torch.neuron.Stream()
        with torch.neuron.stream(side):
            t = torch.zeros(8, device="neuron")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                t.sum()
        assert len(caught) == 1 and UNORDERED in str(caught[0].message)
    finally:
        disable_sanitizer()


def test_off_by_default_and_on_by_the_variable():
    program = (
        "import torch\n"
        "side = torch.neuron.Stream()\n"
        "with torch.neuron.stream(side):\n"
        "    t = torch.zeros(8, device='neuron')\n"
        "print((t + 1).sum().item())\n"
    )

    def run(value: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TRN_SANITIZE": value}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert run("").stdout == "8.0\n"
    assert UNORDERED in run("1").stderr
    assert "TRN_SANITIZE='2': must be 0, 1 (a finding raises) or warn" in run("2").stderr


# ---- Collectives ----------------------------------------------------------------------------------------------------


def uses_a_pending_collective(rank: int, size: int, how: str) -> str:
    import torch.distributed as dist

    t = torch.ones(1 << 12, device="neuron")
    out = torch.empty(size << 12, device="neuron")
    work = dist.all_gather_into_tensor(out, t, async_op=True)
    uses = {
        "read": lambda: out + 1,
        "read a view": lambda: out.view(2, -1).t().contiguous(),
        "write": lambda: out.zero_(),
        "copy": lambda: out.cpu(),
        "print": lambda: str(out),
        "out=": lambda: torch.add(out, 1, out=torch.empty_like(out)),
        "draw": lambda: out.uniform_(),
    }
    try:
        uses[how]()
    except RuntimeError as error:
        work.wait()
        uses[how]()
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("how", ["read", "read a view", "write", "copy", "print", "out=", "draw"])
def test_using_the_output_of_a_pending_collective_raises(how: str) -> None:
    for error in ranks.run(2, uses_a_pending_collective, how):
        assert re.search(r"uses the output of all_gather #\d+, which is still in flight: call wait\(\)", error), error


def reuses_the_memory_of_an_input(rank: int, size: int) -> float:
    import torch.distributed as dist

    out = torch.empty(1024 * size, device="neuron")
    work = dist.all_gather_into_tensor(out, torch.ones(1024, device="neuron"), async_op=True)
    dist.barrier()
    dist.barrier()  # by now the gather has been carried out, and nobody else holds its input
    others = [torch.full((1024,), float(i), device="neuron") for i in range(64)]
    work.wait()
    return out.sum().item() + 0 * sum(other.sum().item() for other in others)


def test_the_memory_of_an_input_that_was_read_serves_other_tensors() -> None:
    assert ranks.run(2, reuses_the_memory_of_an_input) == [2048.0, 2048.0]


def waits_in_other_ways(rank: int, size: int) -> list[float]:
    import torch.distributed as dist

    sums = []

    def reduced(t: torch.Tensor) -> None:
        sums.append(t.sum().item())

    t = torch.ones(8, device="neuron")
    dist.all_reduce(t)
    reduced(t)
    work = dist.all_reduce(t, async_op=True)
    t.view(2, 4)  # a view uses nothing
    work.get_future().wait()
    reduced(t)
    dist.all_reduce(t, async_op=True)
    torch.neuron.synchronize()
    reduced(t)
    work = dist.all_reduce(t, async_op=True)
    while not work.is_completed():
        pass
    reduced(t)
    side = torch.neuron.Stream()
    side.wait_stream(torch.neuron.current_stream())
    with torch.neuron.stream(side):
        dist.all_reduce(t)
    torch.neuron.current_stream().wait_stream(side)
    reduced(t)
    if rank == 0:
        dist.send(t, 1)
        t.zero_()
    else:
        dist.recv(t, 0)
    return sums


def test_every_way_of_waiting_counts() -> None:
    assert ranks.run(2, waits_in_other_ways) == [[16.0, 32.0, 64.0, 128.0, 256.0]] * 2


def sanitized(rank: int, size: int, fn) -> str:
    enable_sanitizer()
    try:
        fn(rank, size)
    except RuntimeError as error:
        return str(error)
    return ""


def nobody_waited(rank: int, size: int) -> None:
    import torch.distributed as dist

    t = torch.ones(8, device="neuron")
    dist.all_reduce(t, async_op=True)  # posted
    t.sum()  # used


def test_a_collective_that_nobody_waited_for() -> None:
    for error in ranks.run(2, sanitized, nobody_waited):
        assert re.search(rf"first: all_reduce writes it .*:{line_of('posted')} in nobody_waited", error)
        assert re.search(rf"then:  aten::sum reads it .*:{line_of('used')} in nobody_waited", error)
        assert "call wait() on the Work that all_reduce returned before the second" in error


def all_reduce_before_the_producer(rank: int, size: int) -> None:
    import torch.distributed as dist

    side = torch.neuron.Stream()
    t = torch.ones(8, device="neuron")
    with torch.neuron.stream(side):
        dist.all_reduce(t)


def test_a_collective_on_a_stream_that_does_not_wait_for_its_input() -> None:
    for error in ranks.run(2, sanitized, all_reduce_before_the_producer):
        assert re.search(r"(?s)aten::fill_ writes it on stream 0.*all_reduce reads it", error)


def correct_programs(rank: int, size: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    works = [dist.all_reduce(torch.ones(8, device="neuron"), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    torch.manual_seed(0)
    sequential = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to("neuron")
    for layer in sequential:
        fully_shard(layer)
    parallel = DistributedDataParallel(nn.Linear(16, 16).to("neuron"))
    for model in (fully_shard(sequential), parallel):
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 16, device="neuron")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.neuron.synchronize()


def test_fsdp_and_ddp_pass() -> None:
    assert ranks.run(2, sanitized, correct_programs) == ["", ""]
