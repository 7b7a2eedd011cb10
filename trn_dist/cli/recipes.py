"""``trn recipes``: the recipes that ship, or those of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from trn_dist.shipped import shipped_folder


@click.command(
    name="recipes", epilog="Exit codes: 0; 1 when there is no recipe or one cannot be read; 2 wrong arguments."
)
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects: recipe, model, ranks, what.")
@click.option("--model", metavar="NAME", help="Only recipes of this model.")
def recipes(folder: Path | None, model: str | None, as_json: bool) -> None:
    """List recipes: model, ranks, and what each shows.

    FOLDER is searched with its subfolders; without it, the recipes that ship with this package are listed, and
    `trn train` takes them by name.
    """
    from trn_dist.titan.recipe_source import RecipeError, read_source

    root = folder or shipped_folder("recipes")
    rows = []
    for path in sorted(root.rglob("*.toml")):
        try:
            source = read_source(path)
        except RecipeError as error:
            raise click.ClickException(str(error)) from None
        section = source.tree.get("model", {})
        name = str(section.get("name", "llama3"))
        if model in (None, name):
            ranks = source.tree.get("neuron", {}).get("ranks", 8)
            what = next((file.head_comment() for file in source.files if file.head_comment()), "")
            rows.append(
                (path.relative_to(root).as_posix(), f"{name} {section.get('flavor', 'debugmodel')}", ranks, what)
            )
    if not rows:
        raise click.ClickException(f"no recipe{f' of model {model!r}' if model else ''} in {root}")
    if as_json:
        click.echo(
            json.dumps([dict(zip(("recipe", "model", "ranks", "what"), row, strict=True)) for row in rows], indent=2)
        )
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for path_name, of_model, ranks, what in rows:
        sentence = what.split(". ")[0].rstrip(".")
        click.echo(f"{path_name:<{widths[0]}}  {of_model:<{widths[1]}}  {ranks:>4} ranks  {sentence}")
