"""Collects the findings of a node and, on the lead node, of all nodes.

Findings are training losses that are not finite, stalls, stragglers, and waits that have passed their deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from launcher.node.diagnostics import stacks
from launcher.node.diagnostics.expired_waits import Culprit, Processes, describe, read_wait, server_lines, verdict
from launcher.node.diagnostics.stall_detector import StallDetector
from launcher.node.diagnostics.vitals import Vitals
from launcher.node.peers.hub import Hub
from launcher.node.peers.member import Member
from launcher.node.peers.model import Peers
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.outcomes import OutcomeBook

Finding = dict[str, Any]

_STACKS_WAIT = 2.0  # seconds that the processes of a node get to write their stacks

_OTHERS_WAIT = 4.0  # seconds to wait for the stacks of the other nodes

_TRAINED = ("step", "epoch", "eval", "checkpoint", "result")  # kinds of lines after a training step

_MOST = 50  # findings in a report to the other supervisors


class Health:
    """Collects the findings of a node and, on the lead node, of all nodes; ``look`` checks at most once a second.

    ``idle(seconds)`` waits and keeps the supervisor's heartbeat running.
    """

    def __init__(
        self,
        spec: NodeSpec,
        book: OutcomeBook,
        peers: Peers,
        idle: Callable[[float], object],
        server_pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        """server_pid: returns the pid of the running graph server, or None."""
        self.findings: list[Finding] = []
        self.stacks: dict[str, list[str]] | None = None  #: summaries by rank, once the hub has asked for them
        self.waits: dict[str, dict[str, Any]] = {}  #: expired waits of this node's ranks, by rank
        self._spec, self._book, self._peers, self._idle = spec, book, peers, idle
        self._server_pid, self._waits_reported = server_pid, False
        self._vitals = Vitals(
            spec.run_dir,
            spec.ranks,
            spec.node_rank,
            spec.label,
            stop_on_nan=spec.on_nan == "stop",
            at_end=spec.generation > 0,
        )
        self._detector = StallDetector(spec.stall_after, spec.labels, spec.on_stall == "stop")
        self._next = 0.0
        self._departed = set(peers.gone)  # nodes that the run continues without, and that are reported

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        """The last metrics of each rank of this node, by rank, as in ``Vitals.ranks``."""
        return self._vitals.ranks

    @property
    def newest(self) -> list[Finding]:
        return self.findings[-_MOST:]

    def stepped(self) -> bool:
        self._vitals.look(time.time(), self._book.ended_ranks())
        return any(entry["kind"] in _TRAINED for entry in self.ranks.values())

    def look(self) -> Finding | None:
        """Check and record new findings; return the first one that ends the run, or None."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + 1.0
        found = self._vitals.look(time.time(), self._book.ended_ranks())
        self._read_waits()
        if not isinstance(self._peers, Member):
            found = [*found, *self._detected(), *self._expired()]
            for member in self._peers.members.values() if isinstance(self._peers, Hub) else ():
                self.findings += [finding for finding in member.findings if finding not in self.findings]
        for finding in found:
            self._add(finding)
        return next((finding for finding in found if finding["stop"]), None)

    def look_for_departed(self) -> None:
        """Record and log a finding for each node that departed since the last call. The run continues without it."""
        for k, gone in self._peers.gone.items():
            if k not in self._departed:
                self._departed.add(k)
                self._book.journal.event(gone["kind"], lost=int(k), reason=gone["text"])
                about = {"t": gone["t"], "kind": gone["kind"], "node_rank": int(k), "rank": None}
                self.findings.append({**about, "text": gone["text"], "stop": False})

    def show_stacks(self) -> None:
        """Collect the stacks of this node's ranks; keep the summary of each in ``stacks``, which is sent to the hub."""
        self.stacks = {_key(rank): lines[:1] for rank, lines in self._collect().items()}

    def server_words(self) -> str:
        """Return what the graph server is doing, to append to a message: ``; it is at load() …``; '' once it ended."""
        pid = self._server_pid()
        if pid is None:
            return ""
        line = stacks.collect(self._spec.run_dir, {stacks.SERVER: pid}, _STACKS_WAIT, self._idle)[stacks.SERVER][0]
        held = stacks.held_up(line)
        if held:
            return f"; it {verdict(held)}"
        return "" if line.startswith(stacks.NO_STACK) else f"; it is at {line}"

    def _add(self, finding: Finding) -> None:
        if finding["kind"] == "stall" and "stacks" not in finding:
            known = self._stacks_of_all()
            finding["stacks"] = [*known.folded(), *server_lines(known, None)]
            exiting = {rank for rank, line in known.ranks.items() if line == stacks.NO_FRAME}  # as is their interpreter
            finding |= self._detector.without(exiting) or {}
            culprit = next(known.held_up(), None)
            if culprit is not None:
                self._attribute(finding, Culprit(culprit.node_rank, culprit.rank, f"{culprit.text}: {finding['text']}"))
        self.findings.append(finding)
        self._book.journal.event("finding", finding=finding)

    def _attribute(self, finding: Finding, culprit: Culprit) -> None:
        finding["t"] += self._ahead(culprit.node_rank) - self._ahead(finding["node_rank"])
        finding["node_rank"], finding["rank"], finding["text"] = culprit.node_rank, culprit.rank, culprit.text

    def _ahead(self, node: int) -> float:
        """Return by how many seconds the clock of a node is ahead of this one."""
        members = self._peers.members if isinstance(self._peers, Hub) else {}
        return float(members[node].ahead) if node in members else 0.0

    def _read_waits(self) -> None:
        for rank in self._spec.ranks:
            if str(rank) not in self.waits and (wait := read_wait(self._spec.run_dir, rank)) is not None:
                self.waits[str(rank)] = wait

    def _all_waits(self) -> list[dict[str, Any]]:
        # Times are by this node's clock.
        members = self._peers.members if isinstance(self._peers, Hub) else {}
        others = [
            {**wait, "t": wait["t"] - member.ahead} for member in members.values() for wait in member.waits.values()
        ]
        return [*self.waits.values(), *others]

    def _expired(self) -> list[Finding]:
        if self._waits_reported or not self._all_waits():
            return []
        self._waits_reported = True
        known = self._stacks_of_all()
        self._read_waits()  # ranks that wait for the same process reach their deadlines at about the same time
        waits = self._all_waits()
        at = {wait["rank"]: wait["at"] for wait in waits if wait["at"]}
        known = replace(known, ranks={**known.ranks, **at})  # instead of the line that reports the wait
        culprit, began = describe(waits, known), min(float(wait["t"]) for wait in waits)
        asked = next((wait["node_rank"] for wait in waits if wait["of"] == "server"), None)
        text = [*known.folded(), *server_lines(known, asked)]
        finding = {"kind": "stall", "stop": self._spec.on_stall == "stop", "stacks": text, "t": began}
        finding |= {"node_rank": self._spec.node_rank, "rank": None, "text": culprit.text}
        self._attribute(finding, culprit)
        return [finding]

    def _detected(self) -> list[Finding]:
        # Nodes that the run continues without do not count.
        nodes: dict[int, Any] = {self._spec.node_rank: self._vitals.ranks}
        members = self._peers.members if isinstance(self._peers, Hub) else {}
        nodes |= {k: member.ranks for k, member in members.items() if member.left is None}
        found = self._detector.look(time.monotonic(), nodes)
        for finding in found:  # the time of a finding is by its node's clock
            finding["t"] += members[finding["node_rank"]].ahead if finding["node_rank"] in members else 0.0
        return found

    def _stacks_of_all(self) -> Processes:
        # Without nodes that do not answer within ``_OTHERS_WAIT`` seconds.
        hub = self._peers if isinstance(self._peers, Hub) else None
        deadline = time.monotonic() + _OTHERS_WAIT
        if hub is not None:
            hub.ask_stacks()
        found = {self._spec.node_rank: {_key(rank): lines[0] for rank, lines in self._collect().items()}}
        while hub is not None and hub.stacks_missing() and time.monotonic() < deadline:
            self._idle(0.05)
        members = hub.members if hub is not None else {}
        found |= {k: {name: each[0] for name, each in (one.stacks or {}).items() if each} for k, one in members.items()}
        others = {int(rank): entry for member in members.values() for rank, entry in member.ranks.items()}
        ended = {rank for rank, entry in {**self._vitals.ranks, **others}.items() if entry["ended"]}
        nodes = dict.fromkeys(self._spec.ranks, self._spec.node_rank)
        nodes |= {rank: k for k, member in members.items() for rank in member.own_ranks or ()}
        return Processes(
            self._spec.labels,
            {rank: node for rank, node in nodes.items() if rank not in ended},
            {int(name): line for own in found.values() for name, line in own.items() if name != _SERVER},
            {node: own[_SERVER] for node, own in found.items() if _SERVER in own},
        )

    def _collect(self) -> dict[int, list[str]]:
        server = self._server_pid()
        pids = self._book.rank_pids() | ({} if server is None else {stacks.SERVER: server})
        return stacks.collect(self._spec.run_dir, pids, _STACKS_WAIT, self._idle)


_SERVER = "server"  # the graph server among the stacks of a node, by name


def _key(rank: int) -> str:
    return _SERVER if rank == stacks.SERVER else str(rank)
