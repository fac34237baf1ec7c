"""Builds the timeline chart of a run: stages of the launch, lifetime of each process, events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.report.events import finding_words
from launcher.report.html.page import Chart
from launcher.report.html.record import RunRecord

_ROWS = 48  # up to this number of processes each gets a row; else each node does

_COLOURS = {"ended": "#009e73", "failed": "#d55e00", "stopped": "#9aa0a6", "running": "#56b4e9", "stage": "#0072b2"}

#: Text of the marks, by kind of event; other events have no mark.
_MARKS = {
    "server-ready": "graph server ready",
    "server-compiles": "graph server compiles its kernels",
    "line-lost": "connection lost",
    "line-back": "connection restored",
    "node-lost": "node lost",
    "node-back": "node back",
    "start-failed": "could not start",
    "server-restart": "graph server started again",
    "interrupted": "interrupted",
    "detached": "launcher detached",
    "given-up": "launch aborted",
}

_BAD = frozenset({"node-lost", "start-failed", "line-lost", "nan", "stall", "given-up"})


@dataclass(frozen=True)
class _Span:
    """A bar in the timeline: a stage of the launch, or a process's lifetime. Times are seconds since the launch."""

    row: str
    begin: float
    end: float
    state: str  #: ended, failed, stopped, running, stage
    words: str


@dataclass(frozen=True)
class _Mark:
    """A mark in the timeline for an event or a finding; ``at`` is in seconds since the launch."""

    row: str
    at: float
    words: str
    bad: bool


def timeline_chart(record: RunRecord) -> Chart | None:
    """Return a chart with a row for the launcher and for each process, and marks for events and findings.

    If there are many processes, each node has one row for all of its processes. None if there is nothing to show.
    """
    # Stages of the launch; none if the run was collected on another machine.
    spans = []
    stages = [event for event in record.events if event.get("kind") == "stage"]
    times = [_since(record, event) for event in stages]
    ends = [*times[1:], _end(record)][: len(times)]
    for event, begin, end in zip(stages, times, ends, strict=True):
        if event.get("stage") != "end":
            spans.append(_Span("launcher", begin, max(begin, end), "stage", str(event.get("stage"))))
    spans += _lives(record)
    if not spans:
        return None

    # Events, findings and the first failure.
    marks = []
    for event in record.events:
        kind = str(event.get("kind"))
        if kind in _MARKS:
            more = event.get("why") or event.get("reason") or event.get("text") or ""
            words = _MARKS[kind] + (f": {more}" if more else "")
            marks.append(_Mark(_row(record, event), _since(record, event), words, kind in _BAD))
    for finding in record.result.get("findings", ()):
        kind = str(finding.get("kind"))
        marks.append(_Mark(_row(record, finding), _since(record, finding), finding_words(finding), kind in _BAD))
    if record.first and record.first.ended:
        row, at = f"node{record.first.node_rank}/{record.first.name}", record.first.ended - record.started
        marks.append(_Mark(row, at, f"first failure: {record.first.sentence}", True))

    rows = list(dict.fromkeys([*(span.row for span in spans), *(mark.row for mark in marks)]))
    data: list[dict[str, Any]] = []
    for state, colour in _COLOURS.items():
        shown = [span for span in spans if span.state == state]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": "launcher" if state == "stage" else state,
                "y": [span.row for span in shown],
                "base": [round(span.begin, 3) for span in shown],
                "x": [round(max(0.05, span.end - span.begin), 3) for span in shown],
                "text": [span.words if state == "stage" else "" for span in shown],
                "textposition": "inside",
                "insidetextanchor": "start",
                "customdata": [[span.words, round(span.end - span.begin, 2)] for span in shown],
                "hovertemplate": "%{y}: %{customdata[0]}<br>%{customdata[1]} s<extra></extra>",
                "marker": {"color": colour, "line": {"width": 1, "color": "rgba(128,128,128,0.4)"}},
            }
        )
    data += [_points("event", [mark for mark in marks if not mark.bad], "#e69f00")]
    data += [_points("problem", [mark for mark in marks if mark.bad], "#d55e00")]
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds since the launch"}},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1]},
        "hovermode": "closest",
    }
    return Chart("timeline", "Timeline", [trace for trace in data if trace["y"]], layout, 150 + 24 * len(rows))


def _lives(record: RunRecord) -> Iterator[_Span]:
    """Yield the lifetimes of all processes; if there are many, one per node.

    Times are by this machine's clock if the run has ended and did not restart, else by the nodes' clocks.
    """
    lives = []
    for outcome in () if record.result.get("restarts") else record.outcomes:
        if outcome.started and outcome.ended:
            state = "failed" if outcome.failed and not outcome.stopped else "stopped" if outcome.stopped else "ended"
            row = f"node{outcome.node_rank}/{outcome.name}"
            begin, end = outcome.started - record.started, outcome.ended - record.started
            lives.append(_Span(row, begin, end, state, outcome.reason))
    if not lives:
        open_spans: dict[str, float] = {}
        for event in record.events:
            row = f"node{event.get('node_rank')}/{event.get('name')}"
            if event.get("kind") == "process-start":
                open_spans[row] = _since(record, event)
            elif event.get("kind") == "process-exit" and row in open_spans:
                state = "failed" if event.get("failed") else "stopped" if event.get("stopped") else "ended"
                lives.append(_Span(row, open_spans.pop(row), _since(record, event), state, state))
        last = _end(record)
        lives += [_Span(row, begin, max(begin, last), "running", "running") for row, begin in open_spans.items()]
    if len(lives) <= _ROWS:
        yield from sorted(lives, key=lambda span: _order(span.row))
        return
    by_node: dict[str, list[_Span]] = {}
    for span in lives:
        by_node.setdefault(span.row.partition("/")[0], []).append(span)
    for row in sorted(by_node, key=_order):
        spans = by_node[row]
        worst = next((span for span in spans if span.state == "failed"), spans[0])
        yield _Span(row, min(s.begin for s in spans), max(s.end for s in spans), worst.state, worst.words)


def _row(record: RunRecord, event: Mapping[str, Any]) -> str:
    k, rank, name = event.get("node_rank"), event.get("rank"), event.get("name")
    if k is None:
        return "launcher"
    if rank is not None:
        return f"node{k}/rank{rank}"
    return f"node{k}/{name or ('server' if str(event.get('kind')).startswith('server') else 'node')}"


def _since(record: RunRecord, event: Mapping[str, Any]) -> float:
    return float(event["t"]) - record.started


def _end(record: RunRecord) -> float:
    """Return the time of the last event or metrics line, in seconds since the launch."""
    times = [_since(record, event) for event in record.events]
    lines = [points[-1][0] - record.started for points in record.metrics.series.speed.values() if points]
    return max([*times, *lines, 0.0])


def _order(row: str) -> tuple[int, str, int]:
    node, _, name = row.partition("/")
    digits = "".join(filter(str.isdigit, name))
    return int("".join(filter(str.isdigit, node)) or 0), name.rstrip("0123456789"), int(digits or 0)


def _points(name: str, marks: Sequence[_Mark], colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [round(mark.at, 3) for mark in marks],
        "y": [mark.row for mark in marks],
        "customdata": [mark.words for mark in marks],
        "hovertemplate": "%{x:.1f} s: %{customdata}<extra></extra>",
        "marker": {"color": colour, "size": 11, "symbol": "diamond", "line": {"width": 1, "color": "#fff"}},
    }
