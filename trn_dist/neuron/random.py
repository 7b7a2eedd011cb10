"""The device's random numbers: one counter-based generator a device, whose state is its seed and its offset."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trn_dist import _C
from trn_dist.neuron.device import Device, current_device, device_count, device_index


def _generator(device: Device) -> torch.Generator:
    return _C._default_generator(device_index(device))


def _get_generator(device: Device = None) -> torch.Generator:
    """The device's default generator, where ``torch.compile`` looks for it."""
    return _generator(device)


def get_rng_state(device: Device = "neuron") -> torch.Tensor:
    """The generator's state: a uint8 CPU tensor of 16 bytes, seed and offset as little-endian 64-bit integers."""
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """:func:`get_rng_state` of every device."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Device = "neuron") -> None:
    """Sets the state that :func:`get_rng_state` gave."""
    _generator(device).set_state(new_state)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """:func:`set_rng_state` of every device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator and sets its offset to zero."""
    _generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds every device's generator."""
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seeds the current device's generator with a number that is not reproducible."""
    _generator(current_device()).seed()


def seed_all() -> None:
    """Seeds every device's generator with the same number that is not reproducible."""
    seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _generator(current_device()).initial_seed()


def use_cpu_rng(enabled: bool) -> None:
    """Whether every draw on the device comes from PyTorch's CPU generator, so that ``neuron`` draws what ``cpu`` does.

    For comparisons of the two; ``TRN_CPU_RNG=1`` in the environment says so from the start.
    """
    _C._set_cpu_rng(bool(enabled))
