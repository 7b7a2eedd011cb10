"""``trn replay``: the command line of :mod:`trn_dist.timing.replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trn_dist.cli.run import complete_cluster
from trn_dist.hardware import Cluster, ConfigError
from trn_dist.hardware.environment import logical_core_config

if TYPE_CHECKING:
    from trn_dist.timing.replay import Replay


def _cluster(run: Replay, name: str | None) -> Cluster:
    return run.cluster(name, logical_core_config()) if name else run.own_cluster()


@click.command(name="replay", epilog="Exit codes: 0; 1 when RUN cannot be replayed; 2 wrong arguments.")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--cluster",
    metavar="NAME|FILE",
    shell_complete=complete_cluster,
    help="Where to replay it.  [default: the run's own cluster]",
)
@click.option(
    "--against",
    metavar="NAME|FILE|RUN",
    shell_complete=complete_cluster,
    help="What to compare it with: a cluster, or another recorded run.  [default: the run's own cluster]",
)
@click.option(
    "--sharing",
    type=click.Choice(["shared", "static"]),
    default="shared",
    show_default=True,
    help="Whether all transfers in flight share the links, or each has them to itself and its siblings, as in a run.",
)
@click.option("--step", type=click.IntRange(min=1), help="Which step of the run to show.  [default: the last]")
@click.option("--operators", type=click.IntRange(min=0), default=15, show_default=True, help="How many to show.")
@click.option(
    "--chakra",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Instead, write RUN as Chakra execution traces for other simulators, with the operators' times on --cluster.",
)
@click.option("--json", "as_json", is_flag=True, help="Print plain data, times in picoseconds.")
def replay(
    run: Path,
    cluster: str | None,
    against: str | None,
    sharing: str,
    step: int | None,
    operators: int,
    chakra: Path | None,
    as_json: bool,
) -> None:
    """Predict a recorded run on another cluster, without running it, and say where the difference comes from.

    RUN is the run folder of `trn train --record`, or the folder that TRN_RECORD named. A is --against, B is RUN on
    --cluster; without either, A has the links' static sharing of a live run and B the exact one. Against another run,
    which --cluster then moves too, it compares two layouts.

    \b
    trn replay runs/llama3_debug-20261130 --cluster trn2-ultraserver
    trn replay runs/llama3_debug-20261130 --cluster my.toml --against trn3-gen2-ultraserver
    trn replay runs/fsdp16_tp4 --against runs/fsdp64
    """
    from trn_dist.timing.program import ProgramError
    from trn_dist.timing.replay import Replay, compare

    try:
        recorded = Replay.of(run)
        if chakra is not None:
            from trn_dist.timing.chakra import write_chakra

            files = write_chakra(recorded.programs, _cluster(recorded, cluster), chakra)
            click.echo(json.dumps([str(file) for file in files]) if as_json else f"{len(files)} traces in {chakra}")
            return
        other, first_name, labels = recorded, against, ("", "")
        if against and Path(against).is_dir():
            other, first_name, labels = Replay.of(against), cluster, (against, str(run))
        first = other.on(_cluster(other, first_name), sharing if cluster or against else "static")
        second = recorded.on(_cluster(recorded, cluster), sharing)
        comparison = compare(first, second, -1 if step is None else step - 1)
    except (ProgramError, ConfigError, IndexError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(comparison.as_json(), indent=2) if as_json else comparison.table(operators, labels))
