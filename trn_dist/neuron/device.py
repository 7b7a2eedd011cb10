"""Devices of the simulated node: which there are, which one is current, what each is."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch

from trn_dist import _C

if TYPE_CHECKING:
    from trn_dist.hardware import Cluster

Device = torch.device | int | str | None


def visible_cores(cores: int) -> list[int]:
    """Which of a node's ``cores`` logical cores this process may use; ``neuron:0`` is the first of them.

    NEURON_RT_VISIBLE_CORES says (an index, a range such as ``0-7``, or several of both between commas), else
    NEURON_RT_NUM_CORES, else all.

    Raises:
        ValueError: a variable names cores that the node does not have, or is no number.
    """
    visible = os.environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if visible:
        chosen: set[int] = set()
        for part in visible.split(","):
            first, _, last = part.strip().partition("-")
            if not first.isdigit() or (last and not last.isdigit()):
                raise ValueError(
                    f"NEURON_RT_VISIBLE_CORES={visible!r}: {part!r} is neither a core such as 3 nor a range such as 0-7"
                )
            span = range(int(first), int(last or first) + 1)
            if not span or span[-1] >= cores:
                raise ValueError(f"NEURON_RT_VISIBLE_CORES={visible!r}: {part!r} must lie in 0 to {cores - 1}")
            chosen.update(span)
        return sorted(chosen)
    number = os.environ.get("NEURON_RT_NUM_CORES", "").strip() or "0"
    if not number.isdigit() or int(number) > cores:
        raise ValueError(
            f"NEURON_RT_NUM_CORES={number!r}: must be 1 to {cores}, the node's logical cores, or 0 for all"
        )
    return list(range(int(number) or cores))


def _node() -> Cluster:
    """The cluster that the environment names."""
    from trn_dist.hardware.environment import named_cluster

    return named_cluster()


def read_configuration() -> dict[str, Any]:
    """What the devices of this process are: cores of one node. Called at the first use of a device."""
    cluster = _node()
    policy = dataclasses.asdict(cluster.chip.allocator)
    return {
        "device_count": len(visible_cores(cluster.cores_per_node)),
        "hbm_bytes": cluster.chip.hbm_bytes_per_logical_core,
        "name": cluster.device_name,
        "small_limit_included": policy.pop("policy") == "cuda",
        **policy,
    }


def claim_named_cores() -> None:
    """Claims the cores that NEURON_RT_VISIBLE_CORES names; see :mod:`trn_dist.neuron.core_claim`."""
    if os.environ.get("NEURON_RT_VISIBLE_CORES", "").strip():
        from trn_dist.neuron.core_claim import claim_cores, own_cores

        claim_cores(own_cores(visible_cores(_node().cores_per_node)))


_C._set_device_config_provider(read_configuration)


def device_index(device: Device, optional: bool = True) -> int:
    """The index that ``device`` means: its own, or the current device's if it has none.

    Raises:
        ValueError: ``device`` is of another type than ``neuron``.
        RuntimeError: the node has no such device.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "neuron":
            raise ValueError(f"Expected a neuron device, but got: {device}")
        device = device.index
    if device is None:
        return current_device()
    _C._check_device(device)
    return int(device)


def device_count() -> int:
    """The number of logical NeuronCores of the simulated node."""
    return _C._device_count()


def current_device() -> int:
    """The index of the calling thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    """Makes ``device`` current for the calling thread."""
    _C._refuse_bad_fork()
    torch.accelerator.set_device_index(device_index(device))


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What a logical NeuronCore is.

    Attributes:
        name: the device's name as PyTorch and TorchTitan know it, such as ``"trn2"``.
        total_memory: bytes of HBM of one logical core.
        multi_processor_count: physical NeuronCores behind one logical core.
    """

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: Device = None) -> DeviceProperties:
    """The properties of a device; see :class:`DeviceProperties`."""
    device_index(device)
    return DeviceProperties(
        name=_C._device_name(),
        total_memory=_C._device_hbm_bytes(),
        multi_processor_count=_node().chip.physical_cores_per_logical,
    )


def get_device_name(device: Device = None) -> str:
    """A name for people, such as ``"AWS neuron trn2 (simulated)"``."""
    return f"AWS neuron {get_device_properties(device).name} (simulated)"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """The NeuronCore's generation, as (major, minor): (3, 0) for Trainium2's NeuronCore-v3."""
    generation = {"trn1": 2, "trn1n": 2, "inf2": 2, "trn2": 3, "trn2n": 3, "trn2u": 3, "trn3": 4, "trn3u": 4}
    name = get_device_properties(device).name
    if name not in generation:
        raise NotImplementedError(f"the NeuronCore generation of device {name!r} is not known")
    return generation[name], 0


class device:
    """A context in which ``device`` is current; ``None`` or a negative index changes nothing."""

    def __init__(self, device: Device) -> None:
        unchanged = device is None or (isinstance(device, int) and device < 0)
        self.idx = -1 if unchanged else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx >= 0:
            self.prev_idx = current_device()
            set_device(self.idx)

    def __exit__(self, *error: Any) -> None:
        if self.idx >= 0:
            set_device(self.prev_idx)


class device_of(device):
    """A context in which the device of ``tensor`` is current; a tensor elsewhere changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "neuron" else None)
