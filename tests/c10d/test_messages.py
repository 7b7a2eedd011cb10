"""send, recv and what is built on them: order, tags, any source, and sends that nobody has received yet."""

from __future__ import annotations

# c10d says that its calls may return None, which they do only outside of a group.
# mypy: disable-error-code="union-attr"
import pytest
import torch
import torch.distributed as dist

from tests.c10d import ranks
from tests.c10d.test_collectives import check, device_of, values

NUMELS = (0, 1, 100, 5000, 400_001)  # up to 16 KiB are copied at once, larger ones are fetched by the receiver


def ring(rank: int, size: int, kind: str) -> None:
    """Everybody sends before it receives: works only because a send does not wait for its receiver."""
    device = device_of(kind, rank)
    right, left = (rank + 1) % size, (rank - 1) % size
    for numel in NUMELS:
        dist.send(values(rank, numel, torch.float32).to(device), right)
        received = torch.zeros(numel, device=device)
        dist.recv(received, left)
        check(received, values(left, numel, torch.float32), "send and recv", numel)
    # The tensor may be written again as soon as send() is back.
    tensor = values(rank, 400_001, torch.float32).to(device)
    dist.send(tensor, right)
    tensor.zero_()
    received = torch.zeros(400_001, device=device)
    dist.recv(received, left)
    check(received, values(left, 400_001, torch.float32), "a send's payload is what it was at the time")


def ahead(rank: int, size: int, kind: str) -> None:
    """More messages than the ring between two ranks holds, all sent before the first is received."""
    device = device_of(kind, rank)
    count = 50
    if rank == 0:
        for i in range(count):
            dist.send(values(i, 6000, torch.float32).to(device), 1)
        requests = [dist.isend(values(i, 6000, torch.float32).to(device), 1) for i in range(count)]
        dist.barrier()
        for request in requests:
            request.wait()
    else:
        dist.barrier()
        for i in [*range(count), *range(count)]:
            received = torch.zeros(6000, device=device)
            dist.recv(received, 0)
            check(received, values(i, 6000, torch.float32), "message", i)
    dist.barrier()


def tags(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    numel = 5000
    if rank == 0:
        for tag in (3, 1, 2, 1):
            dist.send(values(10 * tag, numel, torch.float32).to(device), 1, tag=tag)
    elif rank == 1:
        received = torch.zeros(numel, device=device)
        for tag in (1, 2, 3, 1):
            dist.recv(received, 0, tag=tag)
            check(received, values(10 * tag, numel, torch.float32), "tag", tag)
    # Receives match in the order in which they were called, whichever is waited for first.
    if rank == 0:
        for i in range(3):
            dist.send(values(i, numel, torch.float32).to(device), 1)
    elif rank == 1:
        buffers = [torch.zeros(numel, device=device) for _ in range(3)]
        requests = [dist.irecv(buffer, 0) for buffer in buffers]
        for i in (2, 0, 1):
            requests[i].wait()
            check(buffers[i], values(i, numel, torch.float32), "receive", i)


def any_source(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    numel = 5000
    if rank == 0:
        seen = set()
        for _ in range(2 * (size - 1)):
            received = torch.zeros(numel, device=device)
            source = dist.recv(received)
            check(received, values(source, numel, torch.float32), "from", source)
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        for _ in range(2):
            dist.send(values(rank, numel, torch.float32).to(device), 0)


def batched(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    for numel in NUMELS:
        received = [torch.zeros(numel, device=device) for _ in range(size)]
        operations = []
        for other in range(size):
            if other != rank:
                operations.append(dist.P2POp(dist.irecv, received[other], other))
                operations.append(dist.P2POp(dist.isend, values(rank, numel, torch.float32, other).to(device), other))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for other in range(size):
            if other != rank:
                check(received[other], values(other, numel, torch.float32, rank), "batch", other)


def polled(rank: int, size: int, kind: str) -> None:
    device = device_of(kind, rank)
    tensor = values(0, 400_001, torch.float32).to(device) if rank == 0 else torch.zeros(400_001, device=device)
    request = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    while not request.is_completed():
        pass
    assert request.is_success()
    request.wait()
    check(tensor, values(0, 400_001, torch.float32))


def exchanged(rank: int, size: int, kind: str) -> None:
    """Many rounds, so that sender and receiver meet in every state a message can be in."""
    device = device_of(kind, rank)
    other = 1 - rank
    for numel in (1, 6000, 20_000):
        payload = torch.full((numel,), float(rank), device=device)
        for step in range(400):
            payload.fill_(float(2 * step + rank))
            received = torch.zeros(numel, device=device)
            operations = [dist.P2POp(dist.isend, payload, other), dist.P2POp(dist.irecv, received, other)]
            for work in dist.batch_isend_irecv(operations[:: 1 if step % 2 else -1]):
                work.wait()
            assert (received == 2 * step + other).all()


def posted_ahead(rank: int, size: int, kind: str) -> None:
    """Receives that match the same messages get them in the order of their calls, whatever comes meanwhile."""
    device = device_of(kind, rank)
    for count, rounds in ((300, 3), (16, 100)):  # more than the ring between two ranks holds, and fewer
        for kept_waiting in (False, True):
            for _ in range(rounds):
                if rank == 0:
                    works = [dist.isend(torch.full((10,), float(i), device=device), 1) for i in range(count)]
                else:
                    boxes = [torch.full((10,), -1.0, device=device) for _ in range(count)]
                    # From any source and from this one: they compete for the same messages.
                    works = [dist.irecv(box, None if i % 3 == 1 and count < 20 else 0) for i, box in enumerate(boxes)]
                for work in reversed(works) if kept_waiting else works:
                    work.wait()
                if rank == 1:
                    assert [int(box[0].item()) for box in boxes] == list(range(count))
    dist.barrier()


def objects(rank: int, size: int, kind: str) -> None:
    if rank == 0:
        dist.send_object_list([{"answer": 42}, "text"], dst=1)
    elif rank == 1:
        box = [None, None]
        dist.recv_object_list(box, src=0)
        assert box == [{"answer": 42}, "text"]


@pytest.mark.parametrize("kind", ["neuron", "cpu"])
@pytest.mark.parametrize(
    ("body", "size"),
    [
        (ring, 2),
        (ring, 4),
        (ahead, 2),
        (tags, 2),
        (any_source, 4),
        (batched, 4),
        (polled, 2),
        (exchanged, 2),
        (posted_ahead, 2),
        (objects, 2),
    ],
)
def test_messages(body, size: int, kind: str) -> None:
    ranks.run(size, body, kind)


def sizes_differ(rank: int, size: int) -> None:
    tensor = torch.zeros(10 if rank == 0 else 12)
    if rank == 0:
        dist.send(tensor, 1)
        dist.barrier()
    else:
        dist.recv(tensor, 0)


def test_a_receive_of_another_size_is_an_error_on_both_sides() -> None:
    for outcome in ranks.outcomes(2, sizes_differ):
        assert outcome.error_type == "DistBackendError"
        assert "got a message of 40 bytes from rank 0" in outcome.error
        assert "recv from rank 0 (tag 0, 48 bytes)" in outcome.error
        assert outcome.seconds < 10
