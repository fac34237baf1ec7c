"""The lead node's side of the connections between supervisors.

Receives the heartbeats of all members, declares silent nodes lost, and decides which failures end the run.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.node.child_process import Loop
from launcher.node.json_records import MEMBER_REPORT
from launcher.node.peers.link import Link, Message, listen, proof, proven
from launcher.node.peers.model import (
    Cause,
    Decision,
    Order,
    Peers,
    Report,
    Turn,
    eof_patience,
    fatal,
    first_cause,
    left_words,
    make_cause,
    received_cause,
)
from launcher.node.spec import NodeSpec

# connections that are not authenticated yet, at least; all members may connect at once. The oldest is dropped first
_MAX_STRANGERS = 64

_GREETING_TIME = 5.0  # seconds a connection has to authenticate itself

_ACCEPTS_AT_ONCE = 32

_PAUSE = 0.5  # seconds without new connections after ``accept`` has found no free file descriptor

_LATE = 2.0  # seconds between two calls of ``look`` that mean that this machine was suspended

_TABLE_NODES = 64  # with at most this many nodes, each answer to a heartbeat contains the state of all nodes

_LOOKS = 10_000  # members whose silence is checked per second, at most; each is checked every 0.2 s or more often

_ENDS = ("done", "failed", "stopped")


@dataclass
class MemberStatus:
    """State of one member as known to the hub. Times are in seconds, monotonic unless noted."""

    node_rank: int
    link: Link | None = None
    heard: float | None = None  #: time of the last message; None before the first
    gone: float | None = None  #: time when the connection closed; None while connected
    gone_wall: float = 0.0  #: the same, seconds since the epoch
    state: str = "absent"  #: last reported state
    trained: bool | None = False  #: whether all its ranks have trained; None for a node without ranks
    final: bool = False  #: has reported its end
    lost: bool = False  #: declared lost
    left: Cause | None = None  #: why the run continues without this member
    own_ranks: tuple[int, ...] | None = None  #: ranks of this node; None before the first report
    ranks: dict[str, Any] = field(default_factory=dict)  #: last metrics of its ranks (``Vitals.ranks``)
    findings: list[Any] = field(default_factory=list)
    stacks: dict[str, Any] | None = None  #: stack summaries by rank; None until reported
    host: dict[str, float] = field(default_factory=dict)  #: load of its machine (``HostLoad``), for trackers
    waits: dict[str, Any] = field(default_factory=dict)  #: its ranks' expired waits by rank
    ahead: float = 0.0  #: the member's clock minus this clock, seconds
    beats: int = 0  #: reports received
    standing: dict[str, Any] | None = None  #: what it can contribute to a restart; None before it has ended its ranks
    away: bool = False  #: it has left this hub for another one
    place: dict[str, Any] | None = None  #: whether it could start, while the run waits for its leases


class Hub(Peers):
    """The ``Peers`` of the lead node: its connections to all members. No method blocks."""

    def __init__(self, spec: NodeSpec, loop: Loop, clock: Callable[[], float] = time.time) -> None:
        super().__init__(spec)
        self.dropped: dict[str, int] = {}  #: number of unauthenticated connections closed, by reason
        self.members = {k: MemberStatus(k) for k in spec.members}
        self.guests: dict[int, MemberStatus] = {}  #: connected nodes that wait for the next attempt
        self.stacks_wanted = self.stop_asked = self.suspended = False
        self._loop, self._clock = loop, clock
        self._own: Report = {}
        self._strangers: dict[Link, float] = {}
        self._listener: socket.socket | None = None
        self._listens_at: float | None = None  # when it is watched again, after a failed ``accept``; monotonic
        self._ordered: float | None = None  # time of the first stop order; monotonic
        self._opened = self._looked = time.monotonic()
        self._checked = 0.0  # when members were last checked for silence

    # Methods of ``Peers``.

    def open(self) -> None:
        self._opened = self._looked = time.monotonic()
        self._listener = listen(self.spec.hub_node.bind, self.spec.hub_node.control_port)
        self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Declare silent members lost, and close connections that have not authenticated themselves in time."""
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        if pause > _LATE:  # this supervisor could not receive anything meanwhile
            for member in self.members.values():
                member.heard = excused(member.heard, pause, now)
                member.gone = excused(member.gone, pause, now)
            self.suspended = True
        if now - self._checked >= min(0.2, len(self.members) / _LOOKS):
            self._checked = now
            for member in self._expected():
                why, since = self._overdue(member, now)
                if why:
                    member.lost, member.state = True, "lost"
                    self._end_or_leave(member, make_cause(member.node_rank, "node", "lost", why, since))
        if self._listens_at is not None and now >= self._listens_at and self._listener is not None:
            self._listens_at = None
            self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        for link, since in list(self._strangers.items()):
            if now - since > _GREETING_TIME:
                self._drop(link, "did not authenticate in time")

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        now = time.monotonic()
        ages = {k: None if one.heard is None else round(now - one.heard, 1) for k, one in self.members.items()}
        return {str(k): {"state": one.state, "age": ages[k]} for k, one in self.members.items()}

    @property
    def spare(self) -> list[int]:
        return [] if self._waits else self.spec.crew.spare(self._gone)

    def report(self, report: Report) -> None:
        # A report that changes the orders to members is sent at once.
        self._own = report
        if report.get("cause"):
            self._stop(report["cause"])
        self._finish()

    def may_leave(self) -> bool:
        # For members that have never connected, waits at most ``peer_timeout`` after the first stop order.
        late = self._ordered is not None and time.monotonic() - self._ordered > self.spec.peer_timeout
        return not any((member.heard is not None or not late) and not member.away for member in self._expected())

    def begin(self, spec: NodeSpec) -> None:
        super().begin(spec)
        before = self.guests | self.members
        self.members, self.guests = {}, {}
        for k in spec.members:
            old = before.pop(k, MemberStatus(k))
            self.members[k] = MemberStatus(k, old.link, old.heard, old.gone, old.gone_wall, ahead=old.ahead)
        for member in before.values():
            if member.link is not None:
                member.link.close()  # it may connect again as a guest (rendezvous.Guest)
        self.lost, self._own, self._ordered = {}, {}, None
        self.stacks_wanted = self.stop_asked = self.suspended = False
        self._opened = time.monotonic()

    def inherit(self, cause: Cause, lost: dict[str, dict[str, Any]], gone: dict[str, dict[str, Any]]) -> None:
        """Continue as the new hub of a run that has lost its previous hub.

        cause: why the attempt ended, such as the loss of the previous hub. lost: the lost hubs, as in ``Peers.lost``.
        gone: nodes without which the run has continued, as in ``Peers.gone``.
        """
        self.cause, self.order, self._ordered = cause, Order(cause), time.monotonic()
        self.lost, self.gone = {**lost}, {**gone}

    def decide(self, decision: Decision) -> None:
        """Send a decision to all members now, and repeat it in every later message."""
        self.decision = decision
        self._broadcast()

    def call(self, turn: Turn) -> None:
        super().call(turn)
        self._broadcast()

    def awaited(self) -> list[int]:
        """Return the node_ranks of the members that still have to report what they can contribute to a restart."""
        return [member.node_rank for member in self._expected() if member.standing is None and not member.away]

    def close(self) -> None:
        if self._listener is not None:
            self._loop.unwatch(self._listener)
            self._listener.close()
        known = (*self.members.values(), *self.guests.values())
        for link in [*self._strangers, *(one.link for one in known if one.link)]:
            link.close()

    def ask_stacks(self) -> None:
        """Ask every member for the Python stacks of its ranks; the answers are stored in ``MemberStatus.stacks``."""
        self.stacks_wanted = True
        self._broadcast()

    def stacks_missing(self) -> list[int]:
        """Return the node_ranks of connected members whose stacks have not arrived."""
        return [member.node_rank for member in self._expected() if member.stacks is None and member.link]

    # Connections.

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock = self._listener.accept()[0]
            except (BlockingIOError, ConnectionError):  # no connection waits, or it was closed meanwhile
                return
            except OSError:  # no file descriptor is left: the listener would stay ready, and the loop would spin
                self._loop.unwatch(self._listener)
                self._listens_at = time.monotonic() + _PAUSE
                if self._strangers:
                    self._drop(min(self._strangers, key=lambda one: self._strangers[one]), "no descriptor is left")
                return
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        # A nonce goes out first; of too many unauthenticated connections, the oldest is dropped.
        if len(self._strangers) >= max(_MAX_STRANGERS, len(self.members)):
            self._drop(min(self._strangers, key=lambda one: self._strangers[one]), "too many unauthenticated")
        link = Link(sock, self._loop, lambda message: self._receive(link, message), lambda why: self._closed(link, why))
        link.nonce = secrets.token_hex(16)
        self._strangers[link] = time.monotonic()
        link.send({"hello": link.nonce})

    def _receive(self, link: Link, message: Message) -> None:
        if link.node_rank is not None:
            member = self._status(link.node_rank)
            if member is not None and member.link is link:
                self._take_report(member, message)
            return
        # The answer to a member's proof is the hub's proof.
        k, nonce = int(message["node_rank"]), str(message["nonce"])
        token = self.spec.token
        admitted = k in self.members or (self.spec.restarts and 0 <= k < len(self.spec.nodes))
        if not admitted or not proven(message["proof"], token, "member", k, link.nonce, nonce):
            return self._drop(link, "could not prove to belong to this run")
        member = self._status(k) or self.guests.setdefault(k, MemberStatus(k))
        if member.link is not None:
            member.link.close()
        del self._strangers[link]
        link.node_rank = k
        member.link, member.gone, member.heard = link, None, time.monotonic()
        link.send({"proof": proof(token, "hub", k, link.nonce, nonce)})

    def _status(self, k: int) -> MemberStatus | None:
        return self.members.get(k) or self.guests.get(k)

    def _closed(self, link: Link, why: str) -> None:
        if link in self._strangers:
            return self._drop(link, why)
        member = self._status(-1 if link.node_rank is None else link.node_rank)
        if member is not None and member.link is link:
            self.guests.pop(member.node_rank, None)
            member.link, member.gone, member.gone_wall = None, time.monotonic(), self._clock()

    def _drop(self, link: Link, why: str) -> None:
        link.close()
        self._strangers.pop(link, None)
        kind = why.partition(":")[0]  # the rest may be text chosen by the other end, which must not grow the table
        self.dropped[kind] = self.dropped.get(kind, 0) + 1

    # Heartbeats.

    def _take_report(self, member: MemberStatus, message: Message) -> None:
        if "ping" in message:
            member.heard = time.monotonic()
            if member.link is not None and not member.link.waiting:
                member.link.send({"pong": 1})
            return
        if "away" in message:
            member.away = True
            return
        report = MEMBER_REPORT(message)
        got, sent = self._clock(), report["t"]
        ahead = sent - got if report["offset"] is None else report["offset"]
        if member.node_rank in self.guests:
            member.standing, member.final = report["standing"], report["final"] in _ENDS
        elif report["generation"] == self.spec.generation:
            # A stop or failure ends the run. If the run can continue without the member, the failure does not end it.
            cause, member.ahead = received_cause(report["cause"], ahead, len(self.spec.nodes)), ahead
            member.state, member.trained = report["state"][:20], report["trained"]
            member.ranks, member.findings = report["ranks"], report["findings"]
            member.host, member.place = report["host"], report["place"]
            member.stacks, member.waits, member.standing = report["stacks"], report["waits"], report["standing"]
            member.own_ranks, member.final = tuple(report["own_ranks"]), report["final"] in _ENDS
            if cause is None and member.final and report["final"] != "done" and self.order is None:  # it lost this hub
                cause = make_cause(member.node_rank, "node", "lost", "it was cut off from the lead node", self._clock())
            if cause is not None:
                self.stop_asked = self.stop_asked or cause["kind"] == "stop"
                self._end_or_leave(member, cause)
            self._finish()
        member.heard, member.beats = time.monotonic(), member.beats + 1
        if member.link is not None and not member.link.waiting:
            # not to all members at the same time
            often = (member.beats + member.node_rank) % (1 + len(self.members) // _TABLE_NODES) == 0
            member.link.send({"t0": sent, "t1": got, **self._orders(member, with_peers=often)})

    def _orders(self, member: MemberStatus, *, with_peers: bool = False) -> Message:
        """Return the message to a member, with the current orders of the hub.

        "stop": end now; "cause" says why. "finish": end normally, as all training nodes are done. with_peers: include
        the state of all nodes.
        """
        # A member that the run continued or finished without is told that there is no restart.
        decision, generation = self.decision, self.spec.generation
        without = member.left is not None or (member.node_rank in self.guests and self.order == Order())
        if without and (decision is None or decision["generation"] <= generation):
            left = {"restart": False, "leave": False, "why": "", "left": True, "given_up": member.left is not None}
            decision = {"generation": generation + 1, **left}
        own = {str(self.spec.hub): {"state": self._own.get("state"), "age": 0.0}}
        return {
            "t2": self._clock(),
            "cause": self.cause if member.left is None or self._stopping else member.left,
            "stop": self._stopping or member.left is not None,
            "finish": self.order is not None and not self._stopping and member.left is None,
            "peers": {**own, **self.table} if with_peers else None,
            "stacks": self.stacks_wanted,
            "known_final": member.final,
            "turn": self.turn,
            **({"decision": decision, "generation": generation} if decision else {}),
        }

    def _broadcast(self) -> None:
        for member in (*self.members.values(), *self.guests.values()):
            if member.link is not None:
                member.link.send(self._orders(member))

    # Decisions about the run.

    def _stop(self, cause: Cause) -> None:
        first = first_cause(self.cause, cause)
        if first != self.cause or not self._stopping:
            self.cause, self.order = first, Order(first)
            self._ordered = self._ordered or time.monotonic()
            self._broadcast()

    def _finish(self) -> None:
        # Ranks of nodes that the run continues without do not count.
        # Called for each report: in a run of many nodes, most calls end at the first node that trains.
        if self.order is not None or self._own.get("trained", False) is False:
            return
        trained = [one.trained for one in self.members.values() if one.left is None]
        if False not in trained and (self._own["trained"] or any(trained)):
            self.order = Order()
            self._broadcast()

    @property
    def _stopping(self) -> bool:
        return self.order is not None and self.order.cause is not None

    def _expected(self) -> Iterator[MemberStatus]:
        return (member for member in self.members.values() if not (member.final or member.lost))

    def _overdue(self, member: MemberStatus, now: float) -> tuple[str, float]:
        """Return why a member counts as lost and since when, in seconds since the epoch; ('', 0) if it is not lost."""
        spec = self.spec
        if member.heard is None:
            late = now - self._opened > spec.start_timeout
            why = f"it did not report to node{spec.hub} within {spec.start_timeout:g} s (run.start_timeout)"
            return (why, self._clock()) if late else ("", 0.0)
        if member.gone is not None and now - member.gone > eof_patience(spec.peer_timeout):
            return KILLED, member.gone_wall
        if now - member.heard > spec.peer_timeout:
            since = self._clock() - (now - member.heard)
            return f"{silence(spec)}; its machine or its network is down", since
        return "", 0.0

    def _end_or_leave(self, member: MemberStatus, cause: Cause) -> None:
        if member.left is not None:
            return
        if cause["kind"] in ("failure", "lost") and cause["node_rank"] == member.node_rank and self._can_lose(member):
            # If the member is still connected, it gets the order to stop.
            self.gone[str(member.node_rank)] = {
                "since": cause["t"],
                "t": cause["t"] + member.ahead,
                "why": cause["reason"],
                "how": cause["kind"],
                "kind": "server-lost",
                "text": left_words(cause, self.spec.crew, self._gone),
            }
            member.left = cause
            self._finish()
            self._broadcast()
            return
        if cause["kind"] == "lost":
            self.lost[str(member.node_rank)] = {"since": cause["t"], "why": cause["reason"]}
        self._stop(fatal(cause, self.spec.crew, self._gone))

    def _can_lose(self, member: MemberStatus) -> bool:
        crew, k = self.spec.crew, member.node_rank
        if self._stopping or self._waits:
            return False
        if self.spec.nodes[k].role == "server" and self.order is not None:
            return True
        return crew.can_lose(k, self._gone)

    @property
    def _waits(self) -> bool:
        """Whether the run still waits in line; it does not begin without one of its nodes."""
        return self.spec.queued_at > 0 and self.spec.generation == 0 and not self.turn["go"]

    @property
    def _gone(self) -> set[int]:
        return {member.node_rank for member in self.members.values() if member.left is not None}


def excused(when: float | None, pause: float, now: float) -> float | None:
    """Move a time later by ``pause``, at most to ``now``, so that a pause does not count as silence of another node.

    when: time of the other node's last message, or of the end of its connection; None stays None. pause: seconds for
    which this machine was suspended and could not receive messages.
    """
    return None if when is None else min(when + pause, now)


KILLED = "its supervisor ended without reporting a result; it was probably killed"


def silence(spec: NodeSpec) -> str:
    """Return why a silent node counts as lost: ``no sign of life for 6 s (run.peer_timeout)``."""
    return f"no sign of life for {spec.peer_timeout:g} s (run.peer_timeout)"
