"""``gnnfleet logs``: log lines of all processes merged by time, from the nodes or from collected files."""

from __future__ import annotations

import heapq
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import attrgetter
from pathlib import Path

from launcher.errors import UsageError
from launcher.manage.node_views import OpenRun
from launcher.node.json_reader import record_in
from launcher.node.json_records import RESULT
from launcher.plan.model import LaunchPlan
from launcher.report.last_attempt import LastAttempt
from launcher.report.run_folder import FoundRun
from launcher.run.live_log import LinePrinter, LogLine, log_lines
from launcher.run.node_stream import NodeMessage, NodeStream
from launcher.text import duration

_FIRST_LINES = 10  # lines of each log that --follow shows first

_POLL = 0.2  # seconds between two looks whether all nodes have ended


@dataclass(frozen=True)
class LogFilter:
    """Selects log lines: of which node and rank, from what time, and how many."""

    node: int | None = None
    rank: int | None = None
    since: float | None = None  #: seconds since the epoch, by this machine's clock
    last: int | None = None  #: number of last lines; None: all
    every: bool = False  #: also logs of supervisors, graph servers and rank runners
    servers: bool = False  #: logs of graph servers instead of ranks

    def of(self, plan: LaunchPlan) -> LogFilter:
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

    def skip(self, tail: int | None, offset: float) -> list[str]:
        """Return the options of ``watch.py`` that skip lines: all but the last ``tail`` of a file, and earlier ones.

        ``offset``: seconds that the node's clock is ahead of this machine's.
        """
        since = ["--since", f"{self.since + offset:.3f}"] if self.since is not None else []
        return since + (["--tail", str(tail)] if tail is not None else [])


def print_logs(run: OpenRun, wanted: LogFilter, printer: LinePrinter) -> dict[int, str]:
    """Print all log lines written so far, merged by time; return why lines of a node are missing, by node_rank."""
    plan = run.found.needed_plan
    missing: dict[int, str] = {}
    sources: list[Iterator[LogLine]] = []
    remote = []
    ranks, wanted = wanted.nodes(plan), wanted.of(plan)
    for k in ranks:
        folder = collected_logs(run.found, k)
        if folder is not None:
            sources += _lines_here(folder, k, wanted)
        else:
            remote.append(k)
    if remote:
        clocks = {k: view.offset for k, view in run.views(remote).items()} if wanted.since is not None else {}
        only = ["--only", ",".join(wanted.patterns)]
        views = run.views(remote, lambda k: only + wanted.skip(wanted.last, clocks.get(k, 0.0)))
        hub = LastAttempt.of({k: view.report for k, view in views.items()}, plan.lead).hub
        missing = {k: view.unreachable for k, view in views.items() if view.unreachable}
        for k, view in views.items():
            offset = view.offset
            if hub in views and views[hub].now and (k == hub or view.cluster_offset):
                offset = view.cluster_offset + views[hub].offset
            sources += [log_lines(lines, k, file, offset) for file, lines in view.lines.items()]
    merged: Iterable[LogLine] = heapq.merge(*sources, key=attrgetter("when"))
    if wanted.last is not None:
        merged = list(merged)[-wanted.last :] if wanted.last else []
    for line in merged:
        printer.put([line])
    return missing


def follow_logs(run: OpenRun, wanted: LogFilter, printer: LinePrinter) -> dict[int, str]:
    """Print new log lines until every node has ended or the user presses Ctrl-C.

    Starts with the last ten lines of each log, unless ``wanted`` has ``last`` or ``since``. Returns why lines of a node
    are missing, by node_rank: it could not be asked, or was out of reach for ``run.lost_after`` seconds.
    """
    first = wanted.last if wanted.last is not None else None if wanted.since is not None else _FIRST_LINES
    limits = run.found.needed_config.run
    ranks, wanted = wanted.nodes(run.found.needed_plan), wanted.of(run.found.needed_plan)
    views = run.views(ranks)
    missing = {k: view.unreachable for k, view in views.items() if view.unreachable}

    def take(message: NodeMessage) -> None:  # in the thread of the node
        k, values = message.node_rank, message.values
        if "file" in values:
            printer.put(list(log_lines(values["lines"], k, values["file"])))
        elif "broken" in values or "bug" in values:
            missing[k] = values.get("broken") or values["bug"]
        elif "back" in values:
            missing.pop(k, None)

    stop = threading.Event()
    streams = [
        NodeStream(
            view.node,
            run.transports[k],
            take,
            stop,
            connect_timeout=limits.connect_timeout,
            only=",".join(wanted.patterns),
            skip=wanted.skip(first, view.offset),
        )
        for k, view in views.items()
        if not view.unreachable and not view.absent
    ]
    for stream in streams:
        stream.start()
    with suppress(KeyboardInterrupt):
        while any(
            stream.is_alive() and time.monotonic() - (stream.broken_since or math.inf) <= limits.lost_after
            for stream in streams
        ):
            time.sleep(_POLL)
            for stream in streams:
                stream.close_if_silent(time.monotonic())
    stop.set()
    return missing


def collected_logs(found: FoundRun, node_rank: int) -> Path | None:
    """Return the folder on this machine with all logs of a node; None if some logs are not collected."""
    folder = found.folder / "logs" / f"node{node_rank}" if found.folder else None
    return folder if folder is not None and (folder / "result.json").is_file() else None


def all_collected(found: FoundRun) -> bool:
    return found.plan is not None and all(collected_logs(found, node.node_rank) for node in found.plan.nodes)


def _lines_here(folder: Path, node_rank: int, wanted: LogFilter) -> list[Iterator[LogLine]]:
    """Return one iterator over lines for each collected log of a node, with times by the lead node's clock."""
    result = record_in(RESULT, str(folder / "result.json")) or {}
    offset = float(result.get("clock_offset") or 0.0)
    files = sorted({file for pattern in wanted.patterns for file in folder.glob(pattern.removeprefix("logs/"))})
    sources: list[Iterator[LogLine]] = []
    for file in filter(Path.is_file, files):  # opening a pipe would block
        lines = log_lines(file.read_text("utf-8", "replace").split("\n")[:-1], node_rank, file.name, offset)
        sources.append(line for line in lines if wanted.since is None or line.when >= wanted.since)
    return sources


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
