"""Faults on demand, carried out: what a rank does to itself before an optimizer step, and chips that become slow.

Installed when the device is loaded and ``TRN_FAULTS`` is set; see :mod:`trn_dist.faults` for what it may hold. A step
is counted by optimizer: the N-th call of ``step`` of the optimizer that has taken most. After a restart by torchrun
(``TORCHELASTIC_RESTART_COUNT`` above 0) nothing happens: the fault has happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from trn_dist.faults import Fault, faults_of_environment
from trn_dist.timing.chip_rates import load_chip_rates, on_own_chip

_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_waiting: list[Fault] | None = None


def enable_from_environment() -> None:
    """Watch optimizer steps, if a fault waits for one. The process may yet be forked into ranks."""
    if any(fault.step is not None for fault in faults_of_environment()):
        register_optimizer_step_pre_hook(_before_step)


def _own_faults() -> list[Fault]:
    """The faults of this rank that wait for a step."""
    rank = os.environ.get("RANK")
    if rank is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return []
    waiting = [fault for fault in faults_of_environment() if fault.step is not None]
    return [
        fault for fault in waiting if (on_own_chip(fault) if fault.kind == "slow_chip" else fault.rank == int(rank))
    ]


def _before_step(optimizer: Optimizer, arguments: Any, options: Any) -> None:
    global _waiting
    if _waiting is None:
        _waiting = _own_faults()
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    for fault in [fault for fault in _waiting if fault.step is not None and fault.step <= step]:
        _waiting.remove(fault)
        print(f"trn: fault in step {step}: {fault.text}", file=sys.stderr, flush=True)
        _carry_out(fault, optimizer)


def _carry_out(fault: Fault, optimizer: Optimizer) -> None:
    pid = os.getpid()
    if fault.kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault.kind == "stop":
        if fault.duration_s is not None:  # a stopped process cannot wake itself
            subprocess.Popen(["sh", "-c", f"sleep {fault.duration_s}; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
    elif fault.kind == "hbm_ecc":
        core = os.environ.get("LOCAL_RANK", "0")
        raise RuntimeError(
            f"neuron: nc{core}: uncorrectable error in HBM (mem_ecc_uncorrected); what the device holds is lost. Asked "
            f"for by the fault {fault.text!r}"
        )
    elif fault.kind == "nan":
        _poison(fault, optimizer)
    elif fault.kind == "slow_chip":
        load_chip_rates(fault.step or 0)


def _poison(fault: Fault, optimizer: Optimizer) -> None:
    """Makes one element of one gradient NaN. The choice depends on the seed alone, not on any other generator."""
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
    local = [gradient for gradient in local if gradient.numel() and gradient.is_floating_point()]
    if not local:
        print(f"trn: fault {fault.text!r}: rank {fault.rank} has no gradient", file=sys.stderr, flush=True)
        return
    draw = torch.Generator().manual_seed(fault.seed)
    chosen = local[int(torch.randint(len(local), (), generator=draw))]
    index = int(torch.randint(chosen.numel(), (), generator=draw))
    place = []
    for size in reversed(chosen.shape):
        index, inside = divmod(index, size)
        place.append(inside)
    with torch.no_grad():
        chosen[tuple(reversed(place))] = float("nan")
