"""How a run waits for its devices or hosts (``--wait``): its supervisors queue on the leases, and start together.

Each node files a ticket beside the leases of its host (``leases.ticket``). It is ready once no other run holds what it
wants and no earlier ticket wants any of it. When all nodes are ready, the lead node calls them to take their leases; if
one of them cannot, all release theirs and wait on. So no run holds some of its hosts while it waits for others, and as
tickets have the same order on all hosts, the first of all can always go on: runs never wait for each other in a circle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from launcher.node import leases
from launcher.node.peers.hub import Hub
from launcher.node.peers.member import Member
from launcher.node.peers.model import Peers, Turn
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.journal import Journal

_EVERY = 1.0  # seconds between two looks at the leases

_SLACK = 5.0  # seconds beyond the limit after which a node ends that is ready, but waits for others

_SHOWN = 20  # runs in the way that state.json lists

_NOTED_EVERY = 15.0  # seconds between two estimates of the run's end

_RATE_AFTER = 3.0  # seconds of steps before the first estimate


class WaitedTooLong(Exception):
    """The limit of ``--wait`` is reached. ``str()`` says who holds what."""


def next_turn(turn: Turn, places: Sequence[Mapping[str, Any] | None]) -> Turn:
    """Return what the lead node tells all nodes next, ``turn`` itself if nothing changes.

    places: the place of each node, that of the lead node included; None for one that has not reported yet.
    """
    known = [place for place in places if place is not None]
    if turn["go"] or len(known) < len(places):
        return turn
    if not turn["take"]:
        called = all(place["ready"] and not place["held"] for place in known)
        return {"round": turn["round"] + 1, "take": True, "go": False} if called else turn
    answers = [place["held"] for place in known if place["round"] == turn["round"]]
    if not all(answers):
        return {**turn, "take": False}
    return {**turn, "go": True} if len(answers) == len(known) else turn


class Waiting:
    """One node of a waiting run. Call ``begin``, then ``look`` several times a second until ``over``."""

    def __init__(self, spec: NodeSpec, journal: Journal) -> None:
        self.over = not spec.queued_at or spec.generation > 0  #: the leases are taken, or there is no waiting
        self.place: dict[str, Any] | None = None  #: in line, for the report to the lead node
        self.state: dict[str, Any] | None = None  #: what it waits for, for state.json
        self._spec, self._journal = spec, journal
        self._began, self._words = time.monotonic(), ""
        self._since, self._next = time.time(), 0.0
        wants = [resource for resource in spec.leases if not resource.startswith("port:")]
        self._ticket = leases.ticket(wants, self._holder(), spec.queued_at)

    def begin(self) -> None:
        """File the ticket. Raises LeaseError."""
        self.place = {"ready": False, "held": False, "round": 0}
        self._see(leases.wait_in_line(self._ticket, patience=None))

    def look(self, peers: Peers) -> bool:
        """Do what the lead node has called for, look who is in the way, and as the lead node, call the next turn.

        Returns whether anything has changed that others should know. Raises WaitedTooLong.
        """
        assert self.place is not None
        place, turn, shown = self.place, peers.turn, self.state
        before = {**place}
        if turn["go"]:
            with suppress(leases.LeaseError):  # it is no longer valid when this process ends
                leases.release(self._spec.run_id, self._spec.node_rank, [self._ticket.resource])
            self.over, self.place, self.state = True, None, None
            self._journal.event("queue", text=f"its turn has come after {time.time() - self._since:.0f} s")
            return True
        called = turn["take"] and turn["round"] > place["round"]
        try:
            if place["held"] and (called or not turn["take"]):  # of a round that has failed, or was missed
                leases.release(self._spec.run_id, self._spec.node_rank, self._ticket.wants)
                place["held"] = False
            if called:
                self._see(leases.take_turn(self._ticket, self._holder()))
                place |= {"held": place["ready"], "round": turn["round"]}
            elif not place["held"] and time.monotonic() >= self._next:
                self._see(leases.wait_in_line(self._ticket))
        except leases.LeaseError as error:  # a full disk, or another process keeps the folder locked: tried again
            place["ready"] = False
            if turn["take"] and not place["held"]:
                place["round"] = turn["round"]  # an answer, so that the other nodes do not hold theirs
            self._next, self._words = time.monotonic() + _EVERY, f"the leases cannot be read or written: {error}"
            self._journal.log(self._words)
        if not isinstance(peers, Member):
            others = [member.place for member in peers.members.values()] if isinstance(peers, Hub) else []
            following = next_turn(turn, [place, *others])
            if following != turn:
                peers.call(following)
        limit, waited = self._spec.wait_limit, time.monotonic() - self._began
        if limit and not place["held"] and waited > limit + (_SLACK if place["ready"] else 0.0):
            raise WaitedTooLong(f"it has waited for {limit:g} s, the limit of --wait: {self._words}")
        return place != before or self.state is not shown

    def _holder(self) -> leases.LeaseHolder:
        return leases.this_process(self._spec.run_id, self._spec.node_rank, self._spec.operator)

    def _see(self, found: Sequence[leases.Lease]) -> None:
        self._next = time.monotonic() + _EVERY
        assert self.place is not None
        self.place["ready"] = not found
        runs = {(one.run_id, one.user, one.waits): one for one in reversed(found)}
        shown = []
        for one in [*runs.values()][::-1][:_SHOWN]:
            names = one.wants if one.waits else [one.resource]
            wanted = next((name for name in names if name in self._ticket.wants), "cpu")
            shown.append((leases.resource_label(wanted), one))
        words = [f"{what} {'are' if what == 'CPUs' else 'is'} {leases.describe(one)}" for what, one in shown]
        self._words = "; ".join(words) or "other nodes of the run were not ready"
        blockers = [
            {"run_id": one.run_id, "user": one.user, "since": one.since, "waits": one.waits, "what": what}
            for what, one in shown
        ]
        earlier = len({(one.run_id, one.user) for one in found if one.waits})
        if self.state is None or self.state["blockers"] != blockers or self.state["earlier"] != earlier:
            self.state = {"since": self._since, "earlier": earlier, "blockers": blockers}
            self._journal.event("queue", text=self._words if found else "nothing is in the way here")


class Forecast:
    """Notes in the leases of a node when its run is likely to end, for those who wait (``gnnfleet queue``)."""

    def __init__(self, spec: NodeSpec) -> None:
        self._spec, self._next = spec, 0.0
        self._first: tuple[float, float] | None = None  # time, and share of all epochs done, at the first step seen

    def look(self, ranks: Mapping[int, Mapping[str, Any]]) -> None:
        """Note an estimate if one is due. ranks: of this node, as in ``Vitals.ranks``."""
        now, epochs = time.time(), self._spec.epochs
        known = [one for one in ranks.values() if one["epoch"] and one["step"] is not None and one["steps"]]
        if not epochs or not known or now < self._next:
            return
        done = min((one["epoch"] - 1 + (one["step"] + 1) / one["steps"]) / epochs for one in known)
        self._first = self._first or (now, done)
        passed, share = now - self._first[0], done - self._first[1]
        if passed < _RATE_AFTER or share <= 0:
            return
        self._next = now + _NOTED_EVERY
        holder = leases.this_process(self._spec.run_id, self._spec.node_rank, self._spec.operator)
        try:
            leases.expect_end(holder, now + max(0.0, 1.0 - done) * passed / share)
        except leases.LeaseError:  # it only informs
            return
