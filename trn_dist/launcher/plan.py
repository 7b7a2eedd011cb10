"""What a run starts, and the mistakes that can be named before it starts.

Touches nothing but the file system, to look. Called by ``trn_dist.cli`` and by whoever launches from Python.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import os
import sys
from pathlib import Path

CORES_PER_NODE = 64
"""Logical NeuronCores of a trn2.48xlarge at LNC=2 (16 chips of 4), one rank each."""


class LaunchError(Exception):
    """A run that cannot start, told to the person who asked for it. Shown without a traceback."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of every rank: the script at the path ``target`` or, with ``is_module``, the module ``target``."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

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
        search_path = [os.getcwd(), *(entry for entry in sys.path if entry)]
        if importlib.machinery.PathFinder.find_spec(parts[0], search_path) is None:
            raise LaunchError(
                f"no module named {parts[0]!r} (for -m {self.target}); looked in {os.getcwd()} and sys.path"
            )


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One run: a program, its ranks, and how they are watched.

    Attributes:
        program: what each rank runs.
        world_size: number of ranks over all simulated nodes.
        nodes: simulated nodes; each holds ``world_size / nodes`` ranks, at most ``CORES_PER_NODE``.
        preload: modules that the warm process imports beside torch, so that the ranks need not.
        shown_local_ranks: local ranks whose output reaches the terminal; None shows all.
        log_dir: folder for one file a rank with its whole output; None writes none.
        grace_s: seconds between asking ranks to stop and killing them.
    """

    program: Program
    world_size: int
    nodes: int = 1
    preload: tuple[str, ...] = ()
    shown_local_ranks: frozenset[int] | None = None
    log_dir: Path | None = None
    grace_s: float = 5.0

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.nodes

    def check(self) -> None:
        """Raise LaunchError for a plan that cannot run, before any process starts."""
        if self.world_size < 1:
            raise LaunchError(f"-n {self.world_size}: a run needs at least 1 rank")
        if self.nodes < 1:
            raise LaunchError(f"--nodes {self.nodes}: a run needs at least 1 node")
        if self.world_size % self.nodes:
            raise LaunchError(
                f"{self.world_size} ranks do not divide evenly over {self.nodes} nodes; each holds the same number"
            )
        if self.local_world_size > CORES_PER_NODE:
            needed = -(-self.world_size // CORES_PER_NODE)
            raise LaunchError(
                f"{self.local_world_size} ranks on a node, but a simulated trn2.48xlarge has {CORES_PER_NODE} logical "
                f"NeuronCores, one for each rank; spread them over more nodes, for example --nodes {needed}"
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
        self.program.check()
