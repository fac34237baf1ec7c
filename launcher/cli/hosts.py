"""``gnnfleet hosts``."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.options import (
    CONFIG,
    HOST_FILTERS,
    SET,
    GroupedOptions,
    cluster_of,
    console_of,
    examples,
    with_options,
)


@click.command(
    cls=GroupedOptions,
    epilog="Exit status: 0 all hosts answered; 1 a host did not.\n\n"
    + examples("hosts --config cluster.yml", "hosts --config cluster.yml --speed"),
    short_help="Show the hosts: what they have, what uses them, what is wrong.",
)
@with_options(CONFIG, SET, *HOST_FILTERS)
@click.option("--speed", is_flag=True, help="Measure and compare the hosts; takes two seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def hosts(ctx: click.Context, speed: bool, as_json: bool, **values: Any) -> None:
    """Show each host of a cluster file: processors, memory, GPUs, disk, the runs that use it, and faults.

    Nothing is started or sent.
    """
    from launcher.config.resolve import resolve
    from launcher.manage.hosts import show_hosts

    _, cluster = cluster_of(ctx, values)
    ctx.exit(show_hosts(resolve(cluster), console_of(as_json), speed=speed, as_json=as_json))
