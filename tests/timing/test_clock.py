"""Clocks of the host, streams and engines: what launches, events, waits, copies and polls do to them."""

import threading

import pytest
import torch

from tests.timing.chips import DEVICE_OPERATOR_PS, HOST_OPERATOR_PS, PATIENT_HOST, TRAINIUM2, on_chip
from trn_dist import _C, timing


@pytest.fixture(autouse=True)
def everything_done():
    with on_chip(TRAINIUM2):
        torch.neuron.synchronize()
        yield


def host_ps():
    return _C._virtual_host_ps()


def tail_ps(stream=None):
    stream = stream or torch.neuron.current_stream()
    return _C._virtual_stream_ps(0, stream.stream_id)


def event(stream=None):
    e = torch.neuron.Event(enable_timing=True)
    e.record(stream or torch.neuron.current_stream())
    return e


def expensive():
    """An operator that is quick on this host and takes the modelled chip much longer than a launch."""
    return torch.zeros(1 << 22, device="neuron")


def test_launching_moves_the_host_and_returns_before_the_device_is_done():
    before = host_ps()
    expensive()
    assert host_ps() - before == HOST_OPERATOR_PS
    assert tail_ps() > host_ps()


def test_operators_of_one_stream_run_one_after_the_other():
    torch.neuron.synchronize()
    before = tail_ps()
    expensive()
    one = tail_ps() - before - HOST_OPERATOR_PS
    expensive()
    expensive()
    assert tail_ps() - before == HOST_OPERATOR_PS + 3 * one


def test_a_small_operator_waits_for_its_host():
    torch.neuron.synchronize()
    before = host_ps()
    small = torch.zeros(4, device="neuron")
    small.add_(1)
    small.add_(1)
    assert host_ps() - before == 3 * HOST_OPERATOR_PS
    assert host_ps() < tail_ps() < host_ps() + 2 * DEVICE_OPERATOR_PS


def test_views_are_free():
    x = torch.zeros(8, 8, device="neuron")
    before = (host_ps(), tail_ps())
    _ = x.view(64), x.t(), x[2:4], x.expand(3, 8, 8), x.unbind(0), x.detach()
    assert (host_ps(), tail_ps()) == before


def test_synchronize_makes_the_host_wait():
    expensive()
    tail = tail_ps()
    torch.neuron.synchronize()
    assert host_ps() == tail
    torch.neuron.synchronize()
    assert host_ps() == tail


def test_stream_synchronize_waits_for_that_stream_only():
    side = torch.neuron.Stream()
    with torch.neuron.stream(side):
        expensive()
    before = host_ps()
    torch.neuron.current_stream().synchronize()
    assert host_ps() == before
    side.synchronize()
    assert host_ps() == tail_ps(side) > before


def test_streams_overlap_on_different_engines_and_share_one_engine():
    with on_chip(PATIENT_HOST):
        source = torch.zeros(1 << 20, device="neuron")
        target = torch.empty_like(source)
        torch.neuron.synchronize()
        begin = host_ps()
        source.add_(1)  # VectorE
        alone = tail_ps() - begin
        side = torch.neuron.Stream()
        torch.neuron.synchronize()
        begin = host_ps()
        source.add_(1)
        with torch.neuron.stream(side):
            target.copy_(source)  # DMA
        assert tail_ps() - begin == alone
        assert tail_ps(side) - begin < 2 * alone
        torch.neuron.synchronize()
        begin = host_ps()
        source.add_(1)
        with torch.neuron.stream(side):
            source.add_(1)  # VectorE again
        assert tail_ps(side) - begin == 2 * alone - DEVICE_OPERATOR_PS  # its launch is hidden


def test_a_side_stream_that_waits_does_not_hold_its_engine():
    with on_chip(PATIENT_HOST):
        x = torch.zeros(1 << 20, device="neuron")
        torch.neuron.synchronize()
        late, side = torch.neuron.Stream(), torch.neuron.Stream()
        with torch.neuron.stream(late):
            for _ in range(4):
                torch.sin(x)  # ScalarE
        side.wait_stream(late)
        with torch.neuron.stream(side):
            x.add_(1)  # VectorE, but only after all that
        begin = host_ps()
        x.add_(1)
        assert tail_ps() - begin < tail_ps(late) - begin


def test_wait_event_orders_streams():
    side = torch.neuron.Stream()
    expensive()
    done = event()
    assert tail_ps(side) < tail_ps()
    side.wait_event(done)
    assert tail_ps(side) == tail_ps()
    side.wait_stream(torch.neuron.current_stream())
    assert tail_ps(side) == tail_ps()


def test_elapsed_time_is_virtual_and_needs_both_events_done():
    begin_ps, start = tail_ps(), event()
    expensive()
    end_ps, end = tail_ps(), event()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) == (end_ps - begin_ps) / 1e9 > 0
    assert end.elapsed_time(start) == -start.elapsed_time(end) < 0


def test_elapsed_time_of_torch_event_too():
    start, end = (torch.Event("neuron", enable_timing=True) for _ in range(2))
    start.record()
    expensive()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > HOST_OPERATOR_PS / 1e9


def test_events_without_timing_or_unrecorded_are_refused():
    timed, untimed = torch.neuron.Event(enable_timing=True), torch.neuron.Event()
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.neuron.Event(enable_timing=True))
    timed.record()
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(untimed)
    with pytest.raises(TypeError, match=r"torch\.neuron\.Event"):
        timed.elapsed_time(1)


def test_a_poll_costs_time_until_the_answer_is_yes():
    reason = timing.irreproducible_reason()
    expensive()
    done = event()
    polls = 0
    while not done.query():
        polls += 1
        assert polls < 100_000
    poll_ps = round(TRAINIUM2.launch.host_poll_us * 1e6)
    assert polls > 1
    assert 0 <= host_ps() - tail_ps() < poll_ps
    before = host_ps()
    assert done.query()
    assert torch.neuron.current_stream().query()
    assert host_ps() == before
    # No collective was polled, so nothing depended on this machine.
    assert timing.irreproducible_reason() == reason


def test_item_waits_for_the_device():
    x = expensive().sum()
    tail = tail_ps()
    x.item()
    assert host_ps() == tail_ps() > tail


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_between_memories_block_unless_pinned_and_asked(pinned, non_blocking):
    on_host = torch.zeros(1 << 20, pin_memory=pinned)
    on_device = torch.zeros(1 << 20, device="neuron")
    for target, source in ((on_device, on_host), (on_host, on_device)):
        torch.neuron.synchronize()
        before = host_ps()
        target.copy_(source, non_blocking=non_blocking)
        transfer_ps = (4 << 20) * 1e3 / TRAINIUM2.host_link.bandwidth_gbps
        assert tail_ps() - before == pytest.approx(transfer_ps, rel=0.05)
        assert (host_ps() < tail_ps()) == (pinned and non_blocking)


def test_another_thread_has_its_own_clock_and_says_so():
    before = host_ps()
    seen = []

    def work():
        x = torch.zeros(4, device="neuron")
        x.add_(1)
        done = event()
        done.synchronize()
        seen.append((_C._virtual_host_ps(), done))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert host_ps() == before
    assert "thread" in timing.irreproducible_reason()
    # An event carries its time back.
    seen[0][1].synchronize()
    assert host_ps() == seen[0][0] > before


def test_backward_moves_the_clock_of_the_thread_that_called_it():
    x = torch.ones(16, device="neuron", requires_grad=True)
    loss = (x * x).sum()
    before = host_ps()
    loss.backward()
    assert host_ps() - before >= 2 * HOST_OPERATOR_PS
