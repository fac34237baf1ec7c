"""``gnnfleet completion``: shell completion of commands, options, runs, hosts and config keys.

Each takes what click gives its ``shell_complete``: context, parameter, and what has been typed of the word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

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


_MOST = 200  # runs; each is looked into

_HOSTS_LISTED = 500


def run_ids(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Ids of the runs known here, the newest first, with when they began; paths where one is being typed."""
    if "/" in typed:
        return [CompletionItem(typed, type="dir")]
    from launcher.report.run_folder import began, known_runs

    given = ctx.params.get(parameter.name or "")
    taken = set(given) if isinstance(given, tuple | list) else set()
    with suppress(OSError):
        folders = [each for each in known_runs([Path(_given(ctx, "runs_dir") or "runs")]) if each.name not in taken]
        found = [folder for folder in folders if folder.name.startswith(typed)][:_MOST]
        return [CompletionItem(folder.name, help=_when(began(folder))) for folder in found]
    return []


def runs_or_files(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Of ``--resume``: a run, else a checkpoint."""
    return run_ids(ctx, parameter, typed) if "/" not in typed else [CompletionItem(typed, type="file")]


def serving_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of the serving clusters known here."""
    from launcher.errors import FleetError
    from launcher.report.run_folder import known_runs, read_plan

    found = []
    with suppress(OSError):
        for folder in known_runs([Path(_given(ctx, "runs_dir") or "runs")])[:_MOST]:
            with suppress(FleetError, OSError):
                plan = read_plan(folder) if folder.name.startswith(typed) else None
                found += [CompletionItem(folder.name)] if plan is not None and plan.serve_only else []
    return found


def host_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Hosts of the config given before, else those that ~/.ssh/config names; the last of several after commas."""
    before, comma, begun = typed.rpartition(",")
    config = _given(ctx, "config")
    names = _hosts_of(Path(config)) if config else _hosts_of_ssh()
    taken = set(before.split(","))
    offered = (name for name in dict.fromkeys(names) if name.startswith(begun) and name not in taken)
    return [CompletionItem(f"{before}{comma}{name}") for name, _ in zip(offered, range(_HOSTS_LISTED), strict=False)]


def template_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Of ``gnnfleet init``, with what they are for."""
    from launcher.init.templates import templates

    found = templates()
    return [CompletionItem(each.name, help=each.about) for each in found if each.name.startswith(typed)]


def config_keys(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """``train.lr=`` and the like, with what they mean."""
    from launcher.config.validation import sections

    found = []
    for section, made in sections().items():
        above = {"": "", "nodes": "nodes.*."}.get(section, f"{section}.")
        found += [(f"{above}{each.name}", str(each.metadata["help"])) for each in fields(made)]
    keys = [(key, help) for key, help in found if key not in sections()]
    return [CompletionItem(f"{key}=", help=help) for key, help in keys if key.startswith(typed)]


def _hosts_of(config: Path) -> Iterable[str]:
    from launcher.config.loader import load_config
    from launcher.errors import FleetError

    with suppress(FleetError, OSError):
        return [node.host for node in load_config(config.expanduser(), ("run.files=[]",)).nodes]
    return []


def _hosts_of_ssh() -> Iterator[str]:
    from launcher.transport.ssh_config import config_lines

    with suppress(OSError):
        for line in config_lines():
            words = line.replace("=", " ", 1).split()
            if words and words[0].lower() == "host":
                yield from (word for word in words[1:] if not set(word) & set("*?!"))


def _given(ctx: click.Context, name: str) -> Any:
    """An option as given to this command or one before it; click keeps those of groups in the contexts above."""
    above: click.Context | None = ctx
    while above is not None:
        if above.params.get(name):
            return os.fspath(above.params[name])
        above = above.parent
    return None


def _when(began: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
