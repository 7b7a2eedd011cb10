"""``trn run``: the launcher's command line."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from trn_dist.cli import EXIT_CODES
from trn_dist.faults import Fault, FaultError, parse_fault
from trn_dist.hardware import Cluster, list_configs
from trn_dist.launcher import LaunchError, LaunchPlan, Program, launch
from trn_dist.launcher.plan import simulated_cluster
from trn_dist.timing.virtual_world import TIMING_ONLY_VARIABLE


def start(plan: LaunchPlan) -> NoReturn:
    """Runs a plan and exits with its code; a plan that cannot run is a usage error."""
    try:
        plan.check()
    except LaunchError as error:
        raise click.UsageError(str(error)) from None
    try:
        sys.exit(launch(plan))
    except LaunchError as error:
        raise click.ClickException(str(error)) from None


def parse_local_ranks(ctx: click.Context, parameter: click.Parameter, value: str | None) -> frozenset[int] | None:
    """``0,1`` as a set; None when the option was not given."""
    if value is None:
        return None
    try:
        return frozenset(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of local ranks such as 0,1") from None


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of shipped clusters that begin so, and files."""
    found = [CompletionItem(name) for name in list_configs("clusters") if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


def parse_faults(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Fault, ...]:
    """The faults of ``--fault``."""
    try:
        return tuple(parse_fault(text) for text in value)
    except FaultError as error:
        raise click.BadParameter(str(error)) from None


fault_option = functools.partial(
    click.option, "--fault", "faults", multiple=True, callback=parse_faults, metavar="FAULT"
)
"""The option that ``run`` and ``train`` have alike, but for its help."""


def read_cluster(name: str) -> Cluster:
    """One unit of a cluster, or of the one that the environment names; raises click.UsageError."""
    try:
        return simulated_cluster(name)
    except LaunchError as error:
        raise click.UsageError(str(error)) from None


def _lone_rank(program: Program, world_size: int, nodes: int | None, cluster: str) -> Program:
    """The program in timing mode; the world that it is to stand for has been checked, but for this machine's memory."""
    try:
        LaunchPlan(program, world_size=1, cluster=cluster).check()
        if nodes is None:
            nodes = simulated_cluster(cluster).nodes_for(max(world_size, 1))
        LaunchPlan(program, world_size, nodes, cluster).check_world()
    except LaunchError as error:
        raise click.UsageError(str(error)) from None
    return program.as_lone_rank(world_size, nodes)


@click.command(
    # What follows PROGRAM belongs to it, options too.
    context_settings={"allow_interspersed_args": False},
    epilog=EXIT_CODES,
    name="run",
)
@click.option(
    "-n",
    "--nproc",
    "world_size",
    type=int,
    metavar="RANKS",
    help="Number of ranks in all. Default with --cluster: one on each logical core.",
)
@click.option(
    "--cluster",
    default="",
    metavar="NAME|FILE",
    shell_complete=complete_cluster,
    help="The cluster to simulate, such as trn2-ultraserver, or a file ending in .toml.  [default: TRN_CLUSTER, or "
    "trn2.48xlarge]",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.option(
    "--nodes",
    type=int,
    help="Simulated nodes that the ranks are spread over.  [default: 1; with --cluster as many as they need]",
)
@click.option(
    "--local-ranks-filter",
    "shown_local_ranks",
    callback=parse_local_ranks,
    metavar="0,1,...",
    help="Show the output of these local ranks only. A failure is shown whichever rank it hits.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the whole output of rank R to DIRECTORY/rankR.log.",
)
@click.option(
    "--grace-s",
    type=float,
    default=LaunchPlan.grace_s,
    show_default=True,
    metavar="SECONDS",
    help="Time between asking ranks to stop and killing them.",
)
@click.option(
    "--nice",
    type=click.IntRange(0, 19),
    default=0,
    show_default=True,
    help="Give way to other programs of this machine, as `nice -n` does.",
)
@click.option(
    "--preload",
    callback=lambda ctx, parameter, value: tuple(value.split(",")) if value else (),
    metavar="MODULE,...",
    help="Import these modules once for all ranks before they start. They must start no thread.",
)
@fault_option(
    help="Have something go wrong, such as 'rank=3,step=5,kill'; can be given several times. A wrong one lists all "
    "kinds.",
)
@click.option(
    "--no-fork",
    is_flag=True,
    help="Start an interpreter for each rank, as torchrun does, for a program that cannot stand a fork.",
)
@click.option(
    "--timing-only",
    is_flag=True,
    help="Compute no numbers: one process stands for all ranks, and memory and virtual time are what they would be.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    world_size: int | None,
    cluster: str,
    is_module: bool,
    nodes: int | None,
    shown_local_ranks: frozenset[int] | None,
    log_dir: Path | None,
    grace_s: float,
    nice: int,
    preload: tuple[str, ...],
    faults: tuple[Fault, ...],
    no_fork: bool,
    timing_only: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM with ARGS on simulated Trainium ranks.

    Sets the environment that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...). One process imports
    torch and the ranks are forked from it, so 64 of them start in seconds. The first rank that fails ends the run and
    is shown with its traceback. When the run ends, every process that it started has ended. SIGUSR1, or `trn stacks`
    in another terminal, shows where each rank stands.

    All ranks run on this machine; a job over several machines is started by torchrun --nnodes on each.

    \b
    trn run -n 8 train.py --steps 100
    trn run -n 8 -m package.train --steps 100
    trn run --cluster trn2-ultraserver train.py          # 256 ranks on 4 simulated nodes
    trn run -n 64 --timing-only train.py                 # one process in the place of 64
    """
    if world_size is None and not cluster:
        raise click.UsageError("how many ranks? Give -n RANKS, or --cluster for all logical cores of its nodes")
    if world_size is None:
        unit = read_cluster(cluster)
        nodes = unit.nodes_per_unit if nodes is None else nodes
        world_size = nodes * unit.cores_per_node
    elif cluster and nodes is None and world_size > 0:
        nodes = read_cluster(cluster).nodes_for(world_size)
    runs = Program(program, args, is_module)
    if timing_only:
        if faults:
            raise click.UsageError("--fault: with --timing-only there is one process, and no other to go wrong")
        os.environ[TIMING_ONLY_VARIABLE] = "1"
        runs = _lone_rank(runs, world_size, nodes, cluster)
        world_size = nodes = 1
    plan = LaunchPlan(
        program=runs,
        world_size=world_size,
        nodes=1 if nodes is None else nodes,
        cluster=cluster,
        faults=faults,
        fork=not no_fork,
        preload=preload,
        shown_local_ranks=shown_local_ranks,
        log_dir=log_dir,
        grace_s=grace_s,
        nice=nice,
    )
    start(plan)
