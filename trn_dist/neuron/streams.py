"""Streams and events of the device, as ``torch.cuda`` has them."""

from __future__ import annotations

from typing import Any

import torch

from trn_dist import _C
from trn_dist.neuron.device import Device, current_device, device_index

_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1, which torch.Stream takes as a number


class Stream(torch.Stream):
    """A stream of the device.

    Args:
        device: the device; the current one by default.
        priority: 0 (normal) or negative (high).
    """

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("neuron", device_index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device; ``blocking`` and ``interprocess`` are accepted as in ``torch.cuda.Event``."""

    _timed: bool

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        event = super().__new__(
            cls, torch.device("neuron"), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )
        event._timed = enable_timing
        return event

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds of virtual time from this event to ``end_event``: what the modelled chip would take."""
        if type(end_event) is not Event:
            raise TypeError(f"expected a torch.neuron.Event, but got {type(end_event).__name__}")
        # torch.Event's own method takes no subclass; the checks are its.
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return _C._event_elapsed_ms(self.event_id, end_event.event_id)


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Device = None) -> Stream:
    """The calling thread's current stream on ``device``."""
    return _as_stream(torch.accelerator.current_stream(torch.device("neuron", device_index(device))))


def default_stream(device: Device = None) -> Stream:
    """The stream that every thread starts with."""
    return Stream(stream_id=0, device_index=device_index(device), device_type=_DEVICE_TYPE)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes ``stream`` current on its device; ``None`` changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class stream:
    """A context in which ``stream`` and its device are current; ``None`` changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = current_device()
        self._former = current_stream(self.stream.device_index)
        set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        if self.stream is None:
            return
        set_stream(self._former)
        torch.accelerator.set_device_index(self._device)


def synchronize(device: Device = None) -> None:
    """Waits for everything that was issued on ``device``, collectives included."""
    _C._synchronize_device(device_index(device))
