"""Prints log lines while a run is followed and, on a terminal, a live table below them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from launcher.node.json_reader import records
from launcher.node.json_records import METRIC
from launcher.plan.model import LaunchPlan
from launcher.run.live_state import Board
from launcher.run.live_table import render
from launcher.text import printable

STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ?")  #: at the beginning of the lines of a log

_COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "bright_red", "bright_cyan", "bright_magenta")

_EVERY = 5.0  # seconds between progress lines without live view

_NOT_SHOWN = ("supervisor", "server", "runners", "start")  # logs that are read only after failures

_TRACEBACK = re.compile(r"(\[rank\d+\]: ?)?[ |+]*(Exception Group )?Traceback \(most recent call last\):")

_HOLD = 3.0  # seconds before a traceback is printed: if the run ends meanwhile, the report shows the first failure

_REFRESH = 0.5  # seconds between redraws of the live view

_BATCH = 0.1  # seconds; lines of this period are printed together above the live view

_SHARE = 0.7  # largest fraction of the terminal's height for the live view

Metric = Mapping[str, Any]


def without_stamp(line: str) -> str:
    """Return a log line without the time stamp that the rank runner added."""
    stamp = STAMP.match(line)
    return line[stamp.end() :] if stamp else line


def labelled(label: str, node_rank: int, line: str) -> Text:
    """Return a line of a process on a node for a terminal, behind a label in the node's colour."""
    return Text(label, _COLOURS[node_rank % len(_COLOURS)]) + Text.from_ansi(printable(line, colours=True))


class LiveLog:
    """Prints the output of a run and, on a terminal, a live table of nodes and ranks below it. Thread-safe.

    ``plain``: print a progress line every few seconds instead of the table, as is done without a terminal.
    """

    def __init__(self, console: Console, plan: LaunchPlan, *, plain: bool = False, board: Board | None = None):
        self.console = console
        self.board = board or Board.of(plan)
        self.alive = console.is_terminal and not plain  #: shows a live view
        self.question: tuple[str, ...] = ()  #: text lines below the live view
        names = [f"node{node.node_rank}/rank{rank}" for node in plan.nodes for rank in node.ranks]
        self._width = max(len(name) for name in [*names, "node0/rank0"])
        self._lock = threading.RLock()
        self._last_progress = self._last_picture = self._last_print = 0.0
        self._quiet = False
        self._held: dict[tuple[int, str], _Held] = {}
        self._waiting: list[Text] = []
        self._picture: list[Text] = []
        self._live = Live(_Below(self), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveLog:
        if self.alive:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._print_waiting()
        self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        with self._lock:
            self._print_waiting()
            self.console.print(Text(text, style), soft_wrap=True)

    def ask(self, lines: Sequence[str]) -> None:
        """Show a question below the live table or, without a table, print it. An empty sequence removes it."""
        with self._lock:
            self.question = tuple(lines)
            if self.alive:
                self._refresh(time.monotonic())
            else:
                for line in lines:
                    self.say(line, "bold")

    def file_lines(self, node_rank: int, file: str, lines: Sequence[str]) -> None:
        """Take new lines of a node's file: print those of a log, add those of a metrics file to the table."""
        if file.startswith("metrics-"):
            for metric in parsed(lines):
                self.metric(metric)
        elif file.startswith("logs/"):
            name = file[len("logs/") : -len(".log")]
            if name not in _NOT_SHOWN:
                self.process_lines(node_rank, name, [without_stamp(line) for line in lines])

    def process_lines(self, node_rank: int, name: str, lines: Sequence[str]) -> None:
        """Print ``node0/rank1 | text`` for each line; delay a traceback and the lines after it by ``_HOLD`` seconds."""
        with self._lock:
            if self._quiet:
                return
            source = node_rank, name
            first = next((i for i, line in enumerate(lines) if _TRACEBACK.match(line)), len(lines))
            if source in self._held:
                self._held[source].lines += lines
                return
            if first < len(lines):
                self._held[source] = _Held(time.monotonic() + _HOLD, list(lines[first:]))
            self._print(source, lines[:first])

    def metric(self, metric: Metric) -> None:
        """Add a metrics line to the table; without a table, print a progress line every few seconds."""
        with self._lock:
            self.board.metric(metric)
            now = time.monotonic()
            if metric.get("kind") == "step" and not self.alive and not self._quiet and self.board.stepping():
                if now - self._last_progress >= _EVERY:
                    self._last_progress = now
                    self.say(self.board.progress_line())

    def tick(self, *, all_of_them: bool = False) -> None:
        """Print the delayed lines that are due (``all_of_them``: all), and redraw the table. Call it every 0.1 s."""
        with self._lock:
            now = time.monotonic()
            for source in [source for source, held in self._held.items() if all_of_them or held.until <= now]:
                self._print(source, self._held.pop(source).lines)
            if self._waiting and (all_of_them or now - self._last_print >= _BATCH):
                self._print_waiting()
            if self.alive and now - self._last_picture >= _REFRESH:
                self._refresh(now)

    def quiet(self) -> None:
        """Print no more output of processes; their logs still contain it."""
        with self._lock:
            self._print_waiting()
            self._quiet = True
            self._held.clear()

    def picture(self) -> list[Text]:
        return self._picture

    def _refresh(self, now: float) -> None:
        width, height = self.console.size
        room = max(3, int(height * _SHARE))
        self._picture = render(self.board, width, room, now, self.question)
        self._last_picture = now
        self._live.refresh()

    def _print(self, source: tuple[int, str], lines: Sequence[str]) -> None:
        if not lines:
            return
        node_rank, name = source
        prefix = f"node{node_rank}/{name}".ljust(self._width) + " | "
        if not self.console.is_terminal:
            self.console.file.write("".join(f"{prefix}{printable(line)}\n" for line in lines))
            self.console.file.flush()
            return
        self._waiting += [labelled(prefix, node_rank, line) for line in lines]
        if not self.alive:
            self._print_waiting()

    def _print_waiting(self) -> None:
        # One print call for many lines saves redrawing the table below.
        with self._lock:
            if self._waiting:
                self._last_print = time.monotonic()
                block, self._waiting = Text("\n").join(self._waiting), []
                self.console.print(block, soft_wrap=True)


class _Below:
    """What ``rich.live`` draws below the printed lines: the table as last rendered."""

    def __init__(self, log: LiveLog):
        self.log = log

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.log.picture()


@dataclass
class _Held:
    """A traceback of one process, and the lines after it; printed at the time ``until``."""

    until: float  #: monotonic seconds
    lines: list[str]


def parsed(lines: Iterable[str]) -> list[Metric]:
    """Parse lines of a metrics file; skip lines that are not JSON objects."""
    return list(records(METRIC, lines))
