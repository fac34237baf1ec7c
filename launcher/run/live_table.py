"""Renders the live state as a table that fits the terminal, with nodes that need attention first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rich.text import Text

from launcher.report.device_use import DeviceUse, mean, together
from launcher.run.live_state import OLD_HEARTBEAT, Board, NodeRow, RankRow
from launcher.text import GAP, Column, between_words, fitting, spans, valued

_FINDINGS = 2  # most findings shown

_STYLES = ("bold red", "yellow", "yellow", "")  # by severity


#: Severity (from ``Board.severity``, 0 to 3; 0 is the most urgent), and a cell per column.
Row = tuple[int, tuple[str, ...]]

#: About the last steps of ranks, with the cells of ``step_cells``; those without a value are left out.
STEP_COLUMNS = (
    Column("epoch", 6, right=True),
    Column("step", 7, right=True),
    Column("seeds/s", 4, right=True),
    Column("no step for", 8, right=True, optional=True),
    Column("loss", 5, right=True),
    Column("mostly", 2, right=True, optional=True),
    Column("remote", 2, right=True),
    Column("gpu ms", 2, right=True, optional=True),
    Column("gpu", 4, right=True, optional=True),
    Column("gpu memory", 3, right=True, optional=True),
)

_COLUMNS = (
    Column("node", 9),
    Column("host", 1),
    Column("rank", 8, right=True),
    Column("state", 9),
    *(replace(column, optional=True) for column in STEP_COLUMNS),
    Column("heard", 3, right=True, optional=True),
)


def render(board: Board, width: int, height: int, now: float, question: Sequence[str] = ()) -> list[Text]:
    """Render the board in at most ``height`` lines of ``width`` columns; ``now`` in monotonic seconds."""
    head = list(between_words(Text(header(board, now), "bold"), width))
    below = [Text(f"! {text}", "yellow") for text in board.findings[-_FINDINGS:]]
    below = [line for text in below for line in between_words(text, width)]
    below += [line for text in question for line in between_words(Text(text, "bold"), width)]
    room = max(1, height - 1 - len(head) - len(below))
    lines = [*head, *_table(*_rows(board, now, room), width), *below]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height)]


def header(board: Board, now: float) -> str:
    """Return the title line: run id, elapsed time, step of the slowest rank, seeds/s of all ranks, remaining time."""
    words = [board.run_id, clock(now - board.began), *filter(None, [board.attempt, board.waiting])]
    row = board.slowest()
    if row is not None:
        words += [f"epoch {_of(row.epoch, board.epochs)} step {_of((row.step or 0) + 1, row.steps)}"]
        idle = board.idle_s()
        words += [f"no step for {clock(idle)}" if idle else f"{board.seeds_per_s():,.0f} seeds/s"]
    left = board.seconds_left(now)
    if left is not None:
        words.append(f"about {clock(left)} left")
    return " · ".join(words)


def clock(seconds: float) -> str:
    """Return a duration as ``3:05`` or ``1:00:05``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rows(board: Board, now: float, room: int) -> tuple[list[Row], str]:
    """Return at most ``room`` table rows, and a text about the nodes without a row.

    A row for each rank if they fit, else for each node, else for the nodes that need most attention.
    """
    nodes = sorted(board.nodes.values(), key=lambda node: (board.severity(node.node_rank, now), node.node_rank))
    by_rank = sum(max(1, len(node.ranks)) for node in nodes) <= room
    shown, rest = (nodes, []) if by_rank or len(nodes) <= room else (nodes[: room - 1], nodes[room - 1 :])
    rows = []
    for node in shown if rest else sorted(nodes, key=lambda node: node.node_rank):
        ranks = [board.ranks[rank] for rank in node.ranks]
        severity, age = board.severity(node.node_rank, now), node.age(now)
        for i, group in enumerate([[row] for row in ranks] if by_rank and ranks else [ranks]):
            name = ("", "") if i else (f"node{node.node_rank}", node.host)
            epoch, step, *steps = step_cells(group, board.epochs)
            widest = max((2 * len(str(row.steps)) + 1 for row in group if row.step is not None), default=0)
            about = (spans([row.rank for row in group]), _state(node, group, age), epoch, step.rjust(widest), *steps)
            rows.append((severity, (*name, *about, "" if age is None else f"{age:.0f} s")))
    return rows, _rest(board, rest) if rest else ""


def step_cells(rows: Sequence[RankRow], epochs: int | None = None) -> tuple[str, ...]:
    """Return the cells of ``STEP_COLUMNS`` for some ranks: the place of the slowest one, sums and means.

    ``epochs``: that the run trains; None to leave it out.
    """
    stepping = [row for row in rows if row.step is not None]
    slowest = min(stepping, key=lambda row: row.place, default=None)
    speeds = [row.seeds_per_s for row in stepping if not row.idle and row.seeds_per_s is not None]
    device = together([row.device for row in rows if row.device]) or DeviceUse()
    return (
        _of(slowest.epoch, epochs) if slowest else "",
        _of((slowest.step or 0) + 1, slowest.steps) if slowest else "",
        _shown(sum(speeds) if speeds else None, "{:,.0f}"),
        _shown(max((row.idle_s for row in stepping if row.idle), default=None), "{:.0f} s"),
        _shown(mean(row.loss for row in stepping), "{:.4f}"),
        slowest.most if slowest else "",
        _shown(mean(row.remote_share for row in stepping), "{:.0%}"),
        _shown(device.step_s and 1000 * device.step_s, "{:.3g}"),
        device.share,
        device.memory,
    )


def _state(node: NodeRow, rows: list[RankRow], age: float | None) -> str:
    if node.connection_error:
        return "unreachable"
    if age is not None and age > OLD_HEARTBEAT:
        return "silent"
    ended = {row.ended for row in rows}
    if "failed" in ended:
        return "failed"
    return "done" if ended == {"done"} else node.state


def _rest(board: Board, nodes: list[NodeRow]) -> str:
    """Return ``… 52 more nodes: training, epoch 3 step 17/50 or further``."""
    states = sorted({node.state for node in nodes})
    rows = [board.ranks[rank] for node in nodes for rank in node.ranks if board.ranks[rank].step is not None]
    slowest = min(rows, key=lambda row: row.place, default=None)
    where = f", {board.at(slowest)} or further" if slowest else ""
    return f"… {len(nodes)} more nodes: {', '.join(states)}{where}"


def _table(rows: list[Row], rest: str, width: int) -> list[Text]:
    columns, cells_of = valued(_COLUMNS, [cells for _, cells in rows])
    lines = [[column.title for column in columns], *cells_of]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    shown = fitting(columns, widths, width)
    table = []
    for cells, style in zip(lines, ["dim", *(_STYLES[severity] for severity, _ in rows)], strict=True):
        padded = (cells[i].rjust(widths[i]) if columns[i].right else cells[i].ljust(widths[i]) for i in shown)
        table.append(Text((" " * GAP).join(padded).rstrip(), style))
    return [*table, *([Text(rest, "dim")] if rest else [])]


def _of(number: int | None, total: int | None) -> str:
    return "" if number is None else f"{number}/{total}" if total else str(number)


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) if math.isfinite(value) else str(value)
