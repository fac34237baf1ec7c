"""``python -m trainer profile``: where the time of a run goes, from its metrics lines, and what would help."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import click

from trainer.core.errors import SettingsError
from trainer.train.advice import advice
from trainer.train.metrics import KINDS, LOADING
from trainer.train.recorded import RankLines, RankRecord, Record, read_lines, record_of

VERSION = 1  #: of the JSON document; docs/ARCHITECTURE.md describes it

_WIDTH = 110  # of what is not shown in a terminal


class _Epochs(click.ParamType):
    """``3`` or ``2-5``."""

    name = "epochs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Container[int]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", value.strip())
        if not found:
            self.fail(f"{value!r} is no epoch, 3, and no range of them, 2-5", param, ctx)
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--epochs", type=_Epochs(), help="One, or a range as 2-5; default: all but the first.")
@click.option("--topology", default="", help="data.topology of the run, which the advice goes by; default: not known.")
@click.option("--script", is_flag=True, help="A script of one's own trained: the advice names no train.* keys.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead.")
def profile(paths: tuple[Path, ...], epochs: Container[int] | None, topology: str, script: bool, as_json: bool) -> None:
    """Show where a run's time goes, per rank, and what would help.

    PATHS: the --run-dir of train, or the folder of a launch, also while it runs; or metrics files of ranks.
    """
    lines = read_lines(paths)
    record = record_of(lines, epochs)
    told = advice(record, topology, script=script) if record else []
    if as_json:
        print(json.dumps(document(lines, record, told)))
    elif record is None:
        raise SettingsError(
            f"no epoch or step line in {', '.join(map(str, paths))} tells where time went: nothing was trained yet, or"
            " for less than a second, or by a script whose StepLog was not given its loader"
        )
    else:
        show(record, told)


def document(lines: Mapping[int, RankLines], record: Record | None, told: list[str]) -> dict[str, Any]:
    """What ``--json`` prints."""
    time = record.to_json() | {"advice": told} if record else None
    return {"version": VERSION, "time": time, "traffic": [rank.to_json() for rank in lines.values() if rank.epochs]}


def show(record: Record, told: list[str]) -> None:
    """Print tables and advice."""
    from rich.console import Console  # which takes longer to import than all the rest

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(width=max(width, 80), highlight=False)
    console.print(_title(record), soft_wrap=True)
    console.print(_steps(record))
    console.print(_behind(record))
    for line in told:
        console.print(f"- {line}", soft_wrap=True, markup=False)


def _title(record: Record) -> str:
    first, last = record.epochs[0], record.epochs[-1]
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    left_out = " (the first, which compiles and warms up, left out)" if record.without_first else ""
    ranks, steps = len(record.ranks), max(rank.steps for rank in record.ranks)
    return f"{epochs}{left_out}: {steps} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def _steps(record: Record) -> Any:
    """Milliseconds of a step by kind."""
    table = _table("milliseconds of a step", ("rank", *KINDS, "step"))
    rows = [(str(rank.rank), rank) for rank in record.ranks]
    for name, rank in [*rows, ("mean", record.mean)] if len(rows) > 1 else rows:
        table.add_row(name, *(_ms(rank.spent[kind]) for kind in KINDS), _ms(rank.step_s))
    table.add_row("share", *(f"{record.mean.share(kind):.0%}" for kind in KINDS), "", style="bold")
    return table


def _behind(record: Record) -> Any:
    """The sampler threads' work on a batch, hidden behind training or not, and where its rows came from."""
    heads = ("rank", *LOADING, "rows", "remote", "cached", "held", "MB", "MB predicted")
    table = _table("behind it, per batch: milliseconds of a sampler thread, rows, MB received", heads)
    for rank in record.ranks:
        table.add_row(str(rank.rank), *(_ms(rank.behind[kind]) for kind in LOADING), *_rows(rank))
    return table


def _rows(rank: RankRecord) -> tuple[str, ...]:
    expected = rank.bytes_predicted
    return (
        f"{rank.traffic['rows']:,.0f}" if rank.traffic["rows"] else "-",
        _share(rank.part("remote_rows", "rows")),
        _share(rank.part("cached_rows", "remote_rows")),
        _share(rank.part("held_rows", "remote_rows")),
        f"{rank.traffic['remote_bytes'] / 1e6:.2f}",
        "-" if expected is None else f"{expected / 1e6:.2f}",
    )


def _table(title: str, heads: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "rank" else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"
