"""Text for people: counts in words, tables that fit the terminal, consoles, set-up commands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

Cell = Text | str

_GAP = 2


@dataclass(frozen=True)
class Column:
    """A title, and when to leave it out: those of the lowest ``worth`` go first. One with ``cut_to`` may be cut."""

    title: str
    worth: int
    right: bool = False
    cut_to: int | None = None  #: characters that must stay, where the texts have as many


@dataclass(frozen=True)
class FittedTable:
    """Rows of one line each, at whatever width they are printed."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = [self._needed(i) for i in range(len(self.columns))]
        shown = list(range(len(self.columns)))
        while _total(shown, needed) > options.max_width and len(shown) > 1:
            shown.remove(min(shown, key=lambda i: self.columns[i].worth))
        room = options.max_width - _total(shown, needed)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for i in shown:
            column = self.columns[i]
            width = min(self._widest(i), needed[i] + room) if column.cut_to is not None else needed[i]
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                width=width,
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in self.rows:
            table.add_row(*(row[i] for i in shown))
        yield table

    def _widest(self, i: int) -> int:
        return max(cell_len(str(cell)) for cell in (self.columns[i].title, *(row[i] for row in self.rows)))

    def _needed(self, i: int) -> int:
        cut_to = self.columns[i].cut_to
        return self._widest(i) if cut_to is None else min(cut_to, self._widest(i))


def _total(shown: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)


def count(number: int, thing: str, plural: str = "s") -> str:
    """``1 node``, ``2 nodes``, ``3 processes``."""
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def spans(numbers: Iterable[int], name: str = "") -> str:
    """Ascending numbers with runs folded: ``0–2, 4``; with ``name`` before each: ``node0–node2, node4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{name}{run[0]}" if len(run) == 1 else f"{name}{run[0]}–{name}{run[-1]}" for run in runs)


# Escape sequences (ECMA-48, with xterm's end of one by BEL), control characters other than tab and line end, and halves
# of UTF-16 pairs, which JSON may hold but no file takes
_UNPRINTABLE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\ud800-\udfff]"
)

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def printable(text: str, *, colours: bool = False) -> str:
    """``text`` without terminal escapes and control characters; ``colours``: those that set colours stay."""

    def instead(found: re.Match[str]) -> str:
        if "\ud800" <= found[0] <= "\udfff":
            return "\ufffd"
        return found[0] if colours and _COLOUR.fullmatch(found[0]) else ""

    return _UNPRINTABLE.sub(instead, text)


class PlainConsole(Console):
    """Shows no terminal escapes but its own: what nodes, logs and files tell may hold any."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Segments of the renderable, their texts printable."""
        for segment in super().render(renderable, options):
            if segment.control or not _UNPRINTABLE.search(segment.text):
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


UNBOUNDED = 100_000  #: columns of what is no terminal: a file or a pipe has lines as long as they need to be


def console_for(*, stderr: bool) -> Console:
    """For stdout, or ``stderr``. Into a file or a pipe tables are as wide as what they hold, with nothing cut or
    folded, unless COLUMNS says how wide they may be."""
    stream = sys.stderr if stderr else sys.stdout
    bounded = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return PlainConsole(stderr=stderr, highlight=False, width=None if bounded else UNBOUNDED)


OWN_VENV = "~/gnnfleet-venv"  #: where one is put when nobody says otherwise

WHEELS = "https://download.pytorch.org/whl/"


def new_venv(venv: str, pins: Sequence[str], tag: str) -> str:
    """The line that makes ``venv`` with ``pins`` in it; ``tag``: torch's build, as cpu or cu126, '' for PyPI's."""
    return f"python3 -m venv {venv} && {venv}/bin/pip install {' '.join([*pins, *index(tag)])}"


def index(tag: str) -> list[str]:
    """pip's words for where such a build of torch is."""
    return [f"--extra-index-url {WHEELS}{tag}"] if tag else []
