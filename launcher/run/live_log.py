"""Prints log lines while a run is followed and, on a terminal, a live table below them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from launcher.plan.model import LaunchPlan
from launcher.run.live_table import Board, render
from launcher.text import printable

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z ?")  # at the beginning of the lines of a log

_COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "bright_red", "bright_cyan", "bright_magenta")

_EVERY = 5.0  # seconds between progress lines without live view

_TRACEBACK = re.compile(r"(\[rank\d+\]: ?)?[ |+]*(Exception Group )?Traceback \(most recent call last\):")

_HOLD = 3.0  # seconds before a traceback is printed: if the run ends meanwhile, the report shows the first failure

_REFRESH = 0.5  # seconds between redraws of the live view

_BATCH = 0.1  # seconds; lines of this period are printed together above the live view

_SHARE = 0.7  # largest fraction of the terminal's height for the live view

_Metric = Mapping[str, Any]


@dataclass(frozen=True)
class LogLine:
    """A line that a process of a run has printed."""

    when: float  #: seconds since the epoch; 0: unknown
    node_rank: int
    name: str  #: of the process: rank3, server, …
    text: str


def log_lines(lines: Iterable[str], node_rank: int, file: str, offset: float = 0.0) -> Iterator[LogLine]:
    """Yield the lines of a log, such as ``logs/rank3.log``, with their times reduced by ``offset`` seconds.

    A line without a time stamp has the time of the previous one.
    """
    name, when = file.rpartition("/")[2].removesuffix(".log"), 0.0
    for line in lines:
        stamp = _STAMP.match(line)
        if stamp:
            stamped = datetime.fromisoformat(stamp[1]).replace(tzinfo=timezone.utc).timestamp() - offset
            when = max(when, stamped)  # keeps the order if the clock was set back
        yield LogLine(when, node_rank, name, line[stamp.end() :] if stamp else line)


class LinePrinter:
    """Prints lines of processes, each behind its node and process, on a terminal in the node's colour. Thread-safe.

    ``times``: also show local times. ``every``: align them with those of supervisors, too.
    """

    def __init__(self, console: Console, plan: LaunchPlan, *, times: bool = False, every: bool = False):
        self.console, self.times = console, times
        names = [f"node{node.node_rank}/rank{rank}" for node in plan.nodes for rank in node.ranks]
        names += [f"node{node.node_rank}/server" for node in plan.nodes if node.server and plan.serve_only]
        names += [f"node{node.node_rank}/supervisor" for node in plan.nodes] if every else []
        self._width = max(map(len, names), default=0)
        self._lock = threading.Lock()

    def put(self, lines: Sequence[LogLine]) -> None:
        with self._lock:
            if self.console.is_terminal:
                shown = (
                    Text(self._label(line), _COLOURS[line.node_rank % len(_COLOURS)])
                    + Text.from_ansi(printable(line.text, colours=True))
                    for line in lines
                )
                self.console.print(Text("\n").join(shown), soft_wrap=True)
            else:
                self.console.file.write("".join(f"{self._label(line)}{printable(line.text)}\n" for line in lines))
                self.console.file.flush()

    def _label(self, line: LogLine) -> str:
        label = f"node{line.node_rank}/{line.name}".ljust(self._width) + " | "
        if not self.times:
            return label
        when = datetime.fromtimestamp(line.when).strftime("%H:%M:%S.%f")[:-3] if line.when else " " * 12
        return f"{when} {label}"


class LiveLog:
    """Prints the output of a run and, on a terminal, a live table of nodes and ranks below it. Thread-safe.

    ``plain``: print a progress line every few seconds instead of the table, as is done without a terminal.
    """

    def __init__(self, console: Console, plan: LaunchPlan, *, plain: bool = False, board: Board | None = None):
        self.console = console
        self.board = board or Board.of(plan)
        self.alive = console.is_terminal and not plain  #: shows a live view
        self.question: tuple[str, ...] = ()  #: text lines below the live view
        self._printer = LinePrinter(console, plan)
        self._lock = threading.RLock()
        self._last_progress = self._last_picture = self._last_print = 0.0
        self._quiet = False
        self._held: dict[tuple[int, str], _Held] = {}
        self._waiting: list[LogLine] = []
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

    def process_lines(self, lines: Sequence[LogLine]) -> None:
        """Print new lines of one process; delay a traceback and the lines after it by ``_HOLD`` seconds."""
        with self._lock:
            if self._quiet or not lines:
                return
            source = lines[0].node_rank, lines[0].name
            if source in self._held:
                self._held[source].lines += lines
                return
            first = next((i for i, line in enumerate(lines) if _TRACEBACK.match(line.text)), len(lines))
            if first < len(lines):
                self._held[source] = _Held(time.monotonic() + _HOLD, list(lines[first:]))
            self._print(lines[:first])

    def metric(self, metric: _Metric) -> None:
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
                self._print(self._held.pop(source).lines)
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

    def _print(self, lines: Sequence[LogLine]) -> None:
        if self.alive:
            self._waiting += lines
        elif lines:
            self._printer.put(lines)

    def _print_waiting(self) -> None:
        # One print call for many lines saves redrawing the table below.
        with self._lock:
            if self._waiting:
                self._last_print = time.monotonic()
                lines, self._waiting = self._waiting, []
                self._printer.put(lines)


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
    lines: list[LogLine]
