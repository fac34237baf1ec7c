"""``gnnfleet partition push`` and ``partition fetch``: copy partition folders to and from a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.options import console_of, examples
from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.config.schema import ClusterConfig


def _options(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    from yaml import safe_load

    pairs = [value.partition("=") for value in values]
    wrong = next((value for value, pair in zip(values, pairs, strict=True) if not pair[0] or not pair[1]), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not NAME=VALUE", context, parameter)
    return {name: safe_load(text) for name, _, text in pairs}


_STORE_OPTION = click.option(
    "--store-option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_options,
    help="Option of fsspec for this store, as endpoint_url=http://minio:9000; repeatable.",
)


@click.command(
    "push",
    epilog=examples("partition push --config cluster.yml", "partition push parts s3://bucket/products"),
)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.argument("url", required=False)
@_STORE_OPTION
@click.option("--force", is_flag=True, help="Replace the parts of another graph in the store.")
@click.pass_obj
def push(
    config: ClusterConfig | None, folder: Path | None, url: str | None, options: Mapping[str, Any], force: bool
) -> None:
    """Upload the parts in FOLDER to the store URL.

    With --config, leave out FOLDER and URL: the config contains both, and missing parts are made first. An interrupted
    upload continues when the command is called again.
    """
    from launcher.config.resolve import resolve
    from launcher.config.store_consistency import check_words
    from launcher.plan.partition import ensure_parts, read_partition_files
    from launcher.sync.parts_store import made_from, push_parts, stored_parts

    console, made = console_of(False), []
    if config is not None and folder is None:
        if not config.data.store or not config.makes_parts:
            raise UsageError("data.store is missing in the config; it is the URL to which the parts are uploaded")
        resolved = resolve(config)
        url, options = config.data.store, config.data.store_options
        parts, made = ensure_parts(resolved, console), made_from(resolved)
    elif folder is None or url is None:
        raise UsageError("give a partition folder and a URL (partition push parts s3://bucket/products), or --config")
    else:
        found = read_partition_files(folder)
        if found is None:
            raise UsageError(f"{folder} has no manifest.json, so it is not a partition folder")
        parts = found
    check_words(url, options)
    stored = None if force else stored_parts(url, options)[0]  # they may be what is damaged
    if stored is not None and stored.files[-1].sha256 != parts.files[-1].sha256:
        raise UsageError(
            f"{url} has the parts of another partition ({stored.num_parts} of {stored.dataset}); use another folder of "
            "the store, or replace them with --force"
        )
    if stored is not None:
        click.echo(f"{url} has these parts already")
        return
    push_parts(parts, url, options, made, console, replace_others=force)


@click.command(
    "fetch",
    epilog=examples(
        "partition fetch s3://bucket/products parts", "partition fetch s3://bucket/products parts --part 0 --part 1"
    ),
)
@click.argument("url")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--part", "part_ids", multiple=True, type=click.IntRange(0), help="Fetch this part only; repeatable.")
@click.option("--replicated", is_flag=True, help="Also fetch the edges of all other parts (data.topology).")
@_STORE_OPTION
@click.pass_obj
def fetch(
    config: ClusterConfig | None,
    url: str,
    folder: Path,
    part_ids: tuple[int, ...],
    replicated: bool,
    options: Mapping[str, Any],
) -> None:
    """Fetch the parts in the store URL into FOLDER, and compare them with the digests in their manifest.

    An interrupted fetch continues when the command is called again.
    """
    from launcher.config.store_consistency import check_words
    from launcher.plan.partition import read_partition_files
    from launcher.sync.parts_store import fetch_parts, stored_parts

    check_words(url, options)
    stored, _ = stored_parts(url, options)
    if stored is None:
        raise UsageError(f"{url} has no manifest.json, so it contains no parts")
    if unknown := [part for part in part_ids if part >= stored.num_parts]:
        raise UsageError(f"{url}: there is no part {unknown[0]}; the parts are 0 to {stored.num_parts - 1}")
    there = read_partition_files(folder)
    if there is not None and there.files[-1].sha256 != stored.files[-1].sha256:
        raise UsageError(f"{folder} has the parts of another partition; choose another folder")
    files = stored.of_parts(part_ids or range(stored.num_parts), replicated=replicated)
    fetch_parts(stored, files, options, folder, console_of(False))


STORE_COMMANDS = {"push": push, "fetch": fetch}
