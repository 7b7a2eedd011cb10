"""Faults on demand: what ``--fault 'rank=3,step=5,kill'`` means, read and checked.

Faults travel in the environment variable ``TRN_FAULTS``, several between semicolons, so that they work under torchrun
too. What a rank does about its own is in :mod:`trn_dist.neuron.faults`; links are slowed in the topology that
:mod:`trn_dist.timing.cluster` makes. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re

from trn_dist.hardware.cluster import LinkFault

VARIABLE = "TRN_FAULTS"

OF_A_STEP = ("kill", "stop", "hbm_ecc", "nan")
OF_A_RANK = (*OF_A_STEP, "slow_chip")
OF_A_LINK = ("slow_link", "drop_link")
KINDS = (*OF_A_RANK, *OF_A_LINK)

FORMS = """\
rank=R,step=S,kill        the rank kills itself (SIGKILL) when it enters optimizer step S
rank=R,step=S,stop[=5s]   it stops (SIGSTOP), for good or for so long
rank=R,step=S,hbm_ecc     it raises the runtime's error of an uncorrectable error in HBM
rank=R,step=S,nan         one element of one gradient becomes NaN; seed=N chooses which
rank=R,slow_chip=1.5x     the chip of this rank takes so many times as long for everything, from step S on if given
slow_link=chip 0-chip 1:4x    the link takes so many times as long, both ways
drop_link=chip 0-chip 1       the link is broken; what would cross it goes round"""

_END = r"(?:core|chip|switch|ultraswitch|nic|rail|hbm) ?\d+"


class FaultError(ValueError):
    """A fault that cannot be understood or cannot happen, told to the person who asked for it."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        text: as the user wrote it.
        kind: one of :data:`KINDS`.
        rank: the rank of the job that it hits; None for links.
        step: the optimizer step, counted from 1 in the process, that it waits for; None where it holds from the start.
        factor: how many times as long a slow chip or link takes.
        duration_s: of a stop; None is for good.
        ends: of a link, as the topology names them.
        seed: chooses the element that becomes NaN.
    """

    text: str
    kind: str
    rank: int | None = None
    step: int | None = None
    factor: float = 1.0
    duration_s: float | None = None
    ends: tuple[str, str] | None = None
    seed: int = 0

    def link_fault(self) -> LinkFault | None:
        """What it does to a link; None for other kinds."""
        if self.ends is None:
            return None
        share = 0.0 if self.kind == "drop_link" else 1 / self.factor
        return LinkFault(*self.ends, bandwidth_share=share)


def parse_fault(text: str) -> Fault:
    """Read one fault.

    Raises:
        FaultError: says what is wrong with it and what would be right.
    """
    settings: dict[str, str] = {}
    for part in text.split(","):
        key, has_value, value = (word.strip() for word in part.partition("="))
        if key in settings:
            raise FaultError(f"fault {text!r}: {key} is there twice")
        if key not in ("rank", "step", "seed", *KINDS):
            near = difflib.get_close_matches(key, ("rank", "step", "seed", *KINDS), n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise FaultError(f"fault {text!r}: {key!r} is no kind of fault{hint}\n{FORMS}")
        settings[key] = value if has_value else ""
    kinds = [key for key in settings if key in KINDS]
    if len(kinds) != 1:
        raise FaultError(f"fault {text!r}: must name one kind, of {', '.join(KINDS)}\n{FORMS}")
    kind = kinds[0]
    value = settings.pop(kind)
    numbers = {key: _whole(text, key, settings[key]) for key in settings}
    if kind in OF_A_LINK:
        if numbers:
            raise FaultError(f"fault {text!r}: a link's fault holds from the start; leave out {', '.join(numbers)}")
        return _link(text, kind, value)
    if "rank" not in numbers:
        raise FaultError(f"fault {text!r}: whose? Give rank=R")
    if kind in OF_A_STEP and "step" not in numbers:
        raise FaultError(f"fault {text!r}: when? Give step=S, an optimizer step counted from 1")
    if numbers.get("step", 1) < 1:
        raise FaultError(f"fault {text!r}: steps are counted from 1")
    if "seed" in numbers and kind != "nan":
        raise FaultError(f"fault {text!r}: seed belongs to nan")
    fault = Fault(text, kind, numbers["rank"], numbers.get("step"), seed=numbers.get("seed", 0))
    if kind == "slow_chip":
        return dataclasses.replace(fault, factor=_factor(text, kind, value))
    if kind == "stop" and value:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)s", value)
        if match is None:
            raise FaultError(f"fault {text!r}: stop={value}: must be a time such as stop=5s")
        return dataclasses.replace(fault, duration_s=float(match[1]))
    if value:
        raise FaultError(f"fault {text!r}: {kind} takes no value")
    return fault


def _whole(text: str, key: str, value: str) -> int:
    if not value.isdigit():
        raise FaultError(f"fault {text!r}: {key}={value}: must be a whole number")
    return int(value)


def _factor(text: str, kind: str, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x", value)
    if match is None or float(match[1]) < 1:
        raise FaultError(f"fault {text!r}: {kind} needs a factor of at least 1 such as 1.5x")
    return float(match[1])


def _link(text: str, kind: str, value: str) -> Fault:
    ends, _, factor = value.partition(":")
    match = re.fullmatch(rf"({_END})-({_END})", ends.strip())
    if match is None:
        raise FaultError(f"fault {text!r}: {kind} needs the two ends of a link such as chip 0-chip 1")
    if kind == "drop_link" and factor:
        raise FaultError(f"fault {text!r}: a dropped link takes no factor")
    source, target = (re.sub(r"([a-z]) ?(\d)", r"\1 \2", end) for end in match.groups())
    fault = Fault(text, kind, ends=(source, target))
    return (
        fault if kind == "drop_link" else dataclasses.replace(fault, factor=_factor(text, "slow_link", factor.strip()))
    )


def faults_of_environment() -> list[Fault]:
    """The faults that ``TRN_FAULTS`` names. Raises :class:`FaultError`."""
    return [parse_fault(text.strip()) for text in os.environ.get(VARIABLE, "").split(";") if text.strip()]
