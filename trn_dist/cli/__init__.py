"""The command ``trn``. Each command stands in the file of its name and is imported when it is called.

Nothing here imports torch, so that ``trn --help`` and a mistake in the arguments answer at once.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

import click

from trn_dist import __version__

_COMMANDS = {
    "run": "Run a program on simulated Trainium ranks (in place of torchrun).",
    "train": "Train a model by a TorchTitan recipe.",
    "report": "Show what became of runs, one or several side by side.",
    "recipes": "List the recipes that ship, or those of a folder.",
    "recipe": "Show a recipe resolved, or write a new one.",
    "replay": "Predict a recorded run on another cluster, and say what differs.",
    "parity": "Prove that layouts train the same model, or find where they differ.",
    "bench": "Time collectives, as nccom-test does.",
    "ls": "List the devices of the simulated node, as neuron-ls does.",
    "top": "Show what the ranks of a running run do, live, as neuron-top does.",
    "monitor": "Print the same as JSON lines, as neuron-monitor does.",
    "stacks": "Show where every rank of a running run stands.",
    "flight": "Say which rank is behind, by the flight records of a failed run.",
    "config": "Show each setting with its value and where it comes from.",
    "doctor": "Check this machine and the installation, and say what to do.",
    "completion": "Print the script that completes this command line in a shell.",
}

EXIT_CODES = """\b
Exit codes:
  0      every rank ended with 0
  1      a rank failed (its own code or signal is in the report), the run could not start,
         or a file could not be written
  2      wrong arguments
  128+N  the run was stopped by signal N (130: Ctrl-C)
"""


class _LazyGroup(click.Group):
    """Finds a command in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(importlib.import_module(f"trn_dist.cli.{cmd_name}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno in (None, errno.EPIPE):  # click itself ends quietly when nobody reads the output any more
                raise
            # A full disk, a folder that cannot be written: nothing that a traceback would help with.
            where = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror}") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(__version__, "--version", prog_name="trn_dist")
def trn() -> None:
    """Distributed PyTorch training on a simulated Trainium cluster."""


def main() -> None:
    """Entry point of the console script."""
    sys.exit(trn(prog_name="trn"))
