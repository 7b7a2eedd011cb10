"""Registers the process group ``neuron`` with ``torch.distributed``. Called by :mod:`trn_dist.neuron.autoload`.

What a program gets:

- ``init_process_group("neuron")`` serves neuron and cpu tensors both, over shared memory.
- ``init_process_group()`` without a backend is ``init_process_group("neuron")``. On a CUDA machine it would serve CUDA
  tensors by NCCL and no CPU tensors.
- ``init_process_group("neuron:neuron,cpu:gloo")`` leaves CPU tensors to Gloo.
- Programs that name another backend are left alone, and Gloo stays the default for ``cpu``.
- In timing mode (``TRN_TIMING_ONLY=1``) one process stands for all ranks of the job, or of a pipeline stage.
- Sums that do not depend on the number of ranks, on demand: :mod:`trn_dist.neuron.exact_sums`.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from trn_dist.neuron import flight_record, telemetry
from trn_dist.neuron.exact_sums import accumulate_exactly as accumulate_exactly
from trn_dist.neuron.exact_sums import exact_sums as exact_sums
from trn_dist.neuron.exact_sums import set_exact_sums as set_exact_sums
from trn_dist.neuron.exact_sums import set_from_environment
from trn_dist.timing.virtual_world import live_ranks, timing_only

if TYPE_CHECKING:
    from trn_dist import _C

BACKEND = "neuron"


def _create(options: Any, backend_options: Any) -> _C.ProcessGroupNeuron | _C.ProcessGroupLone:
    """Makes one group; the signature is c10d's ``extended_api``. The options may only set what c10d sets itself."""
    from trn_dist import _C

    if backend_options is not None and not isinstance(backend_options, _C.ProcessGroupNeuron.Options):
        raise TypeError(
            f"the neuron process group takes pg_options of type ProcessGroupNeuron.Options, got {type(backend_options)}"
        )
    _C._set_thread_counter(_count_threads)
    if timing_only():
        return _C._create_lone_group(options, live_ranks())
    _C._set_failure_listener(flight_record.dump_on_failure)
    flight_record.note_group()
    group = _C._create_process_group(options)
    telemetry.start(options.group_rank)  # the first group is that of the job
    return group


def _count_threads() -> int:
    """How many threads of the program might call a collective: all but those known to do something else.

    A rank counts as blocked for good only when this many of its threads are blocked. Threads of autograd, which Python
    knows as dummies or not at all, act for the thread that called ``backward``.
    """
    return sum(
        not isinstance(thread, threading._DummyThread)
        and thread.name != "QueueFeederThread"  # of multiprocessing, and so of the DataLoader
        and "_pin_memory_loop" not in thread.name
        and not type(thread).__module__.startswith("tqdm.")
        for thread in threading.enumerate()
    )


def connect_hosts(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Makes the Gloo group over which the hosts of a job are connected, listening on `address` alone."""
    from torch._C._distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = timeout
    # Only send and recv are used, which Gloo carries out on its device's thread.
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)


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
    _serve_monitored_barrier(c10d)
    _serve_shrinking(c10d)
    _serve_debug_level(c10d)
    if timing_only():
        _meet_stages_alone(c10d)
    set_from_environment()


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


def _meet_stages_alone(c10d: Any) -> None:
    """Timing mode: a rendezvous waits for other pipeline stages alone, and groups of other backends are refused."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    environment = handlers["env"]

    def alone(url: str, timeout: timedelta = c10d.default_pg_timeout, **kwargs: Any) -> Any:
        rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if rank is None or world_size is None:
            yield from environment(url, timeout, **kwargs)  # which says what is missing
            return
        live = live_ranks()
        if live:
            processes = f"env://?rank={live.index(int(rank))}&world_size={len(live)}"
            store = next(environment(processes, timeout))[0]
        else:
            store = torch.distributed.HashStore()
        yield store, int(rank), int(world_size)
        raise RuntimeError("a group cannot meet a second time in timing mode")

    handlers["env"] = alone
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def new_process_group_helper(
        group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: str, *args: Any, **kwargs: Any
    ) -> Any:
        if any(name in str(backend) for name in ("gloo", "nccl", "mpi", "ucc")):
            raise RuntimeError(
                f"timing mode (TRN_TIMING_ONLY): a group of backend {backend!r} would wait for ranks that do not run; "
                f"use {BACKEND!r}, which serves CPU tensors too"
            )
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
            if isinstance(backend, (_C.ProcessGroupNeuron, _C.ProcessGroupLone)):
                backend._set_default_timeout(timeout)
                served.add(device.type)
            else:
                others = True
        if others or not served:
            original(timeout, group)

    c10d._set_pg_timeout = set_pg_timeout


def _serve_monitored_barrier(c10d: Any) -> None:
    """Lets ``dist.monitored_barrier``, which asks for Gloo by name, work on neuron groups too."""
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        if c10d._rank_not_in_group(group) or c10d.get_backend(group) != BACKEND:
            return original(group, timeout, wait_all_ranks)
        if timing_only():
            torch.distributed.barrier(group)
            return None
        group = group or c10d._get_default_group()
        if timeout is None:
            timeout = group._get_backend(torch.device("neuron")).options._timeout
        c10d._check_valid_timeout(timeout)
        return group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    c10d.monitored_barrier = torch.distributed.monitored_barrier = monitored_barrier


def _serve_shrinking(c10d: Any) -> None:
    """Has the group that ``dist.shrink_group`` makes serve neuron tensors: c10d knows CUDA and cpu."""
    original = c10d._create_shrunk_process_group

    @functools.wraps(original)
    def create_shrunk_process_group(new_backend: Any, *args: Any, **kwargs: Any) -> Any:
        from trn_dist import _C

        group = original(new_backend, *args, **kwargs)
        if isinstance(new_backend, _C.ProcessGroupNeuron):
            kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
            for device in ("cpu", "neuron"):
                group._register_backend(torch.device(device), kind, new_backend)
            group._set_default_backend(kind)
        return group

    c10d._create_shrunk_process_group = create_shrunk_process_group


def _serve_debug_level(c10d: Any) -> None:
    """Leaves neuron groups as they are under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.

    c10d would wrap them in a group that compares each call over a Gloo group of its own. Neuron groups compare every
    call anyhow, and say more.
    """
    original = c10d._create_process_group_wrapper

    @functools.wraps(original)
    def create_process_group_wrapper(wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
        from trn_dist import _C

        if isinstance(wrapped_pg, _C.ProcessGroupNeuron):
            return wrapped_pg
        return original(wrapped_pg, *args, **kwargs)

    c10d._create_process_group_wrapper = create_process_group_wrapper
