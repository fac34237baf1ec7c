"""The commands ``partition make``, ``convert``, ``repartition``, ``verify``, ``inspect`` and ``tables``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click
import yaml

from trainer.core.errors import SettingsError
from trainer.core.memory import parse_size
from trainer.core.remote_settings import WireRows
from trainer.partition.inspect import describe, render
from trainer.partition.make import PartitionSpec, convert_partition, make_partition, repartition_spec
from trainer.partition.methods.assign import BALANCES, KEEP, METHODS
from trainer.partition.verify import verify_partition

_ROWS = "Round floating-point features to float16, or to int8 with a scale per row."


@click.group()
def partition() -> None:
    """Partition a graph; convert, check or describe partition folders."""


def _options(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    options = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", context, parameter)
        options[name.strip().replace("-", "_")] = text.strip()
    return options


def _node_files(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    files = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or not name or not path:
            raise click.BadParameter(f"{value!r} is not NAME=FILE", context, parameter)
        files[name] = path
    return files


def _fanouts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers like 15,10,5", context, parameter) from None


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        try:
            parse_size(value)
        except SettingsError as error:
            raise click.BadParameter(str(error), context, parameter) from None
    return value


@partition.command()
@click.option(
    "--dataset",
    required=True,
    help="synthetic, synthetic-hetero, file, tables, partition, ogbn-…, or a torch_geometric dataset such as "
    "Planetoid:Cora.",
)
@click.option(
    "--source",
    help="For dataset file: folder of .npy/.npz files, or a .pt file; for tables: their folder; for partition: a "
    "partition folder; else download folder.",
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", callback=_options, help="Dataset option; repeatable."
)
@click.option("--num-parts", type=click.IntRange(min=1), default=1, show_default=True, help="Number of parts.")
@click.option(
    "--method",
    type=click.Choice([*METHODS, KEEP]),
    default="auto",
    show_default=True,
    help="How nodes are assigned to parts; keep: as in the source of dataset partition.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the partition algorithm."
)
@click.option(
    "--balance",
    type=click.Choice(BALANCES),
    help="Quantities that metis, streaming and frequency balance over the parts.  [default: types+seeds]",
)
@click.option(
    "--fanouts",
    metavar="N,N,…",
    callback=_fanouts,
    help="Fanouts per hop by which method frequency counts visits, seeds outward.  [default: 15,10,5]",
)
@click.option(
    "--clusters",
    type=click.IntRange(min=1),
    default=None,
    help="Number of clusters that each part is divided into, for Cluster-GCN.",
)
@click.option(
    "--rows",
    type=click.Choice(get_args(WireRows)),
    default="stored",
    show_default=True,
    help=_ROWS,
)
@click.option(
    "--memory", metavar="SIZE", callback=_size, help="Most memory to use, such as 4GB.  [default: what is available]"
)
@click.option("--out", "folder", required=True, type=click.Path(), help="Partition folder to write.")
@click.option("--force", is_flag=True, help="Replace the parts of another graph in the folder.")
def make(**values: Any) -> None:
    """Load a dataset, partition it and write the partition folder."""
    values["clusters"] = values["clusters"] or 0
    make_partition(PartitionSpec(**values), say=click.echo)


@partition.command()
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option(
    "--nodes",
    "nodes",
    multiple=True,
    metavar="NAME=FILE",
    callback=_node_files,
    help="Array of nodes that SOURCE does not contain, such as y=label.pt or train_idx=FOLDER; in a graph with types "
    "paper__y=label.pt. FILE: .npy, .pt, or a folder of partition0.pt, …; repeatable.",
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", callback=_options,
    help="Option of datasets that are read from files, such as num_classes or target; repeatable.",
)  # fmt: skip
@click.option("--rows", type=click.Choice(get_args(WireRows)), default="stored", show_default=True, help=_ROWS)
@click.option("--force", is_flag=True, help="Replace the parts of another graph in OUT.")
def convert(source: str, out: str, nodes: dict[str, str], options: dict[str, Any], rows: Any, force: bool) -> None:
    """Convert the partition SOURCE of another program to a partition folder OUT. Every node stays in its part.

    SOURCE is a folder of torch_geometric.distributed, GraphLearn-for-PyTorch or DGL; its format is recognised.

    \b
    Examples:
      gnnfleet partition convert ogbn-products-partitions parts
      gnnfleet partition convert glt-parts parts --nodes y=label.pt --nodes train_idx=train.npy
    """
    options |= {"nodes": nodes} if nodes else {}
    convert_partition(source, out, options, rows=rows, force=force, say=click.echo)


@partition.command()
@click.argument("folder", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--num-parts", type=click.IntRange(min=1), required=True, help="Number of parts.")
@click.option(
    "--method", type=click.Choice(METHODS), help="How nodes are assigned to parts.  [default: as FOLDER, or metis]"
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the method.  [default: as FOLDER, or 0]")
@click.option(
    "--balance", type=click.Choice(BALANCES), help="Quantities to balance.  [default: as FOLDER, or types+seeds]"
)
@click.option(
    "--fanouts", metavar="N,N,…", callback=_fanouts, help="For frequency, as in make.  [default: as FOLDER, or 15,10,5]"
)
def repartition(folder: str, out: str, **values: Any) -> None:
    """Divide the graph of the partition FOLDER into another number of parts, in the partition folder OUT.

    Reads only FOLDER, not the dataset that FOLDER was made from. OUT gets the same files that `partition make` would
    write from this dataset.
    FOLDER may also be a partition of another program. OUT may be FOLDER.

    \b
    Example:
      gnnfleet partition repartition parts parts-8 --num-parts 8
    """
    make_partition(repartition_spec(folder, out, **values), say=click.echo)


@partition.command()
@click.argument("folder", type=click.Path())
@click.option(
    "--part", "part_ids", type=int, multiple=True, help="Check this part and the shared files only; repeatable."
)
@click.option("--digests/--no-digests", default=True, show_default=True, help="Read every file and compare its sha256.")
@click.pass_context
def verify(context: click.Context, folder: str, part_ids: tuple[int, ...], digests: bool) -> None:
    """Check digest, dtype, shape and range of every array of a partition folder; exit with status 1 if one is wrong."""
    findings = verify_partition(folder, part_ids or None, digests)
    for finding in findings:
        click.echo(f"{folder}/{finding}", err=True)
    if findings:
        click.echo(
            f"{folder}: {len(findings)} problem{'s' * (len(findings) > 1)}; send these files again, or delete them and "
            "make the partition again",
            err=True,
        )
        context.exit(1)
    click.echo(f"{folder}: sound" + (f" (parts {', '.join(map(str, part_ids))})" if part_ids else ""))


@partition.command()
@click.argument("folder", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(folder: str, as_json: bool) -> None:
    """Print sizes, edge cut and balance of a partition folder."""
    description = describe(folder)
    click.echo(json.dumps(description.to_json(), indent=1) if as_json else render(description))


@partition.command()
@click.argument("folder", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tables(folder: str, as_json: bool) -> None:
    """Print a draft of the cluster file's section `data` for the CSV and Parquet files of a folder."""
    from trainer.sources.draft_tables import draft_tables

    options = draft_tables(Path(folder))
    if as_json:
        click.echo(json.dumps(options, indent=1))
        return
    source = yaml.safe_dump({"source": folder}, width=10_000, allow_unicode=True).strip()
    click.echo(f"data:\n  dataset: tables\n  {source}\n  options:")
    comments = options.pop("comments")
    tables = {kind: options.pop(kind) for kind in ("nodes", "edges", "tasks") if kind in options}
    for line in comments["unused"]:
        click.echo(f"    # {' '.join(line.splitlines())}")
    for kind, drafted in tables.items():
        click.echo(f"    {kind}:")
        for name, table in drafted.items():
            for line in comments[kind].get(name, ()):
                click.echo(f"      # {' '.join(line.splitlines())}")  # a column's name may have line breaks
            flow = yaml.safe_dump(table, default_flow_style=True, sort_keys=False, width=100).strip()
            click.echo(f"      {name}: " + flow.replace("\n", "\n" + " " * 9))
    for name, plain in options.items():
        click.echo(f"    {name}: {json.dumps(plain)}")
