"""Options that several commands share: any config key, and fewer hosts."""

from __future__ import annotations

import click

from launcher.cli.completion import config_keys, host_names

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
