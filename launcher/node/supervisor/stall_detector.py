"""Finds stalled and slow ranks (stragglers) over all nodes, on the lead node; for a stall, collects the stacks of all
ranks."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.node.peers.hub import Hub
from launcher.node.peers.member import Member
from launcher.node.peers.model import Peers
from launcher.node.supervisor import stacks
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.outcomes import OutcomeBook
from launcher.node.supervisor.spec import NodeSpec
from launcher.node.supervisor.vitals import PHASES, Vitals

Entry = Mapping[str, Any]  # one rank's values, as in Vitals.ranks

Nodes = Mapping[int, Mapping[Any, Entry]]  # node_rank -> rank (an int, or a str when it came as JSON) -> entry

FIRST_STEP = 900.0  #: seconds until the first step: loading, compiling kernels, joining the process group

AT_LEAST = 120.0  #: with stall_after "auto": seconds without progress that are never called a stall

TIMES_LONGEST = 5.0  #: with "auto": a stall lasts this many times the longest pause so far

BY_LINES_ALONE = 900.0  #: AT_LEAST for ranks without a progress file, which write no lines while they evaluate or save

SLOWER = 1.5  #: a straggler's own work per step is at least this multiple of the median over ranks

SHARE = 0.2  #: and exceeds that median by at least this share of the step

WINDOW = 30.0  #: seconds of step lines that are compared

ENOUGH = 10.0  #: seconds of step lines that are needed

QUIET = 600.0  #: seconds after a straggler has caught up in which it is not reported again

_ASLEEP = 5.0  # seconds between two calls of ``look`` that mean that the supervisor itself was suspended

_MOST_LINES = 64  # kept of a rank; bounds memory where the clock of its lines stands still

_PACE_EVERY = 5.0  # seconds between two comparisons of step times

_KINDS = ("start", "step", "epoch", "eval", "checkpoint", "result")  # order of lines within an epoch


class Judge:
    """Finds stalls and stragglers; ``look`` is called once a second.

    A rank without metrics lines (its script writes none) is never called stalled.
    """

    def __init__(
        self, stall_after: float | str = "auto", labels: Sequence[str] = (), stop_on_stall: bool = True
    ) -> None:
        self.labels = labels
        self._stall = _StallRule(None if stall_after == "auto" else float(stall_after), stop_on_stall)
        self._pace = _StragglerRule()

    def look(self, now: float, nodes: Nodes) -> list[dict[str, Any]]:
        """Return new findings.

        now: ``time.monotonic()``. nodes: by node_rank, the last metrics of each rank.
        """
        ranks = {
            int(rank): {**entry, "where": f"rank {rank} on {self._label(node)}", "node_rank": int(node)}
            for node, entries in nodes.items()
            for rank, entry in entries.items()
        }
        return [*self._stall.look(now, ranks), *self._pace.look(now, ranks)]

    def _label(self, node: int | str) -> str:
        number = int(node)
        return self.labels[number] if number < len(self.labels) else f"node{number}"


class _StallRule:
    """Finds a stall: no rank has made progress for longer than a limit, which is fixed or learned from earlier
    pauses."""

    def __init__(self, after: float | None, stop: bool) -> None:
        self.after, self.stop = after, stop
        self.longest = 0.0  #: longest pause in seconds between two changes, since the first batch was begun
        self._seen: object = {}
        self._looked: float | None = None
        self._changed = 0.0
        self._begun = self._stepped = self._reported = False

    def look(self, now: float, ranks: Mapping[int, Entry]) -> Iterator[dict[str, Any]]:
        if self._looked is None:
            self._changed = now
        elif now - self._looked > _ASLEEP:
            self._changed += now - self._looked
        self._looked = now
        seen = {rank: (entry["t"], entry["kind"], str(entry["at"])) for rank, entry in ranks.items()}
        if seen != self._seen:
            self._move(now, seen, ranks)
            return
        running = {rank: entry for rank, entry in ranks.items() if not entry["ended"]}
        if running and not self._reported and now - self._changed > self._limit(running):
            self._reported = True
            yield self._finding(now - self._changed, running)

    def _move(self, now: float, seen: object, ranks: Mapping[int, Entry]) -> None:
        if self._begun:
            self.longest = max(self.longest, now - self._changed)
        self._stepped = self._stepped or any(entry["kind"] != "start" for entry in ranks.values())
        self._begun = self._stepped or any(entry["at"] is not None for entry in ranks.values())
        self._seen, self._changed, self._reported = seen, now, False

    def _limit(self, ranks: Mapping[int, Entry]) -> float:
        if self.after is None:
            least = BY_LINES_ALONE if any(entry["at"] is None for entry in ranks.values()) else AT_LEAST
            limit = max(least, TIMES_LONGEST * self.longest)
        else:
            limit = self.after
        return limit if self._stepped else max(limit, FIRST_STEP)

    def _finding(self, silence: float, ranks: Mapping[int, Entry]) -> dict[str, Any]:
        if self._stepped:
            before = f" (the longest pause before was {_seconds(self.longest)})" if self.longest else ""
            text = f"no process has trained a step for {silence:.0f} s{before}; "
        else:
            text = f"no process has trained its first step within {silence:.0f} s; "
        behind = _behind(ranks)
        others = [entry for rank, entry in ranks.items() if rank not in behind]
        first = behind[0] if others else None
        text += f"{_names(behind, ranks)} {_place(ranks[behind[0]], many=len(behind) > 1)}"
        if others:
            text += f", the others {_place(max(others, key=_position), many=True)}"
        lead = min(entry["node_rank"] for entry in ranks.values())
        return _finding("stall", lead if first is None else ranks[first]["node_rank"], first, text, self.stop)


def _position(entry: Entry) -> tuple[float, ...]:
    """Sort key for the progress of a rank, from its progress file or, if it has none, from its last metrics line."""
    if entry["at"] is not None:
        epoch, step, phase = entry["at"]
        return (epoch, phase == "evaluate", step, PHASES.index(phase))
    kind = _KINDS.index(entry["kind"]) if entry["kind"] in _KINDS else len(_KINDS)
    return (entry["epoch"] or 0, kind > 1, entry["step"] or 0, kind)


def _behind(ranks: Mapping[int, Entry]) -> list[int]:
    """The ranks with the least progress, in ascending order."""
    least = min(map(_position, ranks.values()))
    return sorted(rank for rank, entry in ranks.items() if _position(entry) == least)


def _names(some: Sequence[int], ranks: Mapping[int, Entry]) -> str:
    if len(some) == 1:
        return str(ranks[some[0]]["where"])
    if len(some) == len(ranks):
        return f"all {len(some)} ranks"
    return "ranks " + ", ".join(map(str, some[:8])) + (f" and {len(some) - 8} more" if len(some) > 8 else "")


def _place(entry: Entry, many: bool = False) -> str:
    """Say where a rank is: ``is at step 5 of epoch 2 (computing)``. many: the sentence is about several ranks, so it
    has "are"."""
    verb, own = ("are", "their") if many else ("is", "its")
    if entry["at"] is None:
        epoch = f"epoch {entry['epoch'] or 0}"
        place = f"step {entry['step']} of {epoch}" if entry["kind"] == "step" else f"the end of {epoch}"
        return f"{verb} at {place if entry['kind'] != 'start' else 'the start'} (from {own} last metrics line)"
    epoch, step, phase = entry["at"]
    place = f"{verb} at {'batch' if phase == 'evaluate' else 'step'} {step} of epoch {epoch}"
    words = {
        "load": f"waiting for {own} batch",
        "compute": "computing",
        "reduce": f"{own} own work done, waiting for other ranks",
        "evaluate": "evaluating",
    }
    return f"{place} ({words[phase]})"


class _StragglerRule:
    """Finds stragglers: compares the time of each rank's own work per step with the median over all ranks."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[Entry]] = {}
        self._slow: set[int] = set()
        self._ended: dict[int, float] = {}  # rank -> when it last caught up, seconds as ``now``
        self._next = 0.0

    def look(self, now: float, ranks: Mapping[int, Entry]) -> Iterator[dict[str, Any]]:
        for rank, entry in ranks.items():
            self._note(rank, entry)
        if now < self._next:
            return
        self._next = now + _PACE_EVERY
        typical = {rank: _typical(self._lines[rank]) for rank in ranks if self._enough(rank)}
        if len(typical) < 2:
            return
        usual = statistics.median_low(own["own_s"] for own in typical.values())  # of two ranks, the faster one's
        for rank, own in typical.items():
            slow = self._is_slow(own, usual, rank in self._slow)
            if slow and rank not in self._slow and now - self._ended.get(rank, -QUIET) >= QUIET:
                self._slow.add(rank)
                yield _finding("straggler", ranks[rank]["node_rank"], rank, _slow(ranks[rank], own, usual), False)
            elif not slow and rank in self._slow:
                self._slow.remove(rank)
                self._ended[rank] = now
                text = f"{ranks[rank]['where']} keeps up again: {_seconds(own['own_s'])} of own work per step"
                yield _finding("straggler", ranks[rank]["node_rank"], rank, text, False)

    def _note(self, rank: int, entry: Entry) -> None:
        if entry["kind"] != "step" or entry["own_s"] is None or entry["step_s"] is None:
            return
        lines = self._lines.setdefault(rank, deque(maxlen=_MOST_LINES))
        if lines and lines[-1]["t"] == entry["t"]:
            return
        lines.append(entry)
        while lines[-1]["t"] - lines[0]["t"] > WINDOW or lines[-1]["t"] < lines[0]["t"]:
            lines.popleft()

    def _enough(self, rank: int) -> bool:
        lines = self._lines.get(rank)
        return lines is not None and len(lines) >= 3 and lines[-1]["t"] - lines[0]["t"] >= ENOUGH

    def _is_slow(self, own: Mapping[str, float], usual: float, already: bool) -> bool:
        ease = 0.5 if already else 1.0  # hysteresis: a reported straggler must fall well below the limits
        excess = own["own_s"] - usual
        return excess > (SLOWER - 1) * ease * usual and excess > SHARE * ease * own["step_s"]


