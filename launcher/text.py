"""Text for terminals: plurals, number ranges, tables that fit the width, consoles, and pip commands to paste."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

Cell = Text | str

GAP = 2  #: spaces between two columns


@dataclass(frozen=True)
class Column:
    title: str
    worth: int  #: columns with the lowest values are left out first when the terminal is too narrow
    right: bool = False  #: aligned to the right
    cut_to: int | None = None  #: minimum width when texts are cut; None: never cut
    optional: bool = False  #: left out if no row has a value, which is neither empty nor ``–``


@dataclass(frozen=True)
class FittedTable:
    """A table with one line per row. To fit the width of the output, it leaves out columns or cuts them."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, rows = valued(self.columns, self.rows)
        widest = [
            max(cell_len(str(cell)) for cell in (column.title, *(row[i] for row in rows)))
            for i, column in enumerate(columns)
        ]
        needed = [
            most if column.cut_to is None else min(column.cut_to, most)
            for column, most in zip(columns, widest, strict=True)
        ]
        shown = fitting(columns, needed, options.max_width)
        room, widths = options.max_width - _total(shown, needed), list(needed)
        for i in sorted(shown, key=lambda i: -columns[i].worth):
            widths[i] = min(widest[i], needed[i] + max(room, 0))
            room -= widths[i] - needed[i]
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for i in shown:
            column, width = columns[i], widths[i]
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                width=width,
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in rows:
            table.add_row(*(row[i] for i in shown))
        yield table


def valued(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> tuple[list[Column], list[list[Any]]]:
    """Return columns and rows without the optional columns in which no row has a value."""
    empty = {i for i, column in enumerate(columns) if all(str(row[i]) in ("", "–") for row in rows) and column.optional}
    shown = [i for i in range(len(columns)) if i not in empty]
    return [columns[i] for i in shown], [[row[i] for i in shown] for row in rows]


def fitting(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """Return which columns fit into ``room`` characters: all without those of the lowest worth, at least one."""
    shown = list(range(len(columns)))
    while _total(shown, widths) > room and len(shown) > 1:
        shown.remove(min(shown, key=lambda i: columns[i].worth))
    return shown


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + GAP * (len(shown) - 1)


def count(number: int, thing: str, plural: str = "s") -> str:
    """Return a number with its noun: ``1 node``, ``2 nodes``, ``3 processes`` (``plural="es"``)."""
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def spans(numbers: Iterable[int], name: str = "") -> str:
    """Return ascending numbers as ranges: ``0–2, 4``; with a ``name``: ``node0–node2, node4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{name}{run[0]}" if len(run) == 1 else f"{name}{run[0]}–{name}{run[-1]}" for run in runs)


# Escape sequences (ECMA-48, and xterm's, which end with BEL), control characters other than tab and line feed, and
# lone UTF-16 surrogates, which JSON can contain but UTF-8 cannot encode
_UNPRINTABLE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\ud800-\udfff]"
)

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def printable(text: str, *, colours: bool = False) -> str:
    """Return ``text`` without terminal escapes and control characters; ``colours``: keep those that set colours.

    A lone UTF-16 surrogate becomes U+FFFD.
    """

    def replacement(found: re.Match[str]) -> str:
        if "\ud800" <= found[0] <= "\udfff":
            return "\ufffd"
        return found[0] if colours and _COLOUR.fullmatch(found[0]) else ""

    return _UNPRINTABLE.sub(replacement, text)


class PlainConsole(Console):
    """A rich console that removes terminal escapes, which text from nodes may contain, and breaks lines between words.

    With ``soft_wrap`` the lines of a text are broken between words on a terminal; a path or other word that is longer
    than a line stays whole. Indented lines without a label, such as commands to copy, are left to the terminal.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        if soft_wrap and self.is_terminal and len(objects) == 1 and isinstance(objects[0], str | Text):
            given = objects[0]
            text = self.render_str(given, markup=options.get("markup")) if isinstance(given, str) else given
            lines = [piece for line in text.split("\n", allow_blank=True) for piece in between_words(line, self.width)]
            objects = (Text("\n").join(lines),)
        super().print(*objects, soft_wrap=soft_wrap, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _UNPRINTABLE.search(segment.text):
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


_LABELLED = re.compile(r" +\S+ {2,}(?=\S)")  # "  note        the parts will be made …"


def between_words(line: Text, width: int) -> Iterator[Text]:
    """Break a line between its words; further lines of a text behind a label begin below that text."""
    label = _LABELLED.match(line.plain)
    start = label.end() if label else 0
    if line.plain.startswith(" ") and not label:
        yield line
        return
    breaks, column = [], start
    for word in re.finditer(r"\S+\s*", line.plain[start:]):
        if column > start and column + cell_len(word[0].rstrip()) > width:
            breaks.append(start + word.start())
            column = start
        column += cell_len(word[0])
    for k, piece in enumerate(line.divide(breaks)):
        piece.rstrip()
        if k:
            piece.pad_left(start)
        yield piece


UNBOUNDED = 100_000  #: width in columns for output to a file or a pipe, where lines are not folded


def console_for(*, stderr: bool) -> Console:
    """Return a console for stdout or stderr. Outside a terminal it does not cut tables unless COLUMNS is set."""
    stream = sys.stderr if stderr else sys.stdout
    bounded = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return PlainConsole(stderr=stderr, highlight=False, width=None if bounded else UNBOUNDED)


def say(text: str, style: str = "", *, stderr: bool = True) -> None:
    """Print a message to stderr or stdout; on a terminal its lines are broken between words."""
    console_for(stderr=stderr).print(Text(text, style), soft_wrap=True)


OWN_VENV = "~/gnnfleet-venv"  #: default folder of a new virtual environment on a node

WHEELS = "https://download.pytorch.org/whl/"


def index(tag: str) -> list[str]:
    """Return pip arguments for the package index that has the build ``tag`` of torch; none if ``tag`` is "" (PyPI)."""
    return [f"--extra-index-url {WHEELS}{tag}"] if tag else []


def clock_time(when: float) -> str:
    """Return a time as text in this machine's time zone: ``12:03:11``, with the date if it is not today."""
    then, today = time.localtime(when), time.localtime()
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def seconds_words(seconds: float) -> str:
    """Return a duration as text: ``45 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


#: Seconds of each unit of a duration.
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def duration(text: str) -> float | None:
    """Return a duration such as ``90s``, ``10m``, ``1.5h`` or ``7d`` in seconds, also of ``0``; else None."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([smhdw])|0", text.strip())
    return None if match is None else float(match[1]) * UNITS[match[2]] if match[1] else 0.0
