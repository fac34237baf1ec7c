"""Whether the ranks get on: their vital signs here, judged over all nodes on the lead node; stacks when they do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launcher.node.peers.hub import Hub
from launcher.node.peers.member import Member
from launcher.node.peers.model import Peers
from launcher.node.supervisor import stacks
from launcher.node.supervisor.judge import Judge
from launcher.node.supervisor.outcomes import Book
from launcher.node.supervisor.spec import NodeSpec
from launcher.node.supervisor.vitals import Vitals

Finding = dict[str, Any]

_STACKS_WAIT = 2.0  # seconds the processes of a node get to show where they are

_OTHERS_WAIT = 3.0  # seconds from asking until the other nodes' answers are no longer waited for

_MOST = 50  # findings that are told to others


class Health:
    """Looks once a second."""

    def __init__(self, spec: NodeSpec, book: Book, peers: Peers, idle: Callable[[float], object]) -> None:
        self.findings: list[Finding] = []
        self.stacks: dict[str, list[str]] | None = None  #: summaries by rank, once the hub has asked for them
        self._spec, self._book, self._peers, self._idle = spec, book, peers, idle
        self._vitals = Vitals(spec.run_dir, spec.ranks, spec.node_rank, spec.label, spec.on_nan == "stop")
        self._judge = Judge(spec.stall_after, spec.all_labels, spec.on_stall == "stop")
        self._next = 0.0

    @property
    def ranks(self) -> dict[int, dict[str, Any]]:
        """Vital signs of this node's ranks."""
        return self._vitals.ranks

    @property
    def told(self) -> list[Finding]:
        """Findings for others to see, the newest."""
        return self.findings[-_MOST:]

    def look(self) -> Finding | None:
        """Take in what is new; a finding that is to end the run."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + 1.0
        found = self._vitals.look(time.time(), self._book.ended_ranks())
        if not isinstance(self._peers, Member):
            found = [*found, *self._judged()]
            self._take_from_members()
        for finding in found:
            self._tell(finding)
        return next((finding for finding in found if finding["stop"]), None)

    def show_stacks(self) -> None:
        """Collect the stacks of this node's ranks, for whoever asked."""
        self.stacks = {str(rank): lines[:1] for rank, lines in self._collect().items()}

    def _tell(self, finding: Finding) -> None:
        if finding["kind"] == "stall":
            finding["stacks"] = stacks.folded(self._stacks_of_all())
        self.findings.append(finding)
        self._book.journal.event("finding", finding=finding)

    def _judged(self) -> list[Finding]:
        nodes: dict[int, Any] = {self._spec.node_rank: self._vitals.ranks}
        members = self._peers.members if isinstance(self._peers, Hub) else {}
        nodes |= {k: member.ranks for k, member in members.items() if member.left is None}
        generation = self._peers.team["generation"] if self._peers.team else 0
        found = self._judge.look(time.monotonic(), nodes, generation)
        for finding in found:  # a finding's time is by its node's clock
            finding["t"] += members[finding["node_rank"]].ahead if finding["node_rank"] in members else 0.0
        return found

    def _take_from_members(self) -> None:
        for member in self._peers.members.values() if isinstance(self._peers, Hub) else ():
            self.findings += [finding for finding in member.findings if finding not in self.findings]

    def _stacks_of_all(self) -> dict[int, list[str]]:
        """By rank, of all nodes that answer in time."""
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
