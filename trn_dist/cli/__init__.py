"""The command ``trn``. Each command stands in the file of its name and is imported when it is called.

Nothing here imports torch, so that ``trn --help`` and a mistake in the arguments answer at once.
"""

from __future__ import annotations

import importlib
import sys

import click

from trn_dist import __version__

_COMMANDS = {
    "run": "Run a program on simulated Trainium ranks (in place of torchrun).",
    "train": "Train a model by a TorchTitan recipe.",
    "parity": "Prove that layouts train the same model, or find where they differ.",
    "doctor": "Check this machine and the installation, and say what to do.",
}

EXIT_CODES = """\b
Exit codes:
  0      every rank ended with 0
  N      exit code of the first rank that failed
  128+N  a rank was killed by signal N, or the run was stopped by it (130: Ctrl-C)
  1      the run could not start or the launcher failed
  2      wrong arguments
"""


class _LazyGroup(click.Group):
    """Finds a command in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(importlib.import_module(f"trn_dist.cli.{cmd_name}"), cmd_name)

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
