"""Options that several commands share: ``--set``, ``--include``, ``--exclude``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.cli.completion import config_keys, host_names, run_ids

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.plan.model import LaunchPlan

F = TypeVar("F", bound=Callable[..., Any])

CONFIG = click.option("--config", "-c", type=click.Path(path_type=Path), metavar="FILE", help="The cluster.yml.")

SET = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=config_keys,
    help="Change any config key, dotted; repeatable.",
)

HOST_FILTERS = (
    click.option(
        "--include",
        multiple=True,
        metavar="HOSTS",
        shell_complete=host_names,
        help="Only these: node03, gpu*, node[03-05], node04:0,2; repeatable.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="HOSTS",
        shell_complete=host_names,
        help="All but these; written alike, repeatable.",
    ),
)

JSON = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, all else on stderr.")

VERBOSE = click.option("--verbose", "-v", is_flag=True, help="A plan has every node by itself, with its commands.")

DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the plan; connect to nothing.")

DETACH = click.option("--detach", is_flag=True, help="Return once the first step has trained; the run goes on.")

NOW = click.option("--now", is_flag=True, help="Kill at once, without the grace to end by themselves (run.grace).")

LIVE = (
    click.option(
        "--on-interrupt",
        type=click.Choice(["ask", "stop", "detach"]),
        help="What the first Ctrl-C does; default: ask (run.on_interrupt).",
    ),
    click.option("--plain", is_flag=True, help="Prefixed lines instead of the live view."),
)

RUNS_DIR = click.option("--runs-dir", metavar="DIR", help="Folder on this machine for logs and results; default: runs.")

#: Which run a command is about.
RUN = (
    click.argument("run", required=False, shell_complete=run_ids),
    click.option(
        "--config",
        "-c",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Cluster file of a run that was launched on another machine: it is looked for on these hosts.",
    ),
    RUNS_DIR,
)


def with_options(*given: Callable[[F], F]) -> Callable[[F], F]:
    """Decorates a command with options, which its help shows in this order."""

    def decorate(command: F) -> F:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


def examples(*lines: str) -> str:
    """An epilog; each line is what follows ``gnnfleet``."""
    return "\n".join(["\b", "Example:", *(f"  gnnfleet {line}" for line in lines)])


def console_of(as_json: bool) -> Console:
    """Where a command prints what is for people."""
    from launcher.text import console_for

    return console_for(stderr=as_json)


def echo_json(values: Any) -> None:
    """Print a command's result on stdout."""
    click.echo(json.dumps(values, indent=1))


def show(plan: LaunchPlan, *, as_json: bool, verbose: bool) -> None:
    """Print a plan."""
    from launcher.plan.render import print_plan
    from launcher.plan.serialize import to_json

    if as_json:
        click.echo(to_json(plan))
    else:
        print_plan(plan, console_of(False), every=verbose)
