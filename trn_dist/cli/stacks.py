"""``trn stacks``: where every rank of a running run stands, from another terminal."""

from __future__ import annotations

import dataclasses
import json

import click

from trn_dist.launcher.output import name_ranks
from trn_dist.launcher.running import zygotes
from trn_dist.launcher.stacks import collect, grouped


@click.command(name="stacks", epilog="Exit codes: 0, and 1 when a rank gave no answer; 2 when there is no such run.")
@click.argument("pid", type=int, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one object a rank: rank, pid, text, problem.")
@click.option(
    "--timeout-s", type=click.FloatRange(min=0), default=3.0, show_default=True, help="How long to wait for answers."
)
def stacks(pid: int | None, as_json: bool, timeout_s: float) -> None:
    """Show the Python tracebacks of all threads of all ranks of a run.

    PID is the process of `trn run` or `trn train`; it can be left out when only one runs. Ranks that stand at the same
    lines are shown together. The ranks go on as if nothing had happened. `kill -USR1 PID` has the launcher itself
    print the same.
    """
    runs = zygotes()
    if pid is None and len(runs) > 1:
        raise click.UsageError(f"several runs: name one of {', '.join(map(str, sorted(runs)))}")
    if pid is None and not runs:
        raise click.UsageError("nothing runs under `trn run` or `trn train`; of torchrun's ranks ask py-spy")
    if pid is not None and pid not in runs:
        known = f"; running: {', '.join(map(str, sorted(runs)))}" if runs else "; nothing runs"
        raise click.UsageError(f"{pid} is no process of `trn run` or `trn train`{known}")
    answers = collect(runs[pid] if pid is not None else next(iter(runs.values())), timeout_s)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(answer) for answer in answers], indent=2))
    else:
        for ranks, text in grouped(answers):
            click.echo(f"{name_ranks(ranks)}:\n{text}\n")
    if any(answer.problem for answer in answers):
        raise click.ClickException("not every rank has answered")
