"""The text of ``gnnfleet compare``: a column for each run, what is best marked by ``*`` and bold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.report.compare import Comparison, Row, Section
from launcher.report.profile import milliseconds
from launcher.report.verdict import seconds_words

_TITLES: dict[Section, str] = {
    "config": "config, where it differs",
    "results": "results",
    "speed": "speed",
    "step": "where a step's time goes",
    "loss": "loss by epoch",
    "accuracy": "val accuracy by epoch",
    "versions": "versions, where they differ",
}

_STATES = {"done": "green", "failed": "red", "never started": "red", "damaged": "red"}

_EPOCHS_SHOWN = 12


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Notes first, as they say how far to trust the rest."""
    for note in comparison.notes:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
    console.print(rendered(comparison))
    for text in _alike(comparison):
        console.print(Text(text), soft_wrap=True)


def rendered(comparison: Comparison) -> Table:
    """The table, at whatever width it is printed: long values are folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for run in comparison.runs:
        table.add_column(escape(run.run_id), overflow="fold")
    for row in comparison.of("run"):
        table.add_row(row.title, *_cells(row))
    for section, title in _TITLES.items():
        rows = _shown(section, comparison.of(section))
        if rows:
            table.add_row()
            table.add_row(Text(title, "bold"))
        for shown in rows:
            table.add_row("  …") if shown is None else table.add_row(f"  {escape(shown.title)}", *_cells(shown))
    return table


def _alike(comparison: Comparison) -> Iterator[str]:
    """What all have in common is told in a line."""
    if all(run.config for run in comparison.runs) and not comparison.of("config"):
        yield "config: the same"
    versions = comparison.of("versions")
    same = ", ".join(f"{row.title} {next(filter(None, row.values))}" for row in versions if not row.differs)
    if same:
        yield f"the same versions of: {same}"
    if any(row.best for row in comparison.rows):
        yield "* best"


def _shown(section: Section, rows: Sequence[Row]) -> list[Row | None]:
    """Of many epochs the first and the last ones, None for those between; of versions those that differ."""
    if section == "versions":
        return [row for row in rows if row.differs]
    if section in ("loss", "accuracy") and len(rows) > _EPOCHS_SHOWN + 1:
        return [rows[0], None, *rows[-_EPOCHS_SHOWN:]]
    return list(rows)


def _cells(row: Row) -> Iterator[Text]:
    for i, value in enumerate(row.values):
        text = Text(_words(row, value), _STATES.get(str(value), "") if row.title == "state" else "")
        yield Text(f"{text} *", "bold green") if i in row.best else text


def _words(row: Row, value: Any) -> str:
    if value is None:
        return "–"
    if row.form == "score":
        return f"{value:.4f}"
    if row.form == "seconds":
        return f"{value:.2f} s" if value < 60 else seconds_words(value)
    if row.form == "rate":
        return f"{value:,.0f}"
    if row.form == "bytes":
        return decimal(round(value))
    if row.form == "share":
        return f"{value:.0%}"
    return milliseconds(value) if row.form == "spent" else _text(value)


def _text(value: Any) -> str:
    """Of a config's value, as YAML has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else "–" if value is None else str(value)
