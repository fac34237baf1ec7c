"""``gnnfleet serve`` and its subcommands status, stop and key."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    GroupedOptions,
    OutputFile,
    console_of,
    echo_json,
    examples,
    show,
    with_options,
)
from launcher.run.config_of_options import read_config
from launcher.run.options import LaunchOptions
from launcher.text import say

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from launcher.manage.node_views import OpenRun
    from launcher.report.run_folder import FoundRun

_EPILOG = """Exit status: 0 all servers are up; 1 a server is not; 2 bad usage or config; 3 preflight refused.

\b
Example:
  gnnfleet serve --config serving.yml --name products
  gnnfleet --config train.yml --serving products"""

_CLUSTER = (
    click.argument("name", shell_complete=serving_names),
    click.option(
        "--config",
        "-c",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Cluster file whose hosts to search for the cluster.",
    ),
    RUNS_DIR,
)


class _GroupedOptionsGroup(GroupedOptions, click.Group):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group(
    cls=_GroupedOptionsGroup,
    invoke_without_command=True,
    epilog=_EPILOG,
    short_help="Start graph servers that many runs share.",
)
@click.option("--config", "-c", type=click.Path(path_type=Path), metavar="FILE", help="The cluster.yml.")
@click.option("--name", metavar="NAME", help="Name of the serving cluster; default: `name` in the file.")
@with_options(SET, *HOST_FILTERS, DRY_RUN, JSON, VERBOSE)
@click.pass_context
def serve(ctx: click.Context, dry_run: bool, name: str | None, **values: Any) -> None:
    """Start graph servers that many runs share, on the `server` nodes of the file, else on its workers.

    Several runs can attach by name (--serving NAME) at the same time. Notebooks attach with a key file. A second call
    with the same name starts dead servers again. For other nodes or parts, stop the cluster first.
    """
    if ctx.invoked_subcommand is not None:
        return
    # Options may be given before and after ``serve``.
    before: dict[str, Any] = ctx.obj or {}
    lists = {key: (*(before.get(key) or ()), *values[key]) for key in ("sets", "include", "exclude")}
    given = {key: values[key] or before.get(key) for key in ("config", "as_json", "verbose")}
    runs_dir = (("run.runs_dir", before["runs_dir"]),) if before.get("runs_dir") else ()
    if given["config"] is None:
        raise click.UsageError(
            "give the cluster file: gnnfleet serve --config serving.yml "
            "(`gnnfleet init --template server_client` writes one)",
            ctx,
        )
    options = LaunchOptions(
        config=given["config"],
        overrides=(*lists["sets"], *runs_dir),
        include=lists["include"],
        exclude=lists["exclude"],
        as_json=bool(given["as_json"]),
        verbose=bool(given["verbose"]),
    )
    config = read_config(options)
    name = name if name is not None else config.name
    if dry_run:
        from launcher.config.resolve import resolve_serving
        from launcher.plan.build import offline_plan
        from launcher.run.options import check_run_id

        check_run_id(name, "--name")
        show(offline_plan(resolve_serving(config), name), as_json=options.as_json, verbose=options.verbose)
        return
    console = console_of(options.as_json)
    from launcher.serving.serve import serve as serve_cluster

    served = serve_cluster(config, options, name, console)
    if options.as_json:
        click.echo(json.dumps(served.to_json()))
    name = served.cluster.name
    for text in served.left:
        console.print(f"note: {text}", style="yellow", soft_wrap=True, markup=False)
    up = "is up" if not served.left else "is up, but not as requested (see the notes)"
    lines = [
        f"serving cluster {name} {up}: {served.cluster.words}",
        f"  gnnfleet --config train.yml --serving {name}    train on it",
        f"  gnnfleet serve status {name}    show its load and its clients",
        f'  gnnfleet serve key {name} -o {name}.key    for a notebook: gnnfleet.connect(key="{name}.key")',
        f"  gnnfleet serve stop {name}    stop it",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    ctx.exit(served.exit_status)


@serve.command(cls=GroupedOptions, epilog=examples("serve status products"))
@with_options(*_CLUSTER, JSON)
@click.option("--watch", is_flag=True, help="Update the table every 2 s until Ctrl-C.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, watch: bool, **values: Any) -> None:
    """Show the load and the clients of each graph server.

    Exit status: 0 all servers are up; 1 some are down; 3 no node can be reached.
    """
    from launcher.serving.serve_status import status_of, watch_status

    console = console_of(as_json)
    with _open(values, lambda found: False) as run:
        state = watch_status(run, console) if watch and not as_json else status_of(run)
    if as_json:
        echo_json(state.to_json())
    elif not watch:
        console.print(state.rendered(), soft_wrap=True)
    ctx.exit(state.exit_status)


@serve.command(cls=GroupedOptions, epilog=examples("serve stop products"))
@with_options(*_CLUSTER, JSON, NOW)
@click.pass_context
def stop(ctx: click.Context, as_json: bool, now: bool, **values: Any) -> None:
    """Stop all graph servers and collect their logs.

    Runs that are attached lose their graph servers. Exit status: 0 nothing of the cluster is left; else 1.
    """
    from launcher.manage.stop import end_run
    from launcher.report.verdict import known_without_nodes

    with _open(values, known_without_nodes) as run:
        ended = end_run(run, Path(values["runs_dir"] or "runs"), console_of(as_json), now=now)
    if as_json:
        echo_json(ended.to_json())
    ctx.exit(ended.exit_status)


@serve.command(cls=GroupedOptions, epilog=examples("serve key products -o products.key --for alice"))
@with_options(*_CLUSTER)
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    required=True,
    metavar="FILE",
    help="Key file to write.",
)
@click.option("--for", "person", metavar="WHO", help="Prefix of the key's name; default: your user name.")
@click.pass_context
def key(ctx: click.Context, output: Path, person: str | None, **values: Any) -> None:
    """Write a key file for gnnfleet.connect(key=FILE) in a notebook.

    Anybody with the file can read the graph. To revoke a key, delete its file in the clients/ folder of each server.
    """
    from launcher.serving.client_keys import make_key

    with _open(values, lambda found: False) as run:
        made = make_key(run, output, person)
    for text in made.notes:
        say(f"note: {text}", "yellow")
    say(made.message, stderr=False)


def _open(values: dict[str, Any], offline: Callable[[FoundRun], bool]) -> AbstractContextManager[OpenRun]:
    """Open the serving cluster; connect to its nodes unless ``offline(cluster)`` is true."""
    from launcher.serving.cluster_state import open_named

    return open_named(values["name"], values["config"], values["runs_dir"], offline)
