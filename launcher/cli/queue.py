"""``gnnfleet queue``."""

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
    echo_json,
    examples,
    with_options,
)


@click.command(
    cls=GroupedOptions,
    epilog="Exit status: 0 all hosts have answered; else 1.\n\n" + examples("queue --config cluster.yml"),
    short_help="Show what runs on the hosts, and who waits.",
)
@with_options(CONFIG, SET, *HOST_FILTERS, JSON)
@click.pass_context
def queue(ctx: click.Context, **values: Any) -> None:
    """Show what runs on the hosts of a cluster file, who waits there for what (--wait), and estimates.

    Runs of all users are listed, also those of other cluster files. A run's end is estimated from its epochs so far;
    that of an own command is unknown, as is the start of a run behind another one that waits.
    """
    from launcher.config.resolve import resolve
    from launcher.manage.show_queue import lines_of, show, to_json

    _, cluster = cluster_of(ctx, values)
    lines, as_json = lines_of(resolve(cluster)), bool(values["as_json"] or (ctx.obj or {}).get("as_json"))
    if as_json:
        echo_json(to_json(lines))
    else:
        show(lines, console_of(False))
    ctx.exit(1 if any(line.error for line in lines) else 0)
