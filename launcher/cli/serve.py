"""``gnnfleet serve`` and its commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import serving_names
from launcher.cli.options import (
    DRY_RUN,
    HOST_FILTERS,
    JSON,
    NOW,
    RUNS_DIR,
    SET,
    VERBOSE,
    console_of,
    echo_json,
    examples,
    show,
    with_options,
)
from launcher.errors import ConfigError
from launcher.report.run_folder import known_here
from launcher.run.options import LaunchOptions, read_config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from launcher.config.schema import ClusterConfig
    from launcher.manage.node_views import OpenRun
    from launcher.report.run_folder import FoundRun
    from launcher.serving.serve import Served

_EPILOG = """\b
Example:
  gnnfleet serve --config serving.yml --name products
  gnnfleet --config train.yml --serving products
  gnnfleet serve status products

With the same name again: what is dead or new in the file is started, what was taken out is stopped, the rest
goes on. Exit status: 0 all servers are up, 1 one is not, 2 bad usage or config, 3 preflight refused."""

_ABOUT_ONE = (
    click.argument("name", shell_complete=serving_names),
    click.option(
        "--config",
        "-c",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Cluster file of one that was started on another machine: it is looked for on these hosts.",
    ),
    RUNS_DIR,
)


@click.group(invoke_without_command=True, epilog=_EPILOG, short_help="Keep graph servers up for many runs.")
@click.option("--config", "-c", type=click.Path(path_type=Path), metavar="FILE", help="The cluster file.")
@click.option("--name", metavar="NAME", help="Name of the serving cluster; default: the file's `name`.")
@with_options(SET, *HOST_FILTERS, DRY_RUN, JSON, VERBOSE)
@click.pass_context
def serve(ctx: click.Context, dry_run: bool, name: str | None, **values: Any) -> None:
    """Start graph servers that outlive runs, on the file's `server` nodes (or its workers).

    Runs attach to them by name (--serving NAME, or data.serving), several at once, and notebooks by a key file.
    """
    if ctx.invoked_subcommand is not None:
        return
    options = _options(ctx, values)
    config = _read(options, name)
    name = name if name is not None else config.name
    if dry_run:
        return _show_plan(config, options, name)
    console = console_of(options.as_json)
    from launcher.serving.serve import serve as serve_cluster

    served = serve_cluster(config, options, name, console)
    if options.as_json:
        click.echo(json.dumps(served.to_json()))
    _tell(served, console)
    ctx.exit(served.exit_status)


def _options(ctx: click.Context, values: dict[str, Any]) -> LaunchOptions:
    """Options before ``serve`` count too."""
    before: dict[str, Any] = ctx.obj or {}
    lists = {key: (*(before.get(key) or ()), *values[key]) for key in ("sets", "include", "exclude")}
    given = {key: values[key] or before.get(key) for key in ("config", "as_json", "verbose")}
    runs_dir = (f"run.runs_dir={before['runs_dir']}",) if before.get("runs_dir") else ()
    if given["config"] is None:
        raise click.UsageError(
            "give the cluster file: gnnfleet serve --config serving.yml (templates/server_client.yml is a start)", ctx
        )
    return LaunchOptions(
        config=given["config"],
        overrides=(*lists["sets"], *runs_dir),
        include=lists["include"],
        exclude=lists["exclude"],
        as_json=bool(given["as_json"]),
        verbose=bool(given["verbose"]),
    )


def _read(options: LaunchOptions, name: str | None) -> ClusterConfig:
    """The config. A cluster that stands has its parts: nodes beyond their number are none too many for it."""
    try:
        return read_config(options)
    except ConfigError:
        config = _without_num_parts(options)
        if config is None or known_here(name or config.name, [Path(config.run.runs_dir).expanduser()]) is None:
            raise
        return config


def _without_num_parts(options: LaunchOptions) -> ClusterConfig | None:
    """The config but for data.num_parts; None where more is wrong with it."""
    try:
        return read_config(replace(options, overrides=(*options.overrides, "data.num_parts=null")))
    except ConfigError:
        return None


def _show_plan(config: ClusterConfig, options: LaunchOptions, name: str) -> None:
    """What would be started, were nothing of that name there; opens no connection."""
    from launcher.config.resolve import resolve_serving
    from launcher.plan.build import offline_plan
    from launcher.run.options import check_run_id

    check_run_id(name, "--name")
    show(offline_plan(resolve_serving(config), name), as_json=options.as_json, verbose=options.verbose)


def _tell(served: Served, console: Console) -> None:
    """That it is up, and what can be done with it."""
    name = served.cluster.name
    for text in served.left:
        console.print(f"note: {text}", style="yellow", soft_wrap=True, markup=False)
    up = "is up" if not served.left else "is up, but not all as wanted"
    lines = [
        f"serving cluster {name} {up}: {served.cluster.words}",
        f"  gnnfleet --config train.yml --serving {name}    train on it",
        f"  gnnfleet serve status {name}    its load and its clients",
        f'  gnnfleet serve key {name} -o {name}.key    for a notebook: gnnfleet.connect(key="{name}.key")',
        f"  gnnfleet serve stop {name}    end it",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


@serve.command(epilog=examples("serve status products", "serve status products --json"))
@with_options(*_ABOUT_ONE, JSON)
@click.option("--watch", is_flag=True, help="Show it again every 2 s, until Ctrl-C.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, watch: bool, **values: Any) -> None:
    """Load of each graph server, and who its clients are.

    Exit status: 0 all serve, 1 some are down, 3 no node can be reached.
    """
    from launcher.serving.serve_status import status_of, watch_status

    console = console_of(as_json)
    with _open(values, lambda found: False) as run:
        told = watch_status(run, console) if watch and not as_json else status_of(run)
    if as_json:
        echo_json(told.to_json())
    elif not watch:
        console.print(told.rendered(), soft_wrap=True)
    ctx.exit(told.exit_status)


@serve.command(epilog=examples("serve stop products"))
@with_options(*_ABOUT_ONE, JSON, NOW)
@click.pass_context
def stop(ctx: click.Context, as_json: bool, now: bool, **values: Any) -> None:
    """Stop all graph servers, then collect their logs; runs that are attached lose them.

    Exit status 0 when nothing of the cluster is left, else 1.
    """
    from launcher.manage.stop import end_run
    from launcher.report.verdict import known_without_nodes

    with _open(values, known_without_nodes) as run:
        ended = end_run(run, Path(values["runs_dir"] or "runs"), console_of(as_json), now=now)
    if as_json:
        echo_json(ended.to_json())
    ctx.exit(ended.exit_status)


@serve.command(epilog=examples("serve key products -o products.key", "serve key products -o products.key --for alice"))
@with_options(*_ABOUT_ONE)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE", help="Key file."
)
@click.option("--for", "person", metavar="WHO", help="Begins the key's name on the servers; default: who you are.")
@click.pass_context
def key(ctx: click.Context, output: Path, person: str | None, **values: Any) -> None:
    """Make a key file with which a notebook reads the graph: gnnfleet.connect(key=FILE).

    Whoever has the file may read the graph. To take a key back, delete its file in the servers' clients/ folder.
    """
    from launcher.serving.client_keys import make_key

    with _open(values, lambda found: False) as run:
        made = make_key(run, output, person)
    for text in made.notes:
        click.secho(f"note: {text}", fg="yellow", err=True)
    click.echo(made.told)


def _open(values: dict[str, Any], offline: Callable[[FoundRun], bool]) -> AbstractContextManager[OpenRun]:
    """The serving cluster with lines to its nodes."""
    from launcher.serving.cluster_state import open_named

    return open_named(values["name"], values["config"], values["runs_dir"], offline)
