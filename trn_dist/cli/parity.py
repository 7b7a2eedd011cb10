"""``trn parity``: the command line of :mod:`trn_dist.parity`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from trn_dist.cli.train import find_recipe

_EPILOG = """\b
Exit codes:
  0  every layout passes
  1  a layout is different or failed, or the reference could not be trained
  2  wrong arguments
"""


@click.command(
    name="parity",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [--SECTION.KEY VALUE]...",
    epilog=_EPILOG,
)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option("--layouts", metavar="LIST", help="Layouts separated by ';', the first is the reference.")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps of each run.")
@click.option(
    "--clipping",
    type=click.Choice(["both", "off", "on"]),
    default="both",
    show_default=True,
    help="Gradient clipping: off, on at a limit that bites in every step, or both one after the other.",
)
@click.option(
    "--members",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help="Perturbed runs of the reference that measure what rounding can do.",
)
@click.option(
    "--bisect",
    nargs=2,
    metavar="A B",
    help="Find the first tensor in which layout B differs from layout A, instead of comparing curves.",
)
@click.option(
    "--step", type=click.IntRange(min=1), help="With --bisect: the step to look into.  [default: first unequal]"
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/parity"),
    show_default=True,
    help="Folder for parity.json, parity.png and parity.html.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of finished runs, which are not made again.  [default: ~/.cache/trn_dist/parity]",
)
@click.option(
    "--stall-s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="End a run that makes no step for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of the table.")
def parity(
    recipe: str,
    overrides: tuple[str, ...],
    layouts: str | None,
    steps: int,
    clipping: str,
    members: int,
    bisect: tuple[str, str] | None,
    step: int | None,
    out: Path,
    cache: Path | None,
    stall_s: float,
    as_json: bool,
) -> None:
    """Prove that layouts of RECIPE train the same model, or find out where they differ.

    Every layout starts from the same weights and sees the same global batches in the same order. Its loss and gradient
    norm must be bit-equal where the arithmetic is the same, and within a derived bound where only the order of sums
    differs.

    \b
    trn parity recipes/llama3_debug.toml --layouts "1; ddp=2; fsdp=4; fsdp=2,tp=2; pp=2; cp=2; hsdp=2x2; cpu"
    trn parity recipes/llama3_debug.toml --bisect 1 fsdp=2
    """
    path = find_recipe(recipe)
    if bisect and layouts:
        raise click.UsageError("--bisect names its two layouts itself; leave out --layouts")
    if step and not bisect:
        raise click.UsageError("--step belongs to --bisect")
    try:
        from rich.console import Console

        from trn_dist.parity.comparison import DEFAULT_LAYOUTS, ComparisonFailed, compare
        from trn_dist.parity.layout import LayoutError, parse_layout, parse_layouts
        from trn_dist.parity.report import as_json as comparison_as_json
        from trn_dist.parity.report import print_table, write_report
        from trn_dist.parity.run_queue import RunQueue
        from trn_dist.parity.training import default_cache
        from trn_dist.titan.recipe import RecipeError
    except ImportError as error:
        raise click.ClickException(f"{error}; `trn doctor` shows what is missing") from None
    if not bisect:
        # Before runs that take minutes, not after them.
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise click.ClickException(f"--out {out}: cannot be written")
    queue = RunQueue(cache or default_cache(), stall_s)
    try:
        if bisect:
            from trn_dist.parity.divergence import bisect_layouts, divergence_as_json, print_divergence

            a, b = map(parse_layout, bisect)
            divergence = bisect_layouts(path, a, b, list(overrides), queue=queue, steps=steps, step=step)
            if as_json:
                click.echo(json.dumps(divergence_as_json(divergence), indent=2))
            else:
                print_divergence(divergence, Console())
            sys.exit(0 if divergence.equal else 1)
        modes = {"both": (False, True), "off": (False,), "on": (True,)}[clipping]
        chosen = parse_layouts(DEFAULT_LAYOUTS if layouts is None else layouts)
        comparison = compare(path, chosen, list(overrides), queue=queue, steps=steps, clipping=modes, members=members)
    except (LayoutError, RecipeError) as error:
        for line in str(error).splitlines():
            click.echo(f"trn parity: {line}", err=True)
        sys.exit(2)
    except ComparisonFailed as error:
        raise click.ClickException(str(error)) from None
    files = write_report(comparison, out)
    if as_json:
        click.echo(json.dumps(comparison_as_json(comparison), indent=2))
    else:
        print_table(comparison, Console())
        for file in files:
            click.echo(file)
    sys.exit(0 if comparison.passes else 1)
