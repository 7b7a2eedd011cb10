"""A rank's side of ``trn top`` and ``trn monitor``: tells its virtual times and its memory to whoever of its user asks.

A thread sleeps in ``accept`` until then, so that nobody pays who is not watched. It is no thread that
:mod:`threading` knows: the process group counts those to find out whether a rank is blocked for good. It launches no
operator and changes no time. The client is :mod:`trn_dist.telemetry`.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import json
import os
import socket
import threading
import time
import weakref
from typing import Any

import torch

from trn_dist import _C
from trn_dist.telemetry import peer_of, socket_name

_ANSWER_TIMEOUT_S = 2.0
_PATIENCE_S = 1.0
"""How long an answer waits for the main thread; less than the client waits for the answer."""
_SEARCH_EVERY_S = 10.0
"""How often all objects of the process are searched for optimizers."""
_KINDS = ("parameters", "gradients", "optimizer_state")

_rank: int | None = None
"""Of this process in its job, once it answers."""
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_searched_s = -_SEARCH_EVERY_S


def start(own_rank: int | None = None) -> None:
    """Has this process answer from now on, if it is a rank: of a launcher, or ``own_rank`` of a job it has joined."""
    global _rank
    launched = os.environ.get("LOCAL_RANK", "").isdigit()
    rank = int(os.environ.get("RANK", "0")) if launched else own_rank
    if rank is None or _rank is not None:
        return
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:  # no descriptor is left: the rank runs unobserved
        return
    try:
        listener.bind(socket_name(os.getpid(), rank))
        listener.listen()
    except OSError:  # the name is taken
        listener.close()
        return
    _rank = rank
    # A process that the rank forks has no thread to answer with.
    os.register_at_fork(after_in_child=lambda: _stop(listener))
    _thread.start_new_thread(_serve, (listener,))


def _stop(listener: socket.socket) -> None:
    global _rank
    listener.close()
    _rank = None


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        with connection, contextlib.suppress(Exception):  # an onlooker that went away must not end the answers
            connection.settimeout(_ANSWER_TIMEOUT_S)
            if peer_of(connection)[1] in (os.getuid(), 0):
                connection.sendall(json.dumps(figures()).encode())


def figures() -> dict[str, Any]:
    """What this rank tells: who it is, how it has spent its virtual time so far, and what lies in its memory."""
    from trn_dist.neuron.device import visible_cores
    from trn_dist.timing.cluster import cluster, cluster_name
    from trn_dist.timing.steps import step_times

    job = cluster()
    cores = visible_cores(job.cores_per_node)
    times = step_times(_C._times_so_far())
    kinds = _kinds()
    nothing = dict.fromkeys(_KINDS, 0)
    return {
        "rank": _rank or 0,
        "world_size": _world_size(),
        "cluster": cluster_name(),
        "lnc": job.chip.physical_cores_per_logical,
        "tag": os.environ.get("NEURON_PROCESS_TAG", ""),
        "times": {
            "end_ps": times.end_ps,
            "parts": times.parts(),
            "flops": times.flops,
            "launched": sum(operator.count for operator in times.operators),
            "collectives": sum(group.collectives for group in times.groups),
        },
        "irreproducible": _C._irreproducible_reason(),
        "memory": {str(cores[index]): _memory(index, kinds.get(index, nothing)) for index in _C._devices_in_use()},
    }


def _world_size() -> int:
    if torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _memory(index: int, kinds: dict[str, int]) -> dict[str, int]:
    stats = _C._memory_stats(index)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return {
        "total": _C._mem_get_info(index)[1],
        "tensors": allocated["current"],
        "reserved": reserved["current"],
        "reserved_peak": reserved["peak"],
        "out_of_memory": stats["num_ooms"],
        **kinds,
        "other": max(0, allocated["current"] - sum(kinds.values())),
    }


class _Kinds:
    """Bytes of what the optimizers know, by device, each storage once.

    Only the main thread may look: PyTorch's tensors are not made to be read while another thread replaces them. It does
    so when it next runs Python, which an onlooker does not wait for longer than a second, and once: a rank that is
    blocked in a collective tells what it had when it was last seen.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, dict[str, int]] = {}
        self._seen = threading.Event()
        self._seen.set()

    def __call__(self) -> dict[int, dict[str, int]]:
        if threading.get_ident() == threading.main_thread().ident:
            self._look()
        elif self._seen.is_set():
            self._seen.clear()
            if not _C._call_on_main_thread(self._look):
                self._seen.set()
            self._seen.wait(_PATIENCE_S)
        return self._bytes

    def _look(self) -> None:
        try:
            self._bytes = _bytes_by_kind()
        finally:
            self._seen.set()


_kinds = _Kinds()


def _bytes_by_kind() -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    seen: set[int] = set()

    def add(kind: str, tensor: Any) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        storage = _C._storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if storage is not None and storage[1] not in seen:
            device, address, nbytes = storage
            seen.add(address)
            found.setdefault(device, dict.fromkeys(_KINDS, 0))[kind] += nbytes

    with torch._C.DisableTorchFunctionSubclass():
        for optimizer in _known_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    add("parameters", parameter)
                    add("gradients", parameter.grad)
                    for value in optimizer.state.get(parameter, {}).values():
                        add("optimizer_state", value)
    return found


def _known_optimizers() -> list[torch.optim.Optimizer]:
    global _searched_s
    if time.monotonic() - _searched_s > _SEARCH_EVERY_S:
        _searched_s = time.monotonic()
        for item in gc.get_objects():
            if issubclass(type(item), torch.optim.Optimizer):  # isinstance would ask proxies for what they stand for
                _optimizers.add(item)
    return list(_optimizers)
