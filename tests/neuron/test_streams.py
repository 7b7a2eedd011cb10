"""Streams and events, by torch.neuron's names and by torch.Stream, torch.Event and torch.accelerator."""

import threading

import pytest
import torch


def test_stream_context():
    default = torch.neuron.current_stream()
    stream = torch.neuron.Stream()
    assert default == torch.neuron.default_stream() and stream != default
    with torch.neuron.stream(stream) as entered:
        assert entered is None
        assert torch.neuron.current_stream() == stream
        assert torch.accelerator.current_stream() == stream
        t = torch.ones(2, device="neuron") * 2
    assert torch.neuron.current_stream() == default
    assert t.tolist() == [2, 2]
    with torch.neuron.stream(None):
        assert torch.neuron.current_stream() == default


def test_stream_of_another_device_makes_it_current():
    stream = torch.neuron.Stream(device=1)
    with torch.neuron.stream(stream):
        assert torch.neuron.current_device() == 1
        assert torch.neuron.current_stream() == stream
    assert torch.neuron.current_device() == 0


def test_stream_is_a_torch_stream():
    stream = torch.neuron.Stream(priority=-1)
    assert isinstance(stream, torch.Stream)
    assert stream.device == torch.device("neuron:0")
    assert stream.query()
    stream.synchronize()
    other = torch.Stream(device="neuron")
    with other:
        assert torch.accelerator.current_stream() == other
    stream.wait_stream(other)
    event = stream.record_event()
    stream.wait_event(event)
    assert len({stream, torch.neuron.Stream()}) == 2


def test_current_stream_belongs_to_the_thread():
    seen = []
    stream = torch.neuron.Stream()
    with torch.neuron.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(torch.neuron.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.neuron.default_stream()]


@pytest.mark.parametrize("ours", [True, False])
def test_event(ours):
    event = torch.neuron.Event() if ours else torch.Event(device="neuron")
    assert event.query()
    event.record()
    event.synchronize()
    event.wait()
    event.record(torch.neuron.Stream())
    assert event.query() and event.device == torch.device("neuron:0")


def test_record_stream_and_synchronize():
    t = torch.ones(4, device="neuron")
    t.record_stream(torch.neuron.Stream())
    torch.neuron.synchronize()
    torch.accelerator.synchronize()
    torch.neuron.synchronize("neuron:1")
    assert t.sum().item() == 4


def test_set_stream():
    stream = torch.neuron.Stream()
    try:
        torch.neuron.set_stream(stream)
        assert torch.neuron.current_stream() == stream
    finally:
        torch.neuron.set_stream(torch.neuron.default_stream())


def test_memory_of_a_stream_is_kept_apart():
    stream = torch.neuron.Stream()
    with torch.neuron.stream(stream):
        t = torch.ones(1024, device="neuron")
    segments = [segment for segment in torch.neuron.memory_snapshot() if segment["stream"] == stream.stream_id]
    assert len(segments) == 1 and segments[0]["allocated_size"] >= 4096
    del t
