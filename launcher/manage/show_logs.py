"""``gnnfleet logs``: log lines of all processes merged by time, from the nodes or from collected files."""

from __future__ import annotations

import heapq
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from operator import attrgetter
from pathlib import Path

from rich.console import Console

from launcher.errors import TransportError, UsageError
from launcher.manage.node_views import OpenRun, if_run_exists
from launcher.node.json_reader import record_in
from launcher.node.json_records import RESULT, Damaged, message_in
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.last_attempt import LastAttempt
from launcher.report.run_folder import FoundRun
from launcher.report.verdict import NodeView
from launcher.run.live_log import STAMP, labelled
from launcher.text import duration, printable
from launcher.transport.base import Transport

_FIRST_LINES = 10  # lines of each log that --follow shows first

_RETRY = 2.0  # seconds between attempts to reconnect

_NO_PROGRAM = (126, 127)  # exit statuses of a shell for a program that it cannot start


@dataclass(frozen=True)
class Wanted:
    """Selects log lines: of which node and rank, from what time, and how many."""

    node: int | None = None
    rank: int | None = None
    since: float | None = None  #: seconds since the epoch, by this machine's clock
    last: int | None = None  #: number of last lines; None: all
    every: bool = False  #: also logs of supervisors, graph servers and rank runners
    servers: bool = False  #: logs of graph servers instead of ranks

    def of(self, plan: LaunchPlan) -> Wanted:
        """Return this selection, changed to the logs of graph servers if the run has only servers."""
        return replace(self, servers=True) if plan.serve_only else self

    def nodes(self, plan: LaunchPlan) -> list[int]:
        """Return the selected node_ranks. Raises UsageError if the node or rank does not exist."""
        ranks = [node.node_rank for node in plan.nodes]
        if self.node is not None and self.node not in ranks:
            raise UsageError(f"--node {self.node}: the run has nodes 0 to {len(ranks) - 1}")
        if self.rank is not None and self.rank >= plan.world_size:
            has = "no ranks, only graph servers" if plan.serve_only else f"ranks 0 to {plan.world_size - 1}"
            raise UsageError(f"--rank {self.rank}: the run has {has}")
        found = [node for node in plan.nodes if self.node in (None, node.node_rank)]
        found = [node for node in found if self.rank is None or self.rank in node.ranks]
        if not found:
            (home,) = (node.node_rank for node in plan.nodes if self.rank in node.ranks)
            raise UsageError(f"rank {self.rank} is on node{home}, not on node{self.node}")
        return [node.node_rank for node in found]

    @property
    def patterns(self) -> list[str]:
        """Glob patterns of the selected log files, relative to a node's run folder."""
        if self.rank is not None:
            return [f"logs/rank{self.rank}.log"]
        return ["logs/*.log"] if self.every else ["logs/server.log" if self.servers else "logs/rank*.log"]


@dataclass(frozen=True)
class Line:
    when: float  #: seconds since the epoch, by this machine's clock as far as known
    node_rank: int
    name: str  #: rank3, server, …
    text: str


def print_logs(run: OpenRun, wanted: Wanted, printer: LinePrinter) -> dict[int, str]:
    """Print all log lines written so far, merged by time; return why lines of a node are missing, by node_rank."""
    plan = run.found.needed_plan
    missing: dict[int, str] = {}
    sources: list[Iterator[Line]] = []
    remote = []
    ranks, wanted = wanted.nodes(plan), wanted.of(plan)
    for k in ranks:
        folder = collected_logs(run.found, k)
        if folder is not None:
            sources += _lines_here(folder, k, wanted)
        else:
            remote.append(k)
    if remote:
        offsets = _clock_offsets(run, wanted, remote)
        views = run.views(remote, lambda k: _options(wanted, wanted.last, offsets.get(k, 0.0)))
        hub = LastAttempt.of({k: view.report for k, view in views.items()}, plan.lead).hub
        missing = {k: view.unreachable for k, view in views.items() if view.unreachable}
        sources += [lines for view in views.values() for lines in _lines_of(view, views.get(hub))]
    merged: Iterable[Line] = heapq.merge(*sources, key=attrgetter("when"))
    if wanted.last is not None:
        merged = list(merged)[-wanted.last :] if wanted.last else []
    for line in merged:
        printer.put(line)
    return missing


