"""``gnnfleet completion``, and shell completion of commands, options, runs, hosts and config keys.

The completion functions have the signature of click's ``shell_complete``: context, parameter, and the incomplete word.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

_PROGRAM = "gnnfleet"

_VARIABLE = "_GNNFLEET_COMPLETE"  # environment variable of click's completion protocol, derived from _PROGRAM

_Shell = Literal["bash", "zsh", "fish"]

_EPILOG = """\b
To enable completion in every new shell (gnnfleet must be on the PATH):
  bash  echo 'eval "$(gnnfleet completion bash)"' >> ~/.bashrc
  zsh   echo 'eval "$(gnnfleet completion zsh)"' >> ~/.zshrc  (after compinit)
  fish  gnnfleet completion fish > ~/.config/fish/completions/gnnfleet.fish

\b
Example:
  gnnfleet completion bash"""


@click.command(epilog=_EPILOG, short_help="Print the completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), required=False)
def completion(shell: _Shell | None) -> None:
    """Print a script that makes the shell complete commands, options, run ids, hosts and config keys.

    The default is your login shell ($SHELL).
    """
    from click.shell_completion import get_completion_class

    gnnfleet = click.get_current_context().find_root().command
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    completer = get_completion_class(name) if name in ("bash", "zsh", "fish") else None
    if completer is None:
        raise click.UsageError(f"no completion for shell `{name}`; name a shell: gnnfleet completion bash|zsh|fish")
    source = completer(gnnfleet, {}, _PROGRAM, _VARIABLE).source()
    click.echo(source.replace('string split ","', 'string split --max 1 ","'))  # fish: values may contain commas


_MAX_RUNS = 200  # a limit, as the folder of each run is read

_MAX_HOSTS = 500


def run_ids(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete ids of the runs known on this machine, newest first, with their start times.

    A word that contains ``/`` is completed as a path instead.
    """
    if "/" in typed:
        return [CompletionItem(typed, type="dir")]
    from launcher.report.run_folder import began, known_runs

    given = ctx.params.get(parameter.name or "")
    used = set(given) if isinstance(given, tuple | list) else set()
    with suppress(OSError):
        folders = [each for each in known_runs([Path(_given(ctx, "runs_dir") or "runs")]) if each.name not in used]
        found = [folder for folder in folders if folder.name.startswith(typed)][:_MAX_RUNS]
        times = (time.strftime("%Y-%m-%d %H:%M", time.localtime(began(folder))) for folder in found)
        return [CompletionItem(folder.name, help=text) for folder, text in zip(found, times, strict=True)]
    return []


def runs_or_files(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete the value of ``--resume``: a run id or, if the word contains ``/``, the path of a checkpoint."""
    return run_ids(ctx, parameter, typed) if "/" not in typed else [CompletionItem(typed, type="file")]


def serving_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete names of the serving clusters known on this machine."""
    from launcher.errors import FleetError
    from launcher.report.run_folder import known_runs, read_plan

    found = []
    with suppress(OSError):
        for folder in known_runs([Path(_given(ctx, "runs_dir") or "runs")])[:_MAX_RUNS]:
            with suppress(FleetError, OSError):
                plan = read_plan(folder) if folder.name.startswith(typed) else None
                found += [CompletionItem(folder.name)] if plan is not None and plan.serve_only else []
    return found


def sweep_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete names of the sweeps beside the folder of runs."""
    folder = Path(_given(ctx, "runs_dir") or "runs").expanduser().absolute().parent / "sweeps"
    names = sorted(path.parent.name for path in folder.glob("*/sweep.json"))
    return [CompletionItem(name) for name in names if name.startswith(typed)]


def host_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete a host name from the config given by ``--config``, else from ~/.ssh/config.

    In a comma-separated list, the last host is completed.
    """
    before, comma, begun = typed.rpartition(",")
    config = _given(ctx, "config")
    names: list[str] = []
    if config:
        from launcher.config.loader import load_config
        from launcher.errors import FleetError

        with suppress(FleetError, OSError):
            names = [node.host for node in load_config(Path(config).expanduser(), ("run.files=[]",)).nodes]
    else:
        from launcher.transport.ssh_config import config_lines

        with suppress(OSError):
            for line in config_lines():
                words = line.replace("=", " ", 1).split()
                if words and words[0].lower() == "host":
                    names += [word for word in words[1:] if not set(word) & set("*?!")]
    used = set(before.split(","))
    offered = (name for name in dict.fromkeys(names) if name.startswith(begun) and name not in used)
    return [CompletionItem(f"{before}{comma}{name}") for name, _ in zip(offered, range(_MAX_HOSTS), strict=False)]


def template_names(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete names of ``gnnfleet init --template``, with their descriptions."""
    from launcher.init.templates import templates

    found = templates()
    return [CompletionItem(each.name, help=each.about) for each in found if each.name.startswith(typed)]


def config_keys(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete config keys of ``--set``, as ``train.lr=``, with their help texts."""
    from launcher.config.schema import settings
    from launcher.config.validation import sections

    found = []
    for section, config_class in sections().items():
        prefix = {"": "", "nodes": "nodes.*."}.get(section, f"{section}.")
        found += [(f"{prefix}{each.name}", str(each.metadata["help"])) for each in settings(config_class)]
    keys = [(key, help) for key, help in found if key not in sections()]
    return [CompletionItem(f"{key}=", help=help) for key, help in keys if key.startswith(typed)]


def _given(ctx: click.Context, name: str) -> Any:
    """Return the value of option ``name`` of this command or of a parent command; None if it is not given."""
    context: click.Context | None = ctx
    while context is not None:
        if context.params.get(name):
            return os.fspath(context.params[name])
        context = context.parent
    return None
