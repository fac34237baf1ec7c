"""``gnnfleet hosts``, ``queue`` and ``clean``: commands on the hosts of a cluster file."""

from __future__ import annotations

import sys
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
from launcher.errors import UsageError


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


_KINDS = ("runs", "code", "parts", "kernels")


@click.command(
    cls=GroupedOptions,
    epilog="Exit status: 0 done; 1 a host or folder failed.\n\n"
    + examples("clean --config cluster.yml --dry-run", "clean runs --config cluster.yml --older-than 30d --keep 3"),
    short_help="Delete old runs, code and parts on the hosts.",
)
@click.argument("kinds", nargs=-1, type=click.Choice(_KINDS), metavar="[runs|code|parts|kernels]...")
@with_options(CONFIG, SET, *HOST_FILTERS)
@click.option("--older-than", default="7d", metavar="7d", show_default=True, help="Only what no run used since then.")
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Keep the newest N of each kind per host.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted; change nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before deleting.")
@click.pass_context
def clean(ctx: click.Context, kinds: tuple[str, ...], **values: Any) -> None:
    """Delete what old runs left on the hosts: run folders, code, parts and compiled kernels.

    Shows what it would free and asks. What a run uses that is alive stays, as do folders that gnnfleet did not make.
    The files that were collected on this machine stay, too.
    """
    from launcher.config.resolve import resolve
    from launcher.manage.clean import KINDS, CleanOptions, seconds_of
    from launcher.manage.clean import clean as clean_hosts

    older_than = seconds_of(values["older_than"])
    _, cluster = cluster_of(ctx, values)
    if not (values["yes"] or values["dry_run"] or sys.stdin.isatty()):
        raise UsageError("clean asks before it deletes, which needs a terminal; give --dry-run or --yes")
    options = CleanOptions(
        kinds=tuple(dict.fromkeys(kinds)) or KINDS,
        older_than=older_than,
        keep=values["keep"],
        dry_run=values["dry_run"],
        ask=not values["yes"],
    )
    ctx.exit(clean_hosts(resolve(cluster), options, console_of(False)))
