"""Options that several commands share, and the layout of their help: one line per option, under headings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launcher.cli.completion import config_keys, host_names, run_ids
from launcher.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.schema import ClusterConfig
    from launcher.plan.model import LaunchPlan

F = TypeVar("F", bound=Callable[..., Any])

#: Heading in the help of a command → parameter names of its options. Options without an entry go to _LAST_HEADING.
_HEADINGS = {
    "Config": ("config", "sets"),
    "Rehearsal": ("fault", "vertices", "folder"),
    "Hosts": ("more_hosts", "nodes", "include", "exclude", "nodes_needed", "group", "venv", "conda", "python"),
    "Sweep": ("nodes_per_run", "trials", "search", "pruner", "metric", "goal", "seed", "resumed"),
    "Packages": ("packages", "build"),
    "SSH login": ("user", "key", "password", "host_keys"),
    "Graph and training": (
        *("dataset", "source", "shared", "serving"),
        *("epochs", "batch_size", "num_neighbors", "num_training_procs", "resume"),
    ),
    "Run": (
        *("name", "run_id", "runs_dir", "master_addr", "master_port", "slurm"),
        *("wait", "detach", "on_interrupt", "dry_run"),
    ),
    "Lines to show": ("node", "rank", "since", "last", "every"),
}

_LAST_HEADING = "Output"

_MAX_UNGROUPED = 8  #: maximum number of options for a help without headings

_MAX_COLUMN = 30  #: maximum width of an option with its value; the help of a wider one begins on the next line


class OutputFile(click.Path):
    """A file to write. ``-`` means stdout (None) where that is the default, and is refused elsewhere."""

    def __init__(self, *, or_stdout: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self.or_stdout = or_stdout

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) != "-":
            return super().convert(value, param, ctx)
        if not self.or_stdout:
            self.fail("this command does not write to stdout; name a file (./- for one called -)", param, ctx)
        return None


class GroupedOptions(click.Command):
    """A command whose help groups its options under headings if it has more than ``_MAX_UNGROUPED`` of them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [(param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        options = [(param.name or "", *record) for param, record in records if isinstance(param, click.Option)]
        column = min(_MAX_COLUMN, max(len(option) for _, option, _ in options))
        sections: dict[str, list[tuple[str, str]]] = {}
        finds_run = any(param.name == "run" for param in self.params)  # the file of --config only serves for that
        for name, option, text in options:
            heading = next((heading for heading, names in _HEADINGS.items() if name in names), _LAST_HEADING)
            if name == "config" and finds_run:
                heading = "Run"
            if len(options) <= _MAX_UNGROUPED:
                heading = "Options"
            sections.setdefault(heading, []).append((option.ljust(column), text))
        for heading in sorted(sections, key=[*_HEADINGS, _LAST_HEADING, "Options"].index):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


CONFIG = click.option("--config", "-c", type=click.Path(path_type=Path), metavar="FILE", help="The cluster.yml.")

SET = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=config_keys,
    help="Set a config key, as train.lr=0.01; repeatable.",
)

HOST_FILTERS = (
    click.option(
        "--include",
        multiple=True,
        metavar="HOSTS",
        shell_complete=host_names,
        help="Use only these: gpu*, node[03-05], node04:0,2.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="HOSTS",
        shell_complete=host_names,
        help="Leave these out; same forms as --include.",
    ),
)

JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, all else to stderr.")

VERBOSE = click.option("--verbose", "-v", is_flag=True, help="Show each node with its commands in a plan.")

DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the plan without connecting to a host.")

DETACH = click.option("--detach", is_flag=True, help="Return after the first step; the run continues.")

WAIT = click.option(
    "--wait",
    is_flag=False,
    flag_value="0",
    metavar="[LIMIT]",
    help="Wait in line for hosts in use; limit: 30m, 2h.",
)

NOW = click.option("--now", is_flag=True, help="Kill at once instead of after run.grace seconds.")

LIVE = (
    click.option(
        "--on-interrupt",
        type=click.Choice(["ask", "stop", "detach"]),
        metavar="ACTION",
        help="First Ctrl-C: ask (default), stop or detach.",
    ),
    click.option("--plain", is_flag=True, help="Print prefixed lines instead of the live view."),
)

RUNS_DIR = click.option("--runs-dir", metavar="DIR", help="Local folder of runs; default: runs.")

#: Argument and options that select the run of a command.
RUN = (
    click.argument("run", required=False, shell_complete=run_ids),
    click.option(
        "--config",
        "-c",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Cluster file whose hosts to search for the run.",
    ),
    RUNS_DIR,
)


def with_options(*given: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command, in the given order."""

    def decorate(command: F) -> F:
        for option in reversed(given):
            command = option(command)
        return command

    return decorate


def examples(*lines: str) -> str:
    """Return a section with examples for the end of a help text; ``gnnfleet`` is put before each of ``lines``."""
    return "\n".join(["\b", "Example:", *(f"  gnnfleet {line}" for line in lines)])


def console_of(as_json: bool) -> Console:
    """Return the console for human-readable output: stderr if stdout is for JSON."""
    from launcher.text import console_for

    return console_for(stderr=as_json)


def cluster_of(ctx: click.Context, values: Mapping[str, Any]) -> tuple[Path, ClusterConfig]:
    """Return the cluster file of ``CONFIG``, given before or after the subcommand, and its content.

    ``SET`` and ``HOST_FILTERS`` of both places are applied. Raises UsageError without a file, and ConfigError.
    """
    from launcher.run.config_of_options import read_config
    from launcher.run.options import LaunchOptions

    before: dict[str, Any] = ctx.obj or {}
    config: Path | None = values["config"] or before.get("config")
    if config is None:
        raise UsageError("give the cluster file: --config cluster.yml")
    sets, include, exclude = ((*(before.get(name) or ()), *values[name]) for name in ("sets", "include", "exclude"))
    return config, read_config(LaunchOptions(config, sets, include, exclude))


def echo_json(values: Any) -> None:
    click.echo(json.dumps(values, indent=1))


def show(plan: LaunchPlan, *, as_json: bool, verbose: bool) -> None:
    """Print a plan as text or JSON; ``verbose`` lists each node with its commands."""
    from launcher.plan.render import print_plan
    from launcher.plan.serialize import to_json

    if as_json:
        click.echo(to_json(plan))
    else:
        print_plan(plan, console_of(False), every=verbose)


def program_name(ctx: click.Context) -> str:
    """Return the command that started this program, ``gnnfleet`` or ``python launch.py``."""
    name = ctx.find_root().info_name or "gnnfleet"
    return "python launch.py" if name.endswith("launch.py") else "gnnfleet"