def _typical(lines: Sequence[Entry]) -> dict[str, float]:
    """The medians of own_s, step_s and batch_s over ``lines``, in seconds; a slow start or a single pause does not
    change them much."""
    return {name: statistics.median(line[name] or 0.0 for line in lines) for name in ("own_s", "step_s", "batch_s")}


def _slow(entry: Entry, own: Mapping[str, float], usual: float) -> str:
    needs = f"{entry['where']} needs {_seconds(own['own_s'])} of own work per step, the others {_seconds(usual)}"
    if own["batch_s"] < 0.5 * (own["own_s"] - usual):
        return f"{needs}; the run waits for it (it computes more slowly: is its device weaker, or used by others?)"
    share = entry["remote_share"]
    remote = "" if share in (None, 1.0) else f", with {share:.0%} of the rows from other hosts"  # 1.0: of every client
    return f"{needs}; the run waits for it (waiting for batches takes {_seconds(own['batch_s'])} of that{remote})"


def _finding(kind: str, node_rank: int, rank: int | None, text: str, stop: bool) -> dict[str, Any]:
    return {"t": time.time(), "kind": kind, "node_rank": node_rank, "rank": rank, "text": text, "stop": stop}


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


Finding = dict[str, Any]

_STACKS_WAIT = 2.0  # seconds that the processes of a node get to write their stacks

