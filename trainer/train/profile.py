"""``python -m trainer profile``: shows from metrics lines where a run's time goes."""

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
from trainer.train.metrics import KINDS, LOADING
from trainer.train.run_times import RankLines, RunTimes, read_lines, record_of

VERSION = 1  #: version of the JSON document, which docs/ARCHITECTURE.md describes

_WIDTH = 110  # columns of output that does not go to a terminal


class _EpochRange(click.ParamType):
    """Value of ``--epochs``: one epoch, such as ``3``, or a range, such as ``2-5``."""

    name = "epochs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Container[int]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", value.strip())
        if not found:
            self.fail(f"{value!r} is neither an epoch, such as 3, nor a range of epochs, such as 2-5", param, ctx)
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--epochs", type=_EpochRange(), help="An epoch, or a range such as 2-5; default: all but the first.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead.")
def profile(paths: tuple[Path, ...], epochs: Container[int] | None, as_json: bool) -> None:
    """Show per rank where a run's time goes. docs/operating.md says what shortens each kind of work.

    PATHS: the --run-dir of train, the run folder of a launch (also of a running one), or metrics files of ranks.
    """
    lines = read_lines(paths)
    record = record_of(lines, epochs)
    if as_json:
        print(json.dumps(document(lines, record)))
    elif record is None:
        raise SettingsError(
            f"no epoch or step line in {', '.join(map(str, paths))} has times: training has not started or took less"
            " than a second, or a script's StepLog was created without its loader"
        )
    else:
        show(record)


def document(lines: Mapping[int, RankLines], record: RunTimes | None) -> dict[str, Any]:
    """Return the JSON document that ``profile --json`` prints."""
    traffic = [rank.to_json() for rank in lines.values() if rank.epochs]
    return {"version": VERSION, "time": record.to_json() if record else None, "traffic": traffic}


def show(record: RunTimes) -> None:
    """Print two tables of where the time of a run goes, per step and per batch."""
    from rich.console import Console  # slow to import

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(width=max(width, 80), highlight=False)
    first, last = record.epochs[0], record.epochs[-1]
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    left_out = " (the first, which compiles and warms up, left out)" if record.without_first else ""
    ranks, steps = len(record.ranks), max(rank.steps for rank in record.ranks)
    title = f"{epochs}{left_out}: {steps} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    console.print(title, soft_wrap=True)

    # Time per step.
    table = _table("milliseconds of a step", ("rank", *KINDS, "step"))
    rows = [(str(rank.rank), rank) for rank in record.ranks]
    for name, rank in [*rows, ("mean", record.mean)] if len(rows) > 1 else rows:
        table.add_row(name, *(_ms(rank.spent[kind]) for kind in KINDS), _ms(rank.step_s))
    table.add_row("share", *(f"{record.mean.share(kind):.0%}" for kind in KINDS), "", style="bold")
    console.print(table)

    # Means per batch: time of a sampler thread by kind of work, gathered rows and the shares of them, MB received.
    heads = ("rank", *LOADING, "rows", "remote", "cached", "held", "MB", "MB predicted")
    table = _table("per batch: milliseconds of a sampler thread, rows, MB received", heads)
    for rank in record.ranks:
        expected = rank.bytes_predicted
        table.add_row(
            str(rank.rank),
            *(_ms(rank.behind[kind]) for kind in LOADING),
            f"{rank.traffic['rows']:,.0f}" if rank.traffic["rows"] else "-",
            _share(rank.ratio("remote_rows", "rows")),
            _share(rank.ratio("cached_rows", "remote_rows")),
            _share(rank.ratio("held_rows", "remote_rows")),
            f"{rank.traffic['remote_bytes'] / 1e6:.2f}",
            "-" if expected is None else f"{expected / 1e6:.2f}",
        )
    console.print(table)


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
