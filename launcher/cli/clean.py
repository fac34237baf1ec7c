"""``gnnfleet clean``."""

from __future__ import annotations

import sys
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
from launcher.errors import UsageError

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
