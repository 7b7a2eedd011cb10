"""``trn recipe show`` and ``trn recipe new``: one recipe resolved, and a new one written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from trn_dist.cli.train import find_recipe


@click.group(name="recipe")
def recipe() -> None:
    """Show or write one recipe."""


def _refuse(problems: list[str]) -> NoReturn:
    for problem in problems:
        click.echo(f"trn recipe: {problem}", err=True)
    sys.exit(2)


@recipe.command(name="show", context_settings={"ignore_unknown_options": True})
@click.argument("file")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--SECTION.KEY VALUE]...")
@click.option("--all", "defaults", is_flag=True, help="Also the keys that have their default.")
def show(file: str, overrides: tuple[str, ...], defaults: bool) -> None:
    """Print the recipe FILE as it is trained: what it extends and the command line laid over each other.

    Behind each value stands the file and line that it comes from. The output is a recipe itself, which plain
    `torchrun -m torchtitan.train --job.config_file` reads too.
    """
    path = find_recipe(file)
    from trn_dist.titan.recipe import RecipeError, resolve, to_annotated_toml

    try:
        click.echo(to_annotated_toml(resolve(path, list(overrides)), defaults), nl=False)
    except RecipeError as error:
        _refuse(error.problems)


@recipe.command(name="new")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", metavar="NAME", help="TorchTitan's model, such as llama3.  [default: llama3]")
@click.option("--flavor", metavar="NAME", help="Its size.  [default: debugmodel]")
@click.option("--layout", metavar="LIST", help="As in `trn parity`: fsdp=4,tp=2 or pp=2,fsdp=4.  [default: fsdp=8]")
@click.option("--global-batch", type=click.IntRange(min=1), help="Samples a step.  [default: 8]")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens a sample.  [default: 256]")
@click.option("--steps", type=click.IntRange(min=1), help="Steps to train.  [default: 20]")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), help="Learning rate.  [default: 0.003]")
@click.option("--text", metavar="PATH", help="A .txt, .jsonl or .parquet file, a folder, or python_stdlib (default).")
def new(file: Path, **answers: Any) -> None:
    """Write a recipe to FILE. What is not given by an option is asked for on a terminal, else has its default."""
    from trn_dist.parity.layout import LayoutError, parse_layout
    from trn_dist.titan.recipe import RecipeError
    from trn_dist.titan.recipe_template import DEFAULTS, TextPathError, text_settings, write_recipe

    if file.exists():
        _refuse([f"{file} exists; name another file"])
    if file.suffix != ".toml":
        _refuse([f"{file}: a recipe's name ends in .toml"])
    for name, (question, default) in DEFAULTS.items():
        if answers[name] is None:
            answers[name] = click.prompt(question, default=default) if sys.stdin.isatty() else default
    try:
        layout = parse_layout(answers["layout"])
        if layout.on_cpu:
            raise LayoutError(f"layout {layout.text!r}: a recipe trains on the device; leave out cpu and gloo")
        overrides = layout.recipe_overrides(answers["global_batch"])
        recipe = write_recipe(
            file,
            model=answers["model"],
            flavor=answers["flavor"],
            text=text_settings(answers["text"]),
            seq_len=answers["seq_len"],
            steps=answers["steps"],
            lr=answers["lr"],
            layout=overrides,
        )
    except (LayoutError, TextPathError) as error:
        _refuse([str(error)])
    except RecipeError as error:
        _refuse(error.problems)
    click.echo(
        f"{file}: {recipe.config.model.name} {recipe.config.model.flavor} on {recipe.ranks} ranks, {recipe.layout}"
    )
    click.echo(f"trn train {file}")
