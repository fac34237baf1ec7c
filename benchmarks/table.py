"""Results of benchmarks as rows of a printed table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """A measured value, and optionally the value that another method reached in the same run."""

    what: str
    value: float
    unit: str
    against: str = ""  #: name of the other method
    other: float | None = None  #: value of the other method, in the same unit
    better: str = "less"  #: which values are better: ``less``, ``more``, or ``equal`` if both should agree

    @property
    def ratio(self) -> float | None:
        """Factor by which ``value`` is better than ``other``; None without ``other``."""
        if self.other is None or self.better == "equal":
            return None
        return self.other / self.value if self.better == "less" else self.value / self.other


def show(title: str, rows: Iterable[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("what", "value", "unit", "against", "its value", "times better"):
        table.add_column(name, justify="left" if name in ("what", "unit", "against") else "right")
    for row in rows:
        other = "" if row.other is None else f"{row.other:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.what, f"{row.value:.4g}", row.unit, row.against, other, ratio)
    Console(width=140).print(table)


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median seconds of a call of ``work``, after one warm-up call."""
    work()
    return statistics.median(_seconds(work) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
