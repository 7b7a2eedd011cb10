"""Chips for tests: the shipped Trainium2 and variants of it, put under the virtual clock for the length of a test."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from trn_dist import _C, timing
from trn_dist.hardware import Chip, load_chip
from trn_dist.timing.chip_rates import chip_rates

TRAINIUM2 = load_chip("trainium2")


def changed(**parts: dict[str, Any]) -> Chip:
    """Trainium2 with some figures of its parts changed: ``changed(launch={"host_operator_us": 0.0})``."""
    return dataclasses.replace(
        TRAINIUM2,
        **{name: dataclasses.replace(getattr(TRAINIUM2, name), **figures) for name, figures in parts.items()},
    )


@contextlib.contextmanager
def on_chip(chip: Chip) -> Iterator[None]:
    """The virtual clock runs on ``chip``, then on Trainium2 again."""
    _C._set_chip_rates(chip_rates(chip))
    timing.mark_step()
    try:
        yield
    finally:
        _C._set_chip_rates(chip_rates(TRAINIUM2))


# The host takes no time, so an operator's own time shows.
PATIENT_HOST = changed(launch={"host_operator_us": 0.0})
HOST_OPERATOR_PS = round(TRAINIUM2.launch.host_operator_us * 1e6)
DEVICE_OPERATOR_PS = round(TRAINIUM2.launch.device_operator_us * 1e6)
