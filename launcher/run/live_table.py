"""The live table: the last known state of every node and rank of a run, with those that need attention first."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.text import Text

from launcher.node.diagnostics.vitals import IDLE, largest
from launcher.plan.model import LaunchPlan
from launcher.report.device_use import DeviceUse, known_number, mean, together
from launcher.report.events import finding_words
from launcher.text import GAP, Column, between_words, count, fitting, spans, valued

_Metric = Mapping[str, Any]

_RATE_AFTER = 3.0  # seconds of steps before the remaining time is estimated

_OLD_HEARTBEAT = 5.0  # seconds without heartbeat after which a node needs attention


@dataclass
class RankRow:
    """The last step that one rank has reported; a field is None while unknown."""

    rank: int
    node_rank: int
    epoch: int | None = None
    step: int | None = None  #: counted from 0
    steps: int | None = None  #: of this epoch
    loss: float | None = None
    seeds_per_s: float | None = None
    remote_share: float | None = None  #: fraction of gathered rows from other hosts, 0 to 1
    most: str = ""  #: the phase that takes most of a step, as ``forward 41%``
    device: DeviceUse | None = None  #: use of its GPU; None on a CPU
    idle_s: float = 0.0  #: seconds without progress, when its supervisor last reported
    t: float = -math.inf  #: time of the metrics line, by its node's clock
    ended: str = ""  #: 'done' or 'failed'

    def update(self, metric: _Metric) -> None:
        """Update all fields from a ``step`` metrics line or a heartbeat, unless it is older than the last one.

        A value of the wrong type becomes None.
        """
        t = known_number(metric.get("t"))
        if t is not None and t < self.t:
            return
        self.t = self.t if t is None else t
        for name in ("epoch", "step", "steps"):
            value = metric.get(name)
            setattr(self, name, value if isinstance(value, int) else None)
        self.idle_s = known_number(metric.get("idle_s")) or 0.0
        for name in ("loss", "seeds_per_s", "remote_share"):
            setattr(self, name, known_number(metric.get(name)))
        most = largest(metric.get("spent")) or metric.get("most")
        self.most = f"{most[0]} {most[1]:.0%}" if isinstance(most, list) and len(most) == 2 else ""
        self.device = DeviceUse.of(metric)

    @property
    def idle(self) -> bool:
        """Whether the rank has made no progress for a while since a step; its last speed does not hold any more."""
        return self.idle_s >= IDLE and self.step is not None and not self.ended

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, step), by which the progress of ranks is compared; -1 for an unknown number."""
        return self.epoch if self.epoch is not None else -1, self.step if self.step is not None else -1


@dataclass
class _NodeRow:
    node_rank: int
    host: str
    ranks: tuple[int, ...]
    state: str = "starting"
    heard: float | None = None  #: monotonic seconds of the last heartbeat
    connection_error: str = ""  #: '' while connected
    over: bool = False  #: the node has ended
    left: bool = False  #: the run goes on without this node

    def age(self, now: float) -> float | None:
        """Seconds between the node's last heartbeat and ``now``.

        None before the first heartbeat and after the node has ended.
        """
        return None if self.heard is None or self.over else max(0.0, now - self.heard)


