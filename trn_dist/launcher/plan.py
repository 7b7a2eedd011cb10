"""What a run starts, and the mistakes that can be named before it starts.

Touches nothing but the file system, to look. Called by ``trn_dist.cli`` and by whoever launches from Python.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import os
import resource
import sys
from pathlib import Path

from trn_dist import faults
from trn_dist.faults import Fault
from trn_dist.hardware import Cluster, ConfigError, Topology
from trn_dist.hardware.environment import CLUSTER_VARIABLE, named_cluster
from trn_dist.launcher.host import usable_memory_bytes, usable_tasks

_MIB = 1 << 20
_GIB = 1 << 30
_WARM_BYTES = 350 * _MIB
"""Host memory of the warm process, and of a rank that does not share it."""
_FORKED_RANK_BYTES = 12 * _MIB
_OWN_RANK_BYTES = 200 * _MIB
"""The least that a rank takes beside that: what is measured after its first all-reduce, before it has any tensors."""
_RANK_TASKS = 2
_OWN_TASKS = 8
"""Processes and threads of a rank before its first backward, and of the launcher, the warm process and the store."""
_SPARE_DESCRIPTORS = 64


class LaunchError(Exception):
    """A run that cannot start, told to the person who asked for it. Shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of every rank: the script at the path ``target`` or, with ``is_module``, the module ``target``."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def as_lone_rank(self, world_size: int, nodes: int | None = None, stages: int = 1) -> Program:
        """The program that runs this one in timing mode: a world with a process for each of ``stages`` alone."""
        spread = () if nodes is None else ("--nodes", str(nodes))
        staged = () if stages == 1 else ("--stages", str(stages))
        module = ("-m",) if self.is_module else ()
        args = (*spread, *staged, str(world_size), *module, self.target, *self.args)
        return Program("trn_dist.timing.lone_rank", args, is_module=True)

    def check(self) -> None:
        """Raise LaunchError if the program cannot be run at all. Imports nothing of the user's."""
        if self.is_module:
            self._check_module()
        else:
            self._check_script()

    def _check_script(self) -> None:
        path = Path(self.target)
        if not path.exists():
            raise LaunchError(f"script {self.target!r} does not exist (looked in {Path.cwd()})")
        if path.is_dir():
            raise LaunchError(f"{self.target!r} is a folder; name a Python file, or a module with -m")
        try:
            source = path.read_bytes()
        except OSError as error:
            raise LaunchError(f"script {self.target!r} cannot be read: {error.strerror}") from None
        # The shebang decides for scripts without .py, such as the console entry points that pip installs.
        first_line = source.split(b"\n", 1)[0]
        if path.suffix != ".py" and not (first_line.startswith(b"#!") and b"python" in first_line):
            raise LaunchError(
                f"{self.target!r} is not a Python file: its name does not end in .py and its first line names no python"
            )
        if b"\0" in source:
            raise LaunchError(f"{self.target!r} is not a Python file: it holds null bytes")

    def _check_module(self) -> None:
        parts = self.target.split(".")
        if not all(part.isidentifier() for part in parts):
            hint = " (leave out .py and write dots for slashes)" if self.target.endswith(".py") else ""
            raise LaunchError(f"-m {self.target!r} is not a module name{hint}")
        # Only the top package is looked up: finding a submodule would import its parents here, before any rank exists.
        if parts[0] in sys.builtin_module_names:
            return
        # Beside the path there are finders, such as those of editable installations.
        here = importlib.machinery.PathFinder.find_spec(parts[0], [os.getcwd()])
        if here is None and importlib.util.find_spec(parts[0]) is None:
            raise LaunchError(
                f"no module named {parts[0]!r} (for -m {self.target}); looked in {os.getcwd()} and sys.path"
            )


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One run: a program, its ranks, and how they are watched.

    Attributes:
        program: what each rank runs.
        world_size: number of ranks over all simulated nodes.
        nodes: simulated nodes; each holds ``world_size / nodes`` ranks, at most as many as it has logical cores.
        cluster: the cluster that the ranks simulate, a shipped name or a path; "" leaves it to the environment.
        preload: modules that the warm process imports beside torch, so that the ranks need not.
        faults: what goes wrong on purpose; see :mod:`trn_dist.faults`.
        fork: fork the ranks from a warm process; else each starts an interpreter of its own.
        shown_local_ranks: local ranks whose output reaches the terminal; None shows all.
        prefixed: put the rank before each line on the terminal, where several are shown.
        log_dir: folder for one file a rank with its whole output; None writes none.
        grace_s: seconds between asking ranks to stop and killing them.
        nice: how much the run gives way to other processes of this machine, 0 to 19, as ``nice -n``.
    """

    program: Program
    world_size: int
    nodes: int = 1
    cluster: str = ""
    faults: tuple[Fault, ...] = ()
    fork: bool = True
    preload: tuple[str, ...] = ()
    shown_local_ranks: frozenset[int] | None = None
    prefixed: bool = True
    log_dir: Path | None = None
    grace_s: float = 5.0
    nice: int = 0

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.nodes

    def environment(self) -> dict[str, str]:
        """What the plan adds to the environment of all ranks, which may run in another folder."""
        added = {}
        if self.cluster:
            path = Path(self.cluster).expanduser()
            added[CLUSTER_VARIABLE] = str(path.resolve()) if path.suffix == ".toml" else self.cluster
        if self.faults:
            added[faults.VARIABLE] = ";".join(fault.text for fault in self.faults)
        return added

    def check(self) -> None:
        """Raise LaunchError for a plan that cannot run, before any process starts."""
        unit = self.check_world()
        if (rank := os.environ.get("LOCAL_RANK")) is not None:
            raise LaunchError(
                f"this process is a rank itself (LOCAL_RANK={rank}), and every rank would start {self.world_size} "
                "more; call trn without a launcher around it, or unset LOCAL_RANK"
            )
        if self.grace_s < 0:
            raise LaunchError(f"--grace-s {self.grace_s:g}: the grace period cannot be negative")
        if self.shown_local_ranks is not None:
            unknown = sorted(rank for rank in self.shown_local_ranks if not 0 <= rank < self.local_world_size)
            if unknown:
                raise LaunchError(
                    f"--local-ranks-filter names local rank {unknown[0]}, but local ranks go from 0 to "
                    f"{self.local_world_size - 1}"
                )
        for module in self.preload:
            if not all(part.isidentifier() for part in module.split(".")):
                raise LaunchError(f"--preload {module!r} is not a module name")
        self._check_faults(unit)
        if self.preload and not self.fork:
            raise LaunchError(
                "--preload imports in the process that ranks are forked from; leave it out with --no-fork"
            )
        self.program.check()
        self._check_memory()
        self._check_tasks()
        self._check_descriptors()

    def check_world(self) -> Cluster:
        """Raise LaunchError for ranks and nodes that the cluster cannot have; returns one unit of it."""
        if self.world_size < 1:
            raise LaunchError(f"-n {self.world_size}: a run needs at least 1 rank, {self.world_size} ranks are none")
        if self.nodes < 1:
            raise LaunchError(f"--nodes {self.nodes}: a run needs at least 1 node")
        if self.world_size % self.nodes:
            raise LaunchError(
                f"{self.world_size} ranks do not divide evenly over {self.nodes} nodes; each holds the same number"
            )
        unit = simulated_cluster(self.cluster)
        if self.local_world_size > unit.cores_per_node:
            raise LaunchError(
                f"{self.local_world_size} ranks on a node, but a node of the simulated {unit.name} has "
                f"{unit.cores_per_node} logical NeuronCores, one for each rank; spread them over more nodes, for "
                f"example --nodes {unit.nodes_for(self.world_size)}"
            )
        if unit.efa is None and self.nodes > unit.nodes_per_unit:
            raise LaunchError(
                f"--nodes {self.nodes}: a {unit.name} has {unit.nodes_per_unit} and no network to join it to others"
            )
        return unit

    def _check_faults(self, unit: Cluster) -> None:
        try:
            chosen = self.faults or tuple(faults.faults_of_environment())
        except faults.FaultError as error:
            raise LaunchError(f"{faults.VARIABLE}: {error}") from None
        for fault in chosen:
            if fault.rank is not None and fault.rank >= self.world_size:
                raise LaunchError(f"fault {fault.text!r}: ranks go from 0 to {self.world_size - 1}")
        links = [link for fault in chosen if (link := fault.link_fault()) is not None]
        if not links:
            return
        units = -(-self.nodes // unit.nodes_per_unit)
        try:
            Topology(dataclasses.replace(unit, count=units), links)
        except ConfigError as error:
            raise LaunchError(f"fault: {error}") from None

    def _check_tasks(self) -> None:
        text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(text) if text.isdigit() and int(text) else 1
        each = _RANK_TASKS + threads - 1
        needed = _OWN_TASKS + self.world_size * each
        usable, limit = usable_tasks()
        if needed > usable:
            of_each = f"{_RANK_TASKS} a rank" + (f" and {threads - 1} for OMP_NUM_THREADS" if threads > 1 else "")
            raise LaunchError(
                f"{self.world_size} ranks need {needed} processes and threads ({of_each}, {_OWN_TASKS} of the run), "
                f"and {limit} leaves {usable}; at most {max(0, (usable - _OWN_TASKS) // each)} ranks fit"
            )

    def _check_descriptors(self) -> None:
        """Two pipes and a log file a rank, in the launcher."""
        needed, (_, hard) = self.descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise LaunchError(
                f"{self.world_size} ranks need {needed} file descriptors (3 a rank and {_SPARE_DESCRIPTORS}), "
                f"but the hard limit is {hard}: ulimit -Hn {needed}"
            )

    @property
    def descriptors(self) -> int:
        """Files that the launcher has open at a time."""
        return 3 * self.world_size + _SPARE_DESCRIPTORS

    def _check_memory(self) -> None:
        """Refuse what cannot even start. What the program itself needs, nobody knows here."""
        each = _FORKED_RANK_BYTES if self.fork else _OWN_RANK_BYTES
        needed, usable = _WARM_BYTES + self.world_size * each, usable_memory_bytes()
        if needed > usable:
            fitting = max(0, (usable - _WARM_BYTES) // each)
            raise LaunchError(
                f"{self.world_size} ranks do not fit into this machine: {_WARM_BYTES // _MIB} MiB + "
                f"{self.world_size} x {each // _MIB} MiB = {needed / _GIB:.1f} GiB before the program has a single "
                f"tensor, and {usable / _GIB:.1f} GiB can be had; at most {fitting} ranks do"
            )


def simulated_cluster(name: str = "") -> Cluster:
    """One unit of the cluster ``name``, or of the one that the environment names. Raises LaunchError."""
    try:
        return named_cluster(name)
    except ConfigError as error:
        raise LaunchError(f"{f'--cluster {name}' if name else 'the simulated cluster'}: {error}") from None