def follow_logs(run: OpenRun, wanted: Wanted, printer: LinePrinter) -> dict[int, str]:
    """Print new log lines until every node has ended or the user presses Ctrl-C.

    Starts with the last ten lines of each log, unless ``wanted`` has ``last`` or ``since``. Returns why nodes were
    lost, by node_rank.
    """
    first = wanted.last if wanted.last is not None else None if wanted.since is not None else _FIRST_LINES
    stop = threading.Event()
    plan = run.found.needed_plan
    ranks, wanted = wanted.nodes(plan), wanted.of(plan)
    offsets = _clock_offsets(run, wanted, ranks)
    timeout = run.found.needed_config.run.connect_timeout
    followers = [
        _Follower(plan.nodes[k], run.attempts[k], _options(wanted, first, offsets.get(k, 0.0)), printer, stop, timeout)
        for k in ranks
    ]
    for follower in followers:
        follower.start()
    try:
        for follower in followers:
            while follower.is_alive():
                follower.join(0.5)
    except KeyboardInterrupt:
        stop.set()
    return {follower.node.node_rank: follower.lost for follower in followers if follower.lost}


class _Follower(threading.Thread):
    """Prints the log lines of one node. After a lost connection it reconnects and continues after the last line."""

    def __init__(
        self,
        node: NodePlan,
        transport: Transport | TransportError,
        options: list[str],
        printer: LinePrinter,
        stop: threading.Event,
        connect_timeout: float,
    ):
        super().__init__(daemon=True, name=f"logs-node{node.node_rank}")
        self.node, self.transport, self.options, self.printer, self.stop = node, transport, options, printer, stop
        self.connect_timeout = connect_timeout
        self.offsets: dict[str, int] = {}
        self.lost = ""  #: why the node's lines are missing
        self._over = False

    def run(self) -> None:
        if isinstance(self.transport, TransportError):
            self.lost = self.transport.message
            return
        while not self._over and not self.stop.is_set():
            try:
                words = ["--offsets", json.dumps(self.offsets)] if self.offsets else []
                status = self.transport.stream(
                    if_run_exists(self.node, self.node.program("watch", self.node.run_dir, *self.options, *words)),
                    self._handle_line,
                    self.stop,
                )
                if self._over or self.stop.is_set() or status == 0:
                    return
                self.lost = f"watch.py on the node ended with exit status {status}"
                if status in _NO_PROGRAM:
                    return
            except (TransportError, Damaged) as error:
                self.lost = str(error)
            if self.stop.wait(_RETRY):
                return
            try:
                self.transport.connect(self.connect_timeout)
            except TransportError as error:
                self.lost = error.message
                return
            self.lost = ""

    def _handle_line(self, text: str) -> None:
        message = message_in(text)
        if message is None:
            return
        self._over = "result" in message or "lost" in message
        if "file" in message:
            self.offsets[message["file"]] = message["offset"]
            for line in parsed(message["lines"], self.node.node_rank, process_name(message["file"]), 0.0):
                self.printer.put(line)


def collected_logs(found: FoundRun, node_rank: int) -> Path | None:
    """Return the folder on this machine with all logs of a node; None if some logs are not collected."""
    folder = found.folder / "logs" / f"node{node_rank}" if found.folder else None
    return folder if folder is not None and (folder / "result.json").is_file() else None


def all_collected(found: FoundRun) -> bool:
    return found.plan is not None and all(collected_logs(found, node.node_rank) for node in found.plan.nodes)


def _clock_offsets(run: OpenRun, wanted: Wanted, ranks: Sequence[int]) -> dict[int, float]:
    """Return by how many seconds each node's clock is ahead of this machine's; {} without --since."""
    return {k: view.offset for k, view in run.views(ranks).items()} if wanted.since is not None else {}


def _options(wanted: Wanted, tail: int | None, offset: float) -> list[str]:
    """Return the options of ``watch.py`` for the wanted lines; ``offset``: seconds that the node's clock is ahead."""
    words = ["--only", ",".join(wanted.patterns)]
    words += ["--since", f"{wanted.since + offset:.3f}"] if wanted.since is not None else []
    return words + (["--tail", str(tail)] if tail is not None else [])


