"""``gnnfleet completion``: what makes the shell complete commands, options, runs, hosts and config keys."""

from __future__ import annotations

import os
from typing import Literal

import click

PROGRAM = "gnnfleet"

VARIABLE = "_GNNFLEET_COMPLETE"  # by which the shell asks the program, as click makes it of the name

Shell = Literal["bash", "zsh", "fish"]

_EPILOG = """\b
Example:
  gnnfleet completion bash

\b
To have it in every new shell (gnnfleet must be on the PATH):
  bash  echo 'eval "$(gnnfleet completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(gnnfleet completion zsh)"' >> ~/.zshrc    (after compinit)
  fish  gnnfleet completion fish > ~/.config/fish/completions/gnnfleet.fish"""


@click.command(epilog=_EPILOG, short_help="Print what makes bash, zsh or fish complete.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), required=False)
def completion(shell: Shell | None) -> None:
    """Print the code by which SHELL completes commands, options, run ids, hosts and config keys.

    Without SHELL: for the one that you log in with.
    """
    from click.shell_completion import get_completion_class

    gnnfleet = click.get_current_context().find_root().command
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    made = get_completion_class(name) if name in ("bash", "zsh", "fish") else None
    if made is None:
        raise click.UsageError(f"`{name}` cannot be completed for; name one: gnnfleet completion bash|zsh|fish")
    source = made(gnnfleet, {}, PROGRAM, VARIABLE).source()
    click.echo(source.replace('string split ","', 'string split --max 1 ","'))  # in fish: a value may have commas
