"""``trn train``: the command line of :mod:`trn_dist.titan.train`."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from trn_dist.cli import EXIT_CODES
from trn_dist.cli.run import fault_option
from trn_dist.faults import Fault
from trn_dist.shipped import shipped_folder


def find_recipe(name: str) -> Path:
    """The recipe file of a path, or of the bare name of a recipe that ships with the package.

    Raises:
        click.BadParameter: there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise click.BadParameter(f"{name!r} is a folder; name a recipe file in it")
    root = shipped_folder("recipes")
    shipped = {recipe.relative_to(root).with_suffix("").as_posix(): recipe for recipe in sorted(root.rglob("*.toml"))}
    # `trn train recipes/llama3_debug.toml` works from an installed package too, where there is no folder recipes/.
    wanted = path.relative_to("recipes") if path.parts[:1] == ("recipes",) else path
    if wanted.suffix in ("", ".toml") and wanted.with_suffix("").as_posix() in shipped:
        return shipped[wanted.with_suffix("").as_posix()]
    near = difflib.get_close_matches(wanted.with_suffix("").as_posix(), shipped, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise click.BadParameter(f"no recipe file {name!r} (looked in {Path.cwd()}){hint}; `trn recipes` lists what ships")


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of shipped recipes that begin so, and files."""
    root = shipped_folder("recipes")
    names = sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.toml"))
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


@click.command(
    name="train",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [--SECTION.KEY VALUE]...",
    epilog=EXIT_CODES,
)
@click.argument("recipe", shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for metrics, logs, checkpoints and the resolved recipe.  [default: runs/RECIPE-TIME]",
)
@click.option("--show-rank", type=click.IntRange(min=0), metavar="RANK", help="Also show what this rank prints.")
@click.option("--trace", is_flag=True, help="Write a trace of the predicted times, for https://ui.perfetto.dev.")
@click.option("--record", is_flag=True, help="Record what the ranks launch, for `trn replay` on other clusters.")
@click.option(
    "--timing-only",
    is_flag=True,
    help="Compute no numbers: one process stands for all ranks of a pipeline stage and predicts memory and time.",
)
@fault_option(help="Have something go wrong, as in `trn run`; in a recipe: faults = [...] in [neuron].")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and all else on stderr.")
def train(
    recipe: str,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    show_rank: int | None,
    trace: bool,
    record: bool,
    timing_only: bool,
    faults: tuple[Fault, ...],
    as_json: bool,
) -> None:
    """Train the model of RECIPE with TorchTitan on simulated Trainium ranks.

    RECIPE is a TorchTitan TOML file, or the name of one that ships with this package; its layout gives the number of
    ranks. Keys of the recipe can be set on the command line, as TorchTitan does it.

    \b
    trn train recipes/llama3_debug.toml
    trn train recipes/llama3_debug.toml --training.steps 50 --parallelism.tensor_parallel_degree 2
    trn train recipes/llama3/8b_fsdp64.toml --timing-only --training.steps 2
    """
    path = find_recipe(recipe)
    if as_json and show_rank is not None:
        raise click.UsageError("--show-rank has a rank print where --json prints the result; leave one out")
    try:
        from trn_dist.titan.train import run
    except ImportError as error:
        raise click.ClickException(f"{error}; `trn doctor` shows what is missing") from None
    sys.exit(
        run(
            path,
            list(overrides),
            run_dir=run_dir,
            show_rank=show_rank,
            trace=trace,
            record=record,
            timing_only=timing_only,
            faults=faults,
            as_json=as_json,
        )
    )
