"""Registers the process group ``neuron`` with ``torch.distributed``. Called by :mod:`trn_dist.neuron.autoload`.

What a program gets:

- ``init_process_group("neuron")`` serves neuron and cpu tensors both, over shared memory.
- ``init_process_group()`` without a backend is ``init_process_group("neuron")``. On a CUDA machine it would serve CUDA
  tensors by NCCL and no CPU tensors.
- ``init_process_group("neuron:neuron,cpu:gloo")`` leaves CPU tensors to Gloo.
- Programs that name another backend are left alone, and Gloo stays the default for ``cpu``.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trn_dist import _C

BACKEND = "neuron"


def _create(options: Any, backend_options: Any) -> _C.ProcessGroupNeuron:
    """Makes one group; the signature is c10d's ``extended_api``. The options may only set what c10d sets itself."""
    from trn_dist import _C

    if backend_options is not None and not isinstance(backend_options, _C.ProcessGroupNeuron.Options):
        raise TypeError(
            f"the neuron process group takes pg_options of type ProcessGroupNeuron.Options, got {type(backend_options)}"
        )
    return _C._create_process_group(options)


def register_backend() -> None:
    """Makes ``neuron`` a backend of ``torch.distributed``. Creates no memory, thread or socket; may be repeated."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    if BACKEND in c10d.Backend.backend_list:
        return
    # cpu has its default, Gloo, already, and register_backend does not take it away.
    c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["neuron", "cpu"])
    # Groups that do nothing, which device meshes use for dimensions of size one. Importing the module registers them.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    if "neuron" not in c10d.Backend.backend_capability[c10d.Backend.FAKE]:
        c10d.Backend.backend_capability[c10d.Backend.FAKE].append("neuron")
    _serve_unnamed_backend(c10d)
    _serve_timeouts(c10d)


def _serve_unnamed_backend(c10d: Any) -> None:
    """Makes a group without a named backend a neuron group wherever neuron is the accelerator.

    c10d itself would make a group for the accelerator only, call it "undefined", and take Gloo, which is not in the
    group, for its default backend: DDP then fails.
    """
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def new_process_group_helper(
        group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: str, *args: Any, **kwargs: Any
    ) -> Any:
        accelerator = torch._C._get_accelerator().type
        if backend == c10d.Backend.UNDEFINED and c10d.Backend.default_device_backend_map.get(accelerator) == BACKEND:
            backend = c10d.Backend(BACKEND)
        return original(group_size, group_rank, global_ranks_in_group, backend, *args, **kwargs)

    c10d._new_process_group_helper = new_process_group_helper


def _serve_timeouts(c10d: Any) -> None:
    """Lets ``_set_pg_timeout``, which knows NCCL and Gloo by class, set the timeout of neuron groups too."""
    original = c10d._set_pg_timeout

    @functools.wraps(original)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        from trn_dist import _C

        group = group or c10d._get_default_group()
        served = set()
        others = False
        for device in [] if c10d._rank_not_in_group(group) else group._device_types:
            backend = group._get_backend(device)
            if isinstance(backend, _C.ProcessGroupNeuron):
                backend._set_default_timeout(timeout)
                served.add(device.type)
            else:
                others = True
        if others or not served:
            original(timeout, group)

    c10d._set_pg_timeout = set_pg_timeout
