"""``trn train``: the command line of :mod:`trn_dist.titan.train`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from trn_dist.cli import EXIT_CODES
from trn_dist.shipped import shipped_folder


def find_recipe(name: str) -> Path:
    """The recipe file of a path, or of the bare name of a recipe that ships with the package.

    Raises:
        click.BadParameter: there is none; lists those that ship.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise click.BadParameter(f"{name!r} is a folder; name a recipe file in it")
    shipped = {recipe.stem: recipe for recipe in sorted(shipped_folder("recipes").glob("*.toml"))}
    # `trn train recipes/llama3_debug.toml` works from an installed package too, where there is no folder recipes/.
    if path.stem in shipped and path.suffix in ("", ".toml") and str(path.parent) in (".", "recipes"):
        return shipped[path.stem]
    raise click.BadParameter(
        f"no recipe file {name!r} (looked in {Path.cwd()}); recipes that ship: {', '.join(shipped)}"
    )


@click.command(
    name="train",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [--SECTION.KEY VALUE]...",
    epilog=EXIT_CODES,
)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option(
    "--run-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for metrics, logs, checkpoints and the resolved recipe.  [default: runs/RECIPE-TIME]",
)
@click.option("--show-rank", type=click.IntRange(min=0), metavar="RANK", help="Also show what this rank prints.")
@click.option("--trace", is_flag=True, help="Write a trace of the predicted times, for https://ui.perfetto.dev.")
def train(recipe: str, overrides: tuple[str, ...], run_dir: Path | None, show_rank: int | None, trace: bool) -> None:
    """Train the model of RECIPE with TorchTitan on simulated Trainium ranks.

    RECIPE is a TorchTitan TOML file, or the name of one that ships with this package; its layout gives the number of
    ranks. Keys of the recipe can be set on the command line, as TorchTitan does it.

    \b
    trn train recipes/llama3_debug.toml
    trn train recipes/llama3_debug.toml --training.steps 50 --parallelism.tensor_parallel_degree 2
    """
    path = find_recipe(recipe)
    try:
        from trn_dist.titan.train import run
    except ImportError as error:
        raise click.ClickException(f"{error}; `trn doctor` shows what is missing") from None
    sys.exit(run(path, list(overrides), run_dir=run_dir, show_rank=show_rank, trace=trace))