@dataclass
class Board:
    """All nodes and ranks of a run. ``epochs``: number of epochs to train, None if unknown."""

    run_id: str
    nodes: dict[int, _NodeRow]
    ranks: dict[int, RankRow]
    epochs: int | None = None
    began: float = field(default_factory=time.monotonic)
    findings: list[str] = field(default_factory=list)  #: newest last
    suspects: set[int] = field(default_factory=set)  #: node_ranks named by findings
    attempt: str = ""  #: ``restart 1 of 3`` after a restart
    waiting: str = ""  #: what the run waits for in line, see ``waiting_words``
    generation: int = 0  #: number of the attempt
    _first: tuple[float, float] | None = None  # (monotonic, fraction done) at the first step seen

    @staticmethod
    def of(plan: LaunchPlan, elapsed: float = 0.0) -> Board:
        """Create an empty board for ``plan``, of a run that began ``elapsed`` seconds ago."""
        nodes = {node.node_rank: _NodeRow(node.node_rank, node.target, node.ranks) for node in plan.nodes}
        ranks = {rank: RankRow(rank, node.node_rank) for node in plan.nodes for rank in node.ranks}
        epochs = plan.train.epochs if plan.train else None
        return Board(plan.run_id, nodes, ranks, epochs, time.monotonic() - elapsed)

    def state(self, node_rank: int, state: Mapping[str, Any]) -> None:
        """Update a node and its ranks from a heartbeat, which is the content of the node's ``state.json``."""
        node = self.nodes[node_rank]
        node.heard, node.state, node.connection_error = time.monotonic(), str(state["state"]), ""
        restarts = state.get("restarts") or ()
        if restarts and restarts[-1]["generation"] > self.generation:
            restart = restarts[-1]
            self.generation, self._first = restart["generation"], None
            self.attempt = f"restart {restart['generation']} of {restart['of']}"
            for k, node in self.nodes.items():
                node.ranks, node.left = tuple(restart["ranks"].get(str(k), ())), k not in restart["nodes"]
            self.ranks = {rank: RankRow(rank, k) for k, node in self.nodes.items() for rank in node.ranks}
        if state.get("generation", 0) < self.generation:
            return  # from an earlier attempt, with other ranks
        for rank, metric in (state.get("ranks") or {}).items():
            self.metric({"kind": "step", **metric, "rank": int(rank)})

    def forget_ends(self, node_rank: int) -> None:
        """Mark the ranks of a node as running again, after a restart."""
        for rank in self.nodes[node_rank].ranks:
            self.ranks[rank].ended = ""

    def metric(self, metric: _Metric) -> None:
        """Update a rank from a ``step`` metrics line; ignore other lines and unknown ranks."""
        row = self.ranks.get(metric.get("rank", -1))
        if row is None or metric.get("kind") != "step":
            return
        row.update(metric)
        # Without epochs there is no fraction; computing it for each line would take the square of the number of ranks.
        if self._first is None and self.epochs and (done := self.fraction()) is not None:
            self._first = time.monotonic(), done

    def finding(self, finding: Mapping[str, Any]) -> None:
        """Add a finding of the supervisors; the node that it names then counts as needing attention."""
        self.findings.append(finding_words(finding))
        k = finding["node_rank"]
        self.suspects.add(k)
        if finding["kind"] == "server-lost" and k in self.nodes:
            self.nodes[k].left = True

    def connection_lost(self, node_rank: int, why: str) -> None:
        self.nodes[node_rank].connection_error = why

    def connection_restored(self, node_rank: int) -> None:
        self.nodes[node_rank].connection_error = ""

    def rank_ended(self, rank: int, *, failed: bool) -> None:
        self.ranks[rank].ended = "failed" if failed else "done"

    def ended(self, node_rank: int, state: str) -> None:
        """Mark a node as ended. ``state``: the state in the node's result, or ``lost``."""
        node = self.nodes[node_rank]
        node.state, node.over, node.connection_error = state, True, ""

    def returned(self, node_rank: int) -> None:
        """Mark a lost node as one whose supervisor was started again."""
        node = self.nodes[node_rank]
        node.state, node.over, node.connection_error = "starting", False, ""

    def stepping(self) -> list[RankRow]:
        return [row for row in self.ranks.values() if row.step is not None]

    def slowest(self) -> RankRow | None:
        """Return the rank with the lowest epoch and step."""
        return min(self.stepping(), key=lambda row: row.place, default=None)

    def fraction(self) -> float | None:
        """Return the fraction of all epochs that the slowest rank has completed, 0 to 1; None if unknown."""
        row = self.slowest()
        if row is None or not self.epochs or row.epoch is None or row.step is None or not row.steps:
            return None
        return min(1.0, (row.epoch - 1 + (row.step + 1) / row.steps) / self.epochs)

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining seconds of the run from the progress since the first step; None if unknown."""
        done = self.fraction()
        if done is None or self._first is None:
            return None
        since, at_first = now - self._first[0], done - self._first[1]
        return (1.0 - done) * since / at_first if since > _RATE_AFTER and at_first > 0 else None

    def seeds_per_s(self) -> float:
        """Return the seeds per second of the run: the sum over all ranks."""
        return sum(row.seeds_per_s or 0.0 for row in self.ranks.values() if not row.idle)

    def idle_s(self) -> float:
        """Return for how many seconds no rank has made progress; 0 if one has, or if it is less than ``IDLE``."""
        running = [row for row in self.ranks.values() if not row.ended]
        return min((row.idle_s for row in running), default=0.0) if all(row.idle for row in running) else 0.0

    def loss(self) -> float | None:
        """Return the mean loss of the ranks that have reported one; None if none has."""
        return mean(row.loss for row in self.ranks.values())

    def severity(self, node_rank: int, now: float) -> int:
        """Return how much attention a node needs: 0 most, 3 least."""
        node = self.nodes[node_rank]
        if node.state in ("failed", "lost") or any(self.ranks[rank].ended == "failed" for rank in node.ranks):
            return 0
        if node.connection_error or node.state == "restarting" or (node.age(now) or 0.0) > _OLD_HEARTBEAT:
            return 1
        return 2 if node_rank in self.suspects or any(self.ranks[rank].idle for rank in node.ranks) else 3

    def progress_line(self) -> str:
        """Return one line: the step of the slowest rank, the mean loss, and the seeds per second of all ranks."""
        row, loss = self.slowest(), self.loss()
        if row is None:
            return "no step yet" if self.ranks else "serving"
        shown = "" if loss is None else f"  loss {loss:.4f}"
        if idle := self.idle_s():
            return f"{self.at(row)}{shown}  no step for {idle:.0f} s"
        speed = f"{self.seeds_per_s():,.0f} seeds/s on {len(self.stepping())} of {len(self.ranks.values())} ranks"
        return f"{self.at(row)}{shown}  {speed}"

    def at(self, row: RankRow) -> str:
        """Return a rank's position as ``epoch 2 step 17/50``."""
        step = (row.step or 0) + 1
        return f"epoch {row.epoch} step {step}" + (f"/{row.steps}" if row.steps else "")

    def summary(self) -> str:
        """Return ``2 nodes, 4 ranks; epoch 2 of 10, step 17 of 50``."""
        running = [node for node in self.nodes.values() if not (node.over or node.left)]
        text = count(len(running), "node")
        if not self.ranks:
            return f"{text}, serving"
        text += f", {count(sum(len(node.ranks) for node in running), 'rank')}"
        row = self.slowest()
        if row is None:
            return f"{text}; {self.waiting or 'no step yet'}"
        of_epochs = f" of {self.epochs}" if self.epochs else ""
        of_steps = f" of {row.steps}" if row.steps else ""
        return f"{text}; epoch {row.epoch}{of_epochs}, step {(row.step or 0) + 1}{of_steps}"


