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


def test_stream_by_its_numbers():
    stream = torch.Stream(1)
    assert stream.device == torch.device("neuron:1")
    again = torch.Stream(stream_id=stream.stream_id, device_index=1, device_type=stream.device_type)
    assert again == stream and again != torch.Stream(1)
    assert "device_type=neuron, device_index=1" in repr(stream)


def test_nested_contexts_end_where_they_began_also_by_an_error():
    outer, inner = torch.Stream("neuron:1"), torch.Stream("neuron:1")
    before = torch.accelerator.current_stream()
    with pytest.raises(KeyError), outer:
        with inner:
            assert torch.accelerator.current_stream() == inner
        assert torch.accelerator.current_stream() == outer and torch.neuron.current_device() == 1
        raise KeyError
    assert torch.accelerator.current_stream() == before and torch.neuron.current_device() == 0


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


def test_event_has_a_device_and_a_number_once_recorded():
    stream = torch.Stream("neuron:1")
    events = [torch.Event(), torch.Event("neuron:1")]
    assert [(event.device, event.event_id) for event in events] == [(torch.device("neuron"), 0)] * 2
    events = [stream.record_event(), stream.record_event()]
    assert [event.device for event in events] == [torch.device("neuron:1")] * 2
    assert 0 != events[0].event_id != events[1].event_id != 0
    for other in (torch.Stream("neuron:0"), torch.Stream("neuron:1")):
        other.wait_event(events[0])


def test_events_without_timing_have_no_time_between_them():
    first, second = torch.Event("neuron"), torch.Event("neuron")
    first.record()
    second.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        first.elapsed_time(second)


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
        of_another_device = torch.Stream("neuron:1")
        torch.accelerator.set_stream(of_another_device)
        assert torch.accelerator.current_stream() == of_another_device
        assert torch.neuron.current_stream(0) == stream
    finally:
        torch.neuron.set_stream(torch.neuron.default_stream(1))
        torch.neuron.set_stream(torch.neuron.default_stream(0))


def test_memory_of_a_stream_is_kept_apart():
    stream = torch.neuron.Stream()
    with torch.neuron.stream(stream):
        t = torch.ones(1024, device="neuron")
    segments = [segment for segment in torch.neuron.memory_snapshot() if segment["stream"] == stream.stream_id]
    assert len(segments) == 1 and segments[0]["allocated_size"] >= 4096
    del t
