"""``trn config``: every setting with its value and where that comes from."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys

import click

from trn_dist.cli.train import complete_recipe, find_recipe
from trn_dist.hardware.environment import DEFAULT_CLUSTER

_OF_THIS_PACKAGE = "TRN_"
# Read where the package talks to itself; not settings.
_INTERNAL = ("TRN_OBSERVE", "TRN_PARITY_")


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable that this package or its peers read."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("TRN_CLUSTER", DEFAULT_CLUSTER, "cluster to simulate: a shipped name or a path ending in .toml"),
    Variable("TRN_CPU_RNG", "0", "1: draw random numbers from PyTorch's CPU generator"),
    Variable("TRN_EXACT_SUMS", "0", "1: sums over ranks without error, rounded once"),
    Variable("TRN_CHECK_REPLICAS", "", "N: compare replicas after every N optimizer steps"),
    Variable("TRN_SANITIZE", "0", "1: raise where streams race; warn: only say so"),
    Variable("TRN_STRICT", "0", "1: refuse what the real stack refuses"),
    Variable("TRN_TRACE", "", "folder that every rank writes a Perfetto trace to"),
    Variable("TRN_FAULTS", "", "faults on demand, between semicolons, such as rank=3,step=5,kill"),
    Variable("TRN_RECORD", "", "folder that every rank records its program to, for `trn replay`"),
    Variable("TRN_TIMING_ONLY", "0", "1: virtual time alone, nothing is computed"),
    Variable("TRN_HOST_ID", "", "ranks with the same value are one host"),
    Variable("TRN_FAULT_REPEATS", "", "how often the fault tests repeat each fault"),
    Variable("NEURON_LOGICAL_NC_CONFIG", "", "physical cores of a logical one, 1 or 2; empty: as the chip has it"),
    Variable("NEURON_RT_VIRTUAL_CORE_SIZE", "", "the same, where the former is not set"),
    Variable("NEURON_RT_VISIBLE_CORES", "", "cores that this job claims, such as 0-7; empty: all, without a claim"),
    Variable("NEURON_RT_NUM_CORES", "0", "number of cores that are visible, 0 for all"),
    Variable("NEURON_PROCESS_TAG", "", "what `trn monitor` calls this job's ranks"),
    Variable("OMP_NUM_THREADS", "1", "threads of an operator; results depend on it"),
    Variable("TORCH_DEVICE_BACKEND_AUTOLOAD", "1", "0: import torch without the device"),
    Variable("TORCH_FR_BUFFER_SIZE", "2000", "calls that the flight recorder keeps"),
    Variable("TORCH_FR_DUMP_TEMP_FILE", "", "prefix of the files that it writes when a group fails"),
)


def unknown_variables() -> list[str]:
    """A sentence for each ``TRN_`` variable of the environment that nobody reads."""
    known = [variable.name for variable in VARIABLES]
    problems = []
    for name in sorted(os.environ):
        if name.startswith(_OF_THIS_PACKAGE) and name not in known and not name.startswith(_INTERNAL):
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(f"environment: {name}: no such variable" + (f", did you mean {near[0]}?" if near else ""))
    return problems


def variables() -> list[dict[str, str]]:
    """Every variable with its value and where that comes from."""
    rows = []
    for variable in VARIABLES:
        value = os.environ.get(variable.name, "")
        rows.append(
            {
                "key": variable.name,
                "value": value or variable.default,
                "origin": "environment" if value else "default",
                "meaning": variable.meaning,
            }
        )
    return rows


@click.command(
    name="config",
    context_settings={"ignore_unknown_options": True},
    options_metavar="[OPTIONS] [--SECTION.KEY VALUE]...",
    epilog="Exit codes: 0; 2 when a key or a variable is unknown, or a value is wrong.",
)
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.option("--all", "defaults", is_flag=True, help="Also the keys of the recipe that have their default.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects: key, value, origin.")
def config(recipe: str | None, overrides: tuple[str, ...], defaults: bool, as_json: bool) -> None:
    """Show each setting with its value and where that comes from.

    Without RECIPE the environment variables. With it the recipe's keys too, as `trn train` would take them: the command
    line over the recipe, that over what it extends, that over the defaults. Unknown keys and variables are refused.
    """
    problems = unknown_variables()
    if recipe and recipe.startswith("-"):
        raise click.UsageError(f"name the recipe before {recipe}")
    rows = variables()
    if recipe is not None:
        path = find_recipe(recipe)
        from trn_dist.titan.recipe import RecipeError, resolve, settings

        try:
            rows += settings(resolve(path, list(overrides)), defaults)
        except RecipeError as error:
            problems += error.problems
    if problems:
        for problem in problems:
            click.echo(f"trn config: {problem}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    keys, values = (min(50, max(len(row[column]) for row in rows)) for column in ("key", "value"))
    for row in rows:
        meaning = f"  ({row['meaning']})" if "meaning" in row else ""
        click.echo(f"{row['key']:<{keys}}  {row['value']:<{values}}  {row['origin']}{meaning}")
