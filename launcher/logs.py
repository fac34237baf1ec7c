"""What a user sees while a run goes on: log lines with their origin, and folded progress."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from launcher.plan import LaunchPlan

_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")
_COLOURS = ("cyan", "magenta", "yellow", "blue", "green", "bright_red", "bright_cyan", "bright_magenta")
_EVERY = 5.0  # seconds between progress lines when not on a terminal
_NOT_SHOWN = ("supervisor", "server", "launcher")  # their logs are for when they fail; events come as words of our own
_TRACEBACK = re.compile(r"(\[rank\d+\]: ?)?[ |+]*(Exception Group )?Traceback \(most recent call last\):")
_HOLD = 3.0  # seconds a traceback is held back: if it ends the run, the report leads with the one that matters
Metric = Mapping[str, Any]


def without_stamp(line: str) -> str:
    """A log line without the time stamp that the rank runner put before it."""
    return _STAMP.sub("", line, count=1)


class LiveLog:
    """Prints lines whole and progress folded; all methods may be called from several threads."""

    def __init__(self, console: Console, plan: LaunchPlan):
        self.console = console
        self._where = {rank: node.node_rank for node in plan.nodes for rank in node.ranks}
        names = [f"node{node_rank}/rank{rank}" for rank, node_rank in self._where.items()]
        self._width = max(len(name) for name in [*names, "node0/server"])
        self._lock = threading.RLock()
        self._progress = Progress(self._where)
        self._last_line = 0.0
        self._quiet = False
        self._held: dict[tuple[int, str], _Held] = {}
        self._live = Live(self._progress, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveLog:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """A line of the launcher's own."""
        with self._lock:
            self.console.print(Text(text, style), soft_wrap=True)

    def file_lines(self, node_rank: int, file: str, lines: Sequence[str]) -> None:
        """New lines of a node's ``logs/<name>.log`` or ``metrics-rank<r>.jsonl``."""
        if file.startswith("metrics-"):
            for metric in _parsed(lines):
                self.metric(metric)
        elif file.startswith("logs/"):
            name = file[len("logs/") : -len(".log")]
            if name not in _NOT_SHOWN:
                self.process_lines(node_rank, name, [without_stamp(line) for line in lines])

    def process_lines(self, node_rank: int, name: str, lines: Sequence[str]) -> None:
        """Print ``node0/rank1 | text`` for each line; a traceback and what follows it wait a moment."""
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

    def tick(self, *, all_of_them: bool = False) -> None:
        """To be called now and then: prints tracebacks that did not end the run."""
        with self._lock:
            now = time.monotonic()
            for source in [source for source, held in self._held.items() if all_of_them or held.until <= now]:
                self._print(source, self._held.pop(source).lines)

    def quiet(self) -> None:
        """The run is being stopped: what processes say from now on is in their logs only."""
        with self._lock:
            self._quiet = True
            self._held.clear()
            self._progress.clear()

    def _print(self, source: tuple[int, str], lines: Sequence[str]) -> None:
        if lines:
            node_rank, name = source
            prefix = f"node{node_rank}/{name}".ljust(self._width) + " | "
            if self.console.is_terminal:
                colour = _COLOURS[node_rank % len(_COLOURS)]
                block = Text("\n").join(Text(prefix, colour) + Text.from_ansi(_CONTROL.sub("", line)) for line in lines)
                self.console.print(block, soft_wrap=True)
            else:
                self.console.file.write("".join(f"{prefix}{line}\n" for line in lines))
                self.console.file.flush()

    def metric(self, metric: Metric) -> None:
        """Take in one metrics line: steps are folded into the progress."""
        with self._lock:
            if self._quiet:
                return
            self._progress.take(metric)
            if metric.get("kind") == "step" and not self.console.is_terminal:
                self._line_now_and_then()

    def _line_now_and_then(self) -> None:
        if time.monotonic() - self._last_line >= _EVERY:
            self._last_line = time.monotonic()
            self.say(self._progress.in_one_line())


@dataclass
class _Held:
    until: float  #: monotonic seconds
    lines: list[str]


class Progress:
    """The last step of every rank, as lines for the bottom of the terminal."""

    def __init__(self, where: Mapping[int, int]):
        self._where = where
        self._steps: dict[int, Metric] = {}

    def take(self, metric: Metric) -> None:
        """Remember a step; the end of the run clears all lines."""
        if metric.get("kind") == "step":
            self._steps[metric["rank"]] = metric
        elif metric.get("kind") == "result":
            self.clear()

    def clear(self) -> None:
        """Nothing is under way any more."""
        self._steps.clear()

    def in_one_line(self) -> str:
        """All ranks together: where the slowest is, the mean loss, the sum of seeds per second."""
        steps = list(self._steps.values())
        slowest = min(steps, key=lambda step: (step["epoch"], step["step"]))
        loss = sum(step["loss"] for step in steps) / len(steps)
        speed = sum(step["seeds_per_s"] for step in steps)
        return f"{_at(slowest)}  loss {loss:.4f}  {speed:,.0f} seeds/s on {len(steps)} of {len(self._where)} ranks"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(1, console.height // 3)
        ranks = sorted(self._steps)
        for rank in ranks[:room]:
            step = self._steps[rank]
            place = f"node{self._where.get(rank, '?')}/rank{rank}"
            speed = f"{step['seeds_per_s']:,.0f} seeds/s"
            yield Text(
                f"{place}  {_at(step)}  loss {step['loss']:.4f}  {speed}", "bold", no_wrap=True, overflow="ellipsis"
            )
        if len(ranks) > room:
            yield Text(
                f"… {len(ranks) - room} more ranks; together: {self.in_one_line()}", no_wrap=True, overflow="ellipsis"
            )


def _at(step: Metric) -> str:
    width = len(str(step["steps"]))
    return f"epoch {step['epoch']} step {step['step'] + 1:>{width}}/{step['steps']}"


def _parsed(lines: Iterable[str]) -> list[Metric]:
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError as error:
            print(f"metrics line not understood ({error}): {line[:200]}", file=sys.stderr)
    return found
