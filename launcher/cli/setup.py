"""``gnnfleet setup``: makes or repairs the Python environments of the hosts."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.options import (
    CONFIG,
    HOST_FILTERS,
    JSON,
    SET,
    GroupedOptions,
    cluster_of,
    console_of,
    examples,
    program_name,
    with_options,
)

_EPILOG = (
    "Exit status: 0 all hosts complete; 1 an installation failed; 2 bad usage or config; 3 something is left to you."
    "\n\n" + examples("setup --config cluster.yml", "setup --config cluster.yml --dry-run")
)


@click.command(cls=GroupedOptions, epilog=_EPILOG, short_help="Install Python packages on all hosts.")
@with_options(CONFIG, SET, *HOST_FILTERS)
@click.option("--with", "packages", multiple=True, metavar="NAME", help="Install this package, too; repeatable.")
@click.option("--torch", "build", metavar="BUILD", help="Build for hosts with GPUs, as cu126; default: chosen.")
@click.option("--dry-run", is_flag=True, help="Show what would be installed; change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before installing.")
@with_options(JSON)
@click.pass_context
def setup(ctx: click.Context, **values: Any) -> None:
    """Make or repair the Python environment of each host, with the package versions of this machine.

    The environment is the node's `venv` or `conda`. A host needs python3 and sshd only. Wheels are downloaded by the
    host or, where it does not reach the package index, sent from here. A host that is complete is left as it is.
    """
    from launcher.config.resolve import resolve
    from launcher.setup.setup import SetupOptions, set_up

    config, cluster = cluster_of(ctx, values)
    as_json = bool(values["as_json"])
    options = SetupOptions(
        console_of(as_json),
        f"{program_name(ctx)} check --config {config}",
        packages=tuple(values["packages"]),
        build=values["build"],
        dry_run=values["dry_run"],
        ask=not values["yes"],
        as_json=as_json,
    )
    ctx.exit(set_up(resolve(cluster), options))