def _lines_of(view: NodeView, hub: NodeView | None) -> list[Iterator[Line]]:
    """Return one iterator over lines for each log of a node, with times by this machine's clock."""
    offset = view.offset
    if hub is not None and hub.now and (hub is view or view.cluster_offset):
        offset = view.cluster_offset + hub.offset
    return [parsed(lines, view.node.node_rank, process_name(file), offset) for file, lines in view.lines.items()]


def _lines_here(folder: Path, node_rank: int, wanted: Wanted) -> list[Iterator[Line]]:
    """Return one iterator over lines for each collected log of a node, with times by the lead node's clock."""
    result = record_in(RESULT, str(folder / "result.json")) or {}
    offset = float(result.get("clock_offset") or 0.0)
    files = sorted({file for pattern in wanted.patterns for file in folder.glob(pattern.removeprefix("logs/"))})
    sources = []
    for file in files:
        lines = parsed(file.read_text("utf-8", "replace").split("\n")[:-1], node_rank, file.stem, offset)
        sources.append(line for line in lines if wanted.since is None or line.when >= wanted.since)
    return list(sources)


def parsed(lines: Iterable[str], node_rank: int, name: str, offset: float) -> Iterator[Line]:
    """Yield the lines of one log, with their times reduced by ``offset`` seconds.

    A line without a time stamp has the time of the previous one.
    """
    when = 0.0
    for line in lines:
        stamp = STAMP.match(line)
        if stamp:
            stamped = datetime.fromisoformat(stamp[1]).replace(tzinfo=timezone.utc).timestamp() - offset
            when = max(when, stamped)  # keeps the order if the clock was set back
        yield Line(when, node_rank, name, line[stamp.end() :] if stamp else line)


def process_name(file: str) -> str:
    """Return ``rank3`` for ``logs/rank3.log``."""
    return file.removeprefix("logs/").removesuffix(".log")


class LinePrinter:
    """Prints log lines, each with its node and process in front. Thread-safe."""

    def __init__(self, console: Console, plan: LaunchPlan, *, times: bool, every: bool):
        self.console, self.times = console, times
        names = [f"node{node.node_rank}/rank{rank}" for node in plan.nodes for rank in node.ranks]
        names += [f"node{node.node_rank}/server" for node in plan.nodes if node.server and plan.serve_only]
        names += [f"node{node.node_rank}/supervisor" for node in plan.nodes] if every else []
        self._width = max(map(len, names), default=0)
        self._lock = threading.Lock()

    def put(self, line: Line) -> None:
        prefix = f"node{line.node_rank}/{line.name}".ljust(self._width) + " | "
        if self.times:
            prefix = f"{_local(line.when)} {prefix}"
        with self._lock:
            if self.console.is_terminal:
                self.console.print(labelled(prefix, line.node_rank, line.text), soft_wrap=True)
            else:
                self.console.file.write(f"{prefix}{printable(line.text)}\n")
                self.console.file.flush()


def _local(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%H:%M:%S.%f")[:-3] if when else " " * 12


def since_when(text: str, now: float | None = None) -> float:
    """Parse ``10m``, ``90s``, ``2h``, ``12:30``, ``2026-11-20 12:30`` or ISO 8601 into seconds since the epoch.

    Times without zone are local; a time of day without date is the most recent one. Raises UsageError.
    """
    now = time.time() if now is None else now
    ago = duration(text)
    if ago:
        return now - ago
    try:
        if re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M").time()
            then = datetime.combine(datetime.fromtimestamp(now).date(), clock)
            return (then if then.timestamp() <= now else then - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(re.sub(r"Z$", "+00:00", text)).timestamp()
    except ValueError:
        raise UsageError(
            f"--since {text}: give how long ago (10m, 90s, 2h, 1d) or when (12:30, 2026-11-20T12:30)"
        ) from None


def missing_words(missing: Mapping[int, str], plan: LaunchPlan) -> list[str]:
    return [f"{plan.nodes[k].label}: its log lines could not be read: {why}" for k, why in sorted(missing.items())]
