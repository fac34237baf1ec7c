"""Tables that fit the terminal: columns of little worth are left out, one may be cut, the others are always whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
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
