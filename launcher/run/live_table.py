"""Renders the live state as a table that fits the terminal, with nodes that need attention first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from launcher.report.device_use import DeviceUse, together
from launcher.run.live_state import OLD_HEARTBEAT, Board, NodeRow, RankRow, mean
from launcher.text import between_words, spans

_GAP = "  "

_FINDINGS = 2  # most findings shown

_STYLES = ("bold red", "yellow", "yellow", "")  # by severity


@dataclass(frozen=True)
class Line:
    """The cells of one table row, as texts. ``severity``: from ``Board.severity``, 0 to 3; 0 is the most urgent."""

    node: str
    host: str
    ranks: str
    state: str
    epoch: str
    step: str
    speed: str
    idle: str
    loss: str
    most: str
    remote: str
    device_step: str
    device_share: str
    device_memory: str
    heartbeat: str
    severity: int


@dataclass(frozen=True)
class Column:
    """One column of the table, with a ``worth``: if the table is too wide, columns of the lowest worth are left out."""

    title: str
    text: Callable[[Line], str]  #: cell of a row
    worth: int
    left: bool = False  #: aligned left


_COLUMNS = (
    Column("node", lambda line: line.node, 9, left=True),
    Column("host", lambda line: line.host, 1, left=True),
    Column("rank", lambda line: line.ranks, 8),
    Column("state", lambda line: line.state, 9, left=True),
    Column("epoch", lambda line: line.epoch, 6),
    Column("step", lambda line: line.step, 7),
    Column("seeds/s", lambda line: line.speed, 4),
    Column("no step for", lambda line: line.idle, 8),
    Column("loss", lambda line: line.loss, 5),
    Column("mostly", lambda line: line.most, 2),
    Column("remote", lambda line: line.remote, 2),
    Column("gpu ms", lambda line: line.device_step, 2),
    Column("gpu", lambda line: line.device_share, 4),
    Column("gpu memory", lambda line: line.device_memory, 3),
    Column("heard", lambda line: line.heartbeat, 3),
)


def render(board: Board, width: int, height: int, now: float, question: Sequence[str] = ()) -> list[Text]:
    """Render the board in at most ``height`` lines of ``width`` columns; ``now`` in monotonic seconds."""
    head = list(between_words(Text(header(board, now), "bold"), width))
    below = [Text(f"! {text}", "yellow") for text in board.findings[-_FINDINGS:]]
    below = [line for text in below for line in between_words(text, width)]
    below += [line for text in question for line in between_words(Text(text, "bold"), width)]
    room = max(1, height - 1 - len(head) - len(below))
    lines = [*head, *_table(*_lines(board, now, room), width), *below]
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


def _lines(board: Board, now: float, room: int) -> tuple[list[Line], str]:
    """Return at most ``room`` table rows, and a text about the nodes without a row.

    A row for each rank if they fit, else for each node, else for the nodes that need most attention.
    """
    nodes = sorted(board.nodes.values(), key=lambda node: (board.severity(node.node_rank, now), node.node_rank))
    if sum(max(1, len(node.ranks)) for node in nodes) <= room:
        return [line for node in sorted(nodes, key=_node_rank) for line in _rank_lines(board, node, now)], ""
    if len(nodes) <= room:
        return [_node_line(board, node, now) for node in sorted(nodes, key=_node_rank)], ""
    shown, rest = nodes[: room - 1], nodes[room - 1 :]
    return [_node_line(board, node, now) for node in shown], _rest(board, rest)


def _node_rank(node: NodeRow) -> int:
    return node.node_rank


def _rank_lines(board: Board, node: NodeRow, now: float) -> list[Line]:
    rows = [board.ranks[rank] for rank in node.ranks]
    if not rows:
        return [_node_line(board, node, now)]
    lines = [_line(board, node, [row], now) for row in rows]
    return [lines[0], *(_nameless(line) for line in lines[1:])]


def _nameless(line: Line) -> Line:
    return Line("", "", *(getattr(line, name) for name in list(Line.__dataclass_fields__)[2:]))


def _node_line(board: Board, node: NodeRow, now: float) -> Line:
    return _line(board, node, [board.ranks[rank] for rank in node.ranks], now)


def _line(board: Board, node: NodeRow, rows: list[RankRow], now: float) -> Line:
    stepping = [row for row in rows if row.step is not None]
    slowest = min(stepping, key=lambda row: row.place, default=None)
    age, device = node.age(now), together([row.device for row in rows if row.device]) or DeviceUse()
    return Line(
        node=f"node{node.node_rank}",
        host=node.host,
        ranks=spans([row.rank for row in rows]),
        state=_state(node, rows, age),
        epoch=_of(slowest.epoch, board.epochs) if slowest else "",
        step=_of((slowest.step or 0) + 1, slowest.steps).rjust(2 * len(str(slowest.steps)) + 1) if slowest else "",
        speed=_shown(_sum([row.seeds_per_s for row in stepping if not row.idle]), "{:,.0f}"),
        idle=_shown(max((row.idle_s for row in stepping if row.idle), default=None), "{:.0f} s"),
        loss=_shown(mean(row.loss for row in stepping), "{:.4f}"),
        most=slowest.most if slowest else "",
        remote=_shown(mean(row.remote_share for row in stepping), "{:.0%}"),
        device_step=_shown(device.step_s and 1000 * device.step_s, "{:.3g}"),
        device_share=device.share,
        device_memory=device.memory,
        heartbeat="" if age is None else f"{age:.0f} s",
        severity=board.severity(node.node_rank, now),
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


def _table(lines: list[Line], rest: str, width: int) -> list[Text]:
    columns = [column for column in _COLUMNS if any(column.text(line) for line in lines)]
    while _width(columns, lines) > width and len(columns) > 1:
        columns.remove(min(columns, key=lambda column: column.worth))
    widths = [_column_width(column, lines) for column in columns]
    titles = [column.title for column in columns]
    table = [Text(_joined(columns, titles, widths), "dim")]
    for line in lines:
        cells = [column.text(line) for column in columns]
        table.append(Text(_joined(columns, cells, widths), _STYLES[line.severity]))
    return [*table, *([Text(rest, "dim")] if rest else [])]


def _joined(columns: list[Column], cells: list[str], widths: list[int]) -> str:
    padded = (
        cell.ljust(width) if column.left else cell.rjust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    )
    return _GAP.join(padded).rstrip()


def _column_width(column: Column, lines: list[Line]) -> int:
    return max([len(column.title), *(len(column.text(line)) for line in lines)])


def _width(columns: list[Column], lines: list[Line]) -> int:
    return sum(_column_width(column, lines) for column in columns) + len(_GAP) * (len(columns) - 1)


def _of(number: int | None, total: int | None) -> str:
    return "" if number is None else f"{number}/{total}" if total else str(number)


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) if math.isfinite(value) else str(value)


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