_OTHERS_WAIT = 3.0  # seconds to wait for the stacks of the other nodes

_TRAINED = ("step", "epoch", "eval", "checkpoint", "result")  # kinds of lines after a training step

_MOST = 50  # findings in a report to the other supervisors


class Health:
    """Collects the findings of a node and, on the lead node, of all nodes; ``look`` checks at most once a second.

    ``idle(seconds)`` waits and keeps the supervisor's heartbeat running.
    """

    def __init__(self, spec: NodeSpec, book: OutcomeBook, peers: Peers, idle: Callable[[float], object]) -> None:
        self.findings: list[Finding] = []
        self.stacks: dict[str, list[str]] | None = None  #: summaries by rank, once the hub has asked for them
        self._spec, self._book, self._peers, self._idle = spec, book, peers, idle
        self._vitals = Vitals(
            spec.run_dir,
            spec.ranks,
            spec.node_rank,
            spec.label,
            stop_on_nan=spec.on_nan == "stop",
            at_end=spec.generation > 0,
        )
        self._judge = Judge(spec.stall_after, spec.all_labels, spec.on_stall == "stop")
        self._next = 0.0

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        """The last metrics of each rank of this node, by rank, as in ``Vitals.ranks``."""
        return self._vitals.ranks

    @property
    def newest(self) -> list[Finding]:
        """The newest findings, for ``state.json`` and the other supervisors."""
        return self.findings[-_MOST:]

    def stepped(self) -> bool:
        """Whether a rank of this node has trained a step, according to its metrics lines."""
        self._vitals.look(time.time(), self._book.ended_ranks())
        return any(entry["kind"] in _TRAINED for entry in self.ranks.values())

    def look(self) -> Finding | None:
        """Check and record new findings; returns the first one that ends the run, or None."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + 1.0
        found = self._vitals.look(time.time(), self._book.ended_ranks())
        if not isinstance(self._peers, Member):
            found = [*found, *self._judged()]
            self._take_from_members()
        for finding in found:
            self._add(finding)
        return next((finding for finding in found if finding["stop"]), None)

    def show_stacks(self) -> None:
        """Collect the stacks of this node's ranks, and keep the summary of each in ``stacks``, which is sent to the
        hub."""
        self.stacks = {str(rank): lines[:1] for rank, lines in self._collect().items()}

    def _add(self, finding: Finding) -> None:
        """Record a finding; for a stall, first collect the stacks of all ranks."""
        if finding["kind"] == "stall":
            found = self._stacks_of_all()
            finding["stacks"] = stacks.folded(found)
            self._name_stopped(finding, [rank for rank, lines in sorted(found.items()) if lines[0] == stacks.STOPPED])
        self.findings.append(finding)
        self._book.journal.event("finding", finding=finding)

    def _name_stopped(self, finding: Finding, stopped: Sequence[int]) -> None:
        """If a rank is stopped (SIGSTOP or a debugger), attribute the stall to the first such rank, as all others wait
        for it."""
        nodes = dict.fromkeys(self._spec.ranks, self._spec.node_rank)
        members = self._peers.members if isinstance(self._peers, Hub) else {}
        nodes |= {rank: k for k, member in members.items() for rank in member.own_ranks or ()}
        rank = next((rank for rank in stopped if rank in nodes), None)
        if rank is None:
            return
        ahead = {self._spec.node_rank: 0.0, **{k: member.ahead for k, member in members.items()}}
        finding["t"] += ahead[nodes[rank]] - ahead.get(finding["node_rank"], 0.0)
        finding["rank"], finding["node_rank"] = rank, nodes[rank]
        where = f"rank {rank} on {self._spec.all_labels[nodes[rank]]}"
        finding["text"] = f"{where} is stopped (SIGSTOP or a debugger): {finding['text']}"

    def _judged(self) -> list[Finding]:
        """New findings of stalls and stragglers, over all nodes except those that the run continues without."""
        nodes: dict[int, Any] = {self._spec.node_rank: self._vitals.ranks}
        members = self._peers.members if isinstance(self._peers, Hub) else {}
        nodes |= {k: member.ranks for k, member in members.items() if member.left is None}
        found = self._judge.look(time.monotonic(), nodes)
        for finding in found:  # the time of a finding is by its node's clock
            finding["t"] += members[finding["node_rank"]].ahead if finding["node_rank"] in members else 0.0
        return found

    def _take_from_members(self) -> None:
        for member in self._peers.members.values() if isinstance(self._peers, Hub) else ():
            self.findings += [finding for finding in member.findings if finding not in self.findings]

    def _stacks_of_all(self) -> dict[int, list[str]]:
        """The stacks of all ranks, by rank; without those of nodes that do not answer within ``_OTHERS_WAIT``
        seconds."""
        hub = self._peers if isinstance(self._peers, Hub) else None
        deadline = time.monotonic() + _OTHERS_WAIT
        if hub is not None:
            hub.ask_stacks()
        found = self._collect()
        while hub is not None and hub.stacks_missing() and time.monotonic() < deadline:
            self._idle(0.05)
        for member in hub.members.values() if hub is not None else ():
            found |= {int(rank): lines for rank, lines in (member.stacks or {}).items()}
        return found

    def _collect(self) -> dict[int, list[str]]:
        return stacks.collect(self._spec.run_dir, self._book.rank_pids(), _STACKS_WAIT, self._idle)


class DepartedNodes:
    """Reports nodes that the run continues without."""

    def __init__(self, journal: Journal, peers: Peers) -> None:
        self._journal, self._peers = journal, peers
        self._reported: set[str] = set(peers.gone)  # reported in an earlier attempt

    def new_findings(self) -> list[dict[str, Any]]:
        """Log and return a finding for each node that the run has left behind since the last call."""
        found = []
        for k, gone in self._peers.gone.items():
            if k not in self._reported:
                self._reported.add(k)
                self._journal.event(gone["kind"], lost=int(k), reason=gone["text"])
                finding = {"t": gone["t"], "kind": gone["kind"], "node_rank": int(k), "rank": None}
                found.append({**finding, "text": gone["text"], "stop": False})
        return found
