"""``trn run``: the launcher's command line."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trn_dist.cli import EXIT_CODES
from trn_dist.launcher import LaunchError, LaunchPlan, Program, launch


def parse_local_ranks(ctx: click.Context, parameter: click.Parameter, value: str | None) -> frozenset[int] | None:
    """``0,1`` as a set; None when the option was not given."""
    if value is None:
        return None
    try:
        return frozenset(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of local ranks such as 0,1") from None


@click.command(
    # What follows PROGRAM belongs to it, options too.
    context_settings={"allow_interspersed_args": False},
    epilog=EXIT_CODES,
    name="run",
)
@click.option("-n", "--nproc", "world_size", type=int, required=True, metavar="RANKS", help="Number of ranks in all.")
@click.option("-m", "--module", "is_module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Simulated nodes that the ranks are spread over.")
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
    "--preload",
    callback=lambda ctx, parameter, value: tuple(value.split(",")) if value else (),
    metavar="MODULE,...",
    help="Import these modules once for all ranks before they start. They must start no thread.",
)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    world_size: int,
    is_module: bool,
    nodes: int,
    shown_local_ranks: frozenset[int] | None,
    log_dir: Path | None,
    grace_s: float,
    preload: tuple[str, ...],
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM with ARGS on simulated Trainium ranks.

    Sets the environment that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...). One process imports
    torch and the ranks are forked from it, so 64 of them start in seconds. The first rank that fails ends the run and
    is shown with its traceback. When the run ends, every process that it started has ended.

    \b
    trn run -n 8 train.py --steps 100
    trn run -n 8 -m package.train --steps 100
    """
    plan = LaunchPlan(
        program=Program(program, args, is_module),
        world_size=world_size,
        nodes=nodes,
        preload=preload,
        shown_local_ranks=shown_local_ranks,
        log_dir=log_dir,
        grace_s=grace_s,
    )
    try:
        plan.check()
    except LaunchError as error:
        raise click.UsageError(str(error)) from None
    try:
        sys.exit(launch(plan))
    except LaunchError as error:
        raise click.ClickException(str(error)) from None
