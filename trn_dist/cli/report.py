"""``trn report``: the command line of :mod:`trn_dist.report.runs`."""

from __future__ import annotations

import json
from pathlib import Path

import click

_EPILOG = """\b
Exit codes:
  0  the report was made (a failed run can be reported too)
  1  a folder holds no run, or a file could not be read or written
  2  wrong arguments
"""


@click.command(name="report", epilog=_EPILOG)
@click.argument("folders", nargs=-1, metavar="[RUN]...", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write a page with the curves and all steps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON instead of tables.")
def report(folders: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Show what became of runs of `trn train`: losses, memory, faults, and where the predicted time of a step goes.

    RUN is a run folder; without one, the newest in runs/. Several runs stand side by side.

    \b
    trn report
    trn report runs/llama3_debug-20261130-071348 --html report.html
    trn report runs/fsdp8 runs/fsdp4_tp2 --html both.html
    """
    from rich.console import Console

    from trn_dist.report import runs as reports
    from trn_dist.titan.train import RUNS_FOLDER

    try:
        runs = [reports.read_run(folder) for folder in folders or (reports.newest_run(RUNS_FOLDER),)]
    except reports.RunFolderError as error:
        raise click.ClickException(str(error)) from None
    if html is not None:
        html.write_text(reports.as_html(runs), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(reports.as_json(runs), indent=2))
        return
    reports.print_runs(runs, Console())
    if html is not None:
        click.echo(html)