_FINDINGS = 2  # most findings shown

_STYLES = ("bold red", "yellow", "yellow", "")  # by severity


#: Severity (from ``Board.severity``, 0 to 3; 0 is the most urgent), and a cell per column.
_Row = tuple[int, tuple[str, ...]]

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

    # A row for each rank if they fit, else for each node, else for the nodes that need most attention.
    nodes = sorted(board.nodes.values(), key=lambda node: (board.severity(node.node_rank, now), node.node_rank))
    by_rank = sum(max(1, len(node.ranks)) for node in nodes) <= room
    shown, rest = (nodes, []) if by_rank or len(nodes) <= room else (nodes[: room - 1], nodes[room - 1 :])
    rows: list[_Row] = []
    for node in shown if rest else sorted(nodes, key=lambda node: node.node_rank):
        ranks = [board.ranks[rank] for rank in node.ranks]
        severity, age = board.severity(node.node_rank, now), node.age(now)
        for i, group in enumerate([[row] for row in ranks] if by_rank and ranks else [ranks]):
            name = ("", "") if i else (f"node{node.node_rank}", node.host)
            epoch, step, *steps = step_cells(group, board.epochs)
            widest = max((2 * len(str(row.steps)) + 1 for row in group if row.step is not None), default=0)
            about = (spans([row.rank for row in group]), _state(node, group, age), epoch, step.rjust(widest), *steps)
            rows.append((severity, (*name, *about, "" if age is None else f"{age:.0f} s")))
    columns, cells_of = valued(_COLUMNS, [cells for _, cells in rows])
    printed = [[column.title for column in columns], *cells_of]
    widths = [max(map(len, cells)) for cells in zip(*printed, strict=True)]
    fits = fitting(columns, widths, width)
    table = []
    for cells, style in zip(printed, ["dim", *(_STYLES[severity] for severity, _ in rows)], strict=True):
        padded = (cells[i].rjust(widths[i]) if columns[i].right else cells[i].ljust(widths[i]) for i in fits)
        table.append(Text((" " * GAP).join(padded).rstrip(), style))
    if rest:
        states = sorted({node.state for node in rest})
        unshown = [board.ranks[rank] for node in rest for rank in node.ranks if board.ranks[rank].step is not None]
        slowest = min(unshown, key=lambda row: row.place, default=None)
        where = f", {board.at(slowest)} or further" if slowest else ""
        table.append(Text(f"… {len(rest)} more nodes: {', '.join(states)}{where}", "dim"))

    lines = [*head, *table, *below]
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


def _state(node: _NodeRow, rows: list[RankRow], age: float | None) -> str:
    if node.connection_error:
        return "unreachable"
    if age is not None and age > _OLD_HEARTBEAT:
        return "silent"
    ended = {row.ended for row in rows}
    if "failed" in ended:
        return "failed"
    return "done" if ended == {"done"} else node.state


def _of(number: int | None, total: int | None) -> str:
    return "" if number is None else f"{number}/{total}" if total else str(number)


def _shown(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) if math.isfinite(value) else str(value)
