"""``trn completion``: the script that completes the command line of ``trn`` in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, recipes and clusters in SHELL.

    \b
    bash:  eval "$(trn completion bash)"             in ~/.bashrc
    zsh:   eval "$(trn completion zsh)"              in ~/.zshrc
    fish:  trn completion fish > ~/.config/fish/completions/trn.fish
    """
    from trn_dist.cli import trn

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(trn, {}, "trn", "_TRN_COMPLETE").source())
