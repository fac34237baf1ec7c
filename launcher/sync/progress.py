"""Shows the progress of transfers: bars on a terminal, a line every 5 s elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_EVERY = 5.0  # seconds between lines when not on a terminal


class TransferProgress:
    """Counts bytes per node. Thread-safe. This base class prints nothing."""

    def start(self, node_rank: int, total: int) -> None:
        """Announce ``total`` bytes to be sent to a node."""

    def advance(self, node_rank: int, count: int) -> None:
        """Count ``count`` more bytes as sent; negative when a transfer starts again."""

    def note(self, node_rank: int, text: str) -> None:
        """Print a line about a node, such as a retry."""


class _LineProgress(TransferProgress):
    def __init__(self, console: Console, labels: Mapping[int, str]):
        self.console, self.labels = console, labels
        self._sent: dict[int, int] = {}
        self._total: dict[int, int] = {}
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def start(self, node_rank: int, total: int) -> None:
        with self._lock:
            self._sent.setdefault(node_rank, 0)
            self._total[node_rank] = self._sent[node_rank] + total

    def advance(self, node_rank: int, count: int) -> None:
        with self._lock:
            self._sent[node_rank] += count
            if time.monotonic() - self._last < _EVERY:
                return
            self._last = time.monotonic()
            sent, total = sum(self._sent.values()), sum(self._total.values())
        self.console.print(f"files: {decimal(sent)} of {decimal(total)} transferred", highlight=False)

    def note(self, node_rank: int, text: str) -> None:
        self.console.print(f"{self.labels[node_rank]}: {text}", highlight=False, markup=False, soft_wrap=True)


class _BarProgress(TransferProgress):
    """One bar per node with bytes, speed and time left."""

    def __init__(self, progress: Progress, labels: Mapping[int, str]):
        self.progress, self.labels = progress, labels
        self._tasks: dict[int, TaskID] = {}
        self._lock = threading.Lock()

    def start(self, node_rank: int, total: int) -> None:
        with self._lock:
            if node_rank in self._tasks:
                done = self.progress.tasks[self._tasks[node_rank]].completed
                self.progress.update(self._tasks[node_rank], total=done + total)
            else:
                self._tasks[node_rank] = self.progress.add_task(self.labels[node_rank], total=total)

    def advance(self, node_rank: int, count: int) -> None:
        self.progress.advance(self._tasks[node_rank], count)

    def note(self, node_rank: int, text: str) -> None:
        self.progress.console.print(f"{self.labels[node_rank]}: {text}", highlight=False, markup=False)


@contextmanager
def transfer_progress(console: Console, labels: Mapping[int, str]) -> Iterator[TransferProgress]:
    """Yield a progress display: bars if ``console`` is a terminal, lines otherwise.

    ``labels``: names of the nodes by node_rank.
    """
    if not console.is_terminal:
        yield _LineProgress(console, labels)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _BarProgress(progress, labels)
