"""The lead node's end of the connections between supervisors: takes heartbeats and declares silent nodes lost."""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.node.child_process import Loop
from launcher.node.peers.link import Link, Message, proof, proven
from launcher.node.peers.model import (
    EOF_PATIENCE,
    Cause,
    Meeting,
    Order,
    Report,
    Team,
    earlier,
    fatal,
    left_words,
    make_cause,
    next_team,
    received_cause,
)

_MAX_STRANGERS = 64  # connections that have not proven yet who they are; the oldest goes first

_GREETING_TIME = 5.0  # seconds a stranger gets

_ACCEPTS_AT_ONCE = 32

_LATE = 2.0  # seconds between two looks that mean: this machine itself stood still

_TABLE_NODES = 64  # nodes up to which all get the table of nodes with every beat

_ENDS = ("done", "failed", "stopped")


@dataclass
class Known:
    """What the hub knows of one member; times are monotonic."""

    node_rank: int
    link: Link | None = None
    heard: float | None = None
    gone: float | None = None  #: since when there is no connection any more
    gone_wall: float = 0.0
    state: str = "absent"
    trained: bool | None = False
    final: bool = False
    lost: bool = False
    left: Cause | None = None  #: why the run goes on without it
    own_ranks: tuple[int, ...] | None = None
    begun: bool = False  #: some rank of it has started
    ranks: dict[str, Any] = field(default_factory=dict)
    findings: list[Any] = field(default_factory=list)
    stacks: dict[str, Any] | None = None
    ahead: float = 0.0  #: its clock minus ours, seconds
    beats: int = 0


class Hub:
    """All members as the lead node sees them; nothing it does can block."""

    def __init__(self, meeting: Meeting, loop: Loop, clock: Callable[[], float] = time.time) -> None:
        self.meeting = meeting
        self.order: Order | None = None
        self.cause: Cause | None = None
        self.lost: dict[str, dict[str, Any]] = {}
        self.gone: dict[str, dict[str, Any]] = {}
        self.team: Team | None = None
        self.offset = 0.0
        self.dropped: dict[str, int] = {}  #: connections refused or broken off, by why
        self.members = {k: Known(k) for k in range(len(meeting.labels)) if k != meeting.hub}
        self.stacks_wanted = False
        self._loop, self._clock = loop, clock
        self._own: Report = {}
        self._strangers: dict[Link, float] = {}
        self._listener: socket.socket | None = None
        self._ordered: float | None = None  # when the order was given
        self._opened = self._looked = time.monotonic()

    # As any supervisor's peers.

    def open(self) -> None:
        """Listen; raises OSError."""
        self._opened = self._looked = time.monotonic()
        self._listener = listen(self.meeting.bind, self.meeting.port)
        self._loop.watch(self._listener, selectors.EVENT_READ, self._accept)

    def look(self) -> None:
        """Lose members that are overdue, and strangers."""
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        if pause > _LATE:  # nobody could have been heard
            self._excuse(pause)
        for member in self._expected():
            why, since = self._overdue(member, now)
            if why:
                self._lose(member, why, since)
        for link, since in list(self._strangers.items()):
            if now - since > _GREETING_TIME:
                self._drop(link, "said nothing")

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        now = time.monotonic()
        return {str(k): self._row(member, now) for k, member in self.members.items()}

    @property
    def spare(self) -> list[int]:
        return self.meeting.crew.spare(self._gone)

    def report(self, report: Report) -> None:
        """Take the lead node's own state; what concerns the members is told at once."""
        self._own = report
        if report.get("cause"):
            self._stop(report["cause"])
        self._finish()

    def parted(self) -> bool:
        """Whether every member has ended, or is lost; one that never came is not waited for long."""
        late = self._ordered is not None and time.monotonic() - self._ordered > self.meeting.peer_timeout
        return not any(member.heard is not None or not late for member in self._expected())

    def close(self) -> None:
        if self._listener is not None:
            self._loop.unwatch(self._listener)
            self._listener.close()
        for link in [*self._strangers, *(one.link for one in self.members.values() if one.link)]:
            link.close()

    def ask_stacks(self) -> None:
        """Have every member collect the Python stacks of its ranks; they come as ``Known.stacks``."""
        self.stacks_wanted = True
        self._broadcast()

    def stacks_missing(self) -> list[int]:
        """Members whose stacks can still come."""
        return [member.node_rank for member in self._expected() if member.stacks is None and member.link]

    # Connections.

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock = self._listener.accept()[0]
            except OSError:  # nobody left, or gone again
                return
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(min(self._strangers, key=lambda one: self._strangers[one]), "too many at once")
        link = Link(sock, self._loop, lambda message: self._heard(link, message), lambda why: self._closed(link, why))
        link.nonce = secrets.token_hex(16)
        self._strangers[link] = time.monotonic()
        link.send({"hello": link.nonce})

    def _heard(self, link: Link, message: Message) -> None:
        if link.node_rank is None:
            self._greeted(link, message)
        elif self.members[link.node_rank].link is link:
            self._take(self.members[link.node_rank], message)

    def _greeted(self, link: Link, message: Message) -> None:
        k, nonce = int(message["node_rank"]), str(message["nonce"])
        token = self.meeting.token
        if k not in self.members or not proven(message["proof"], token, "member", k, link.nonce, nonce):
            return self._drop(link, "could not prove to be of this run")
        member = self.members[k]
        if member.link is not None:
            member.link.close()
        del self._strangers[link]
        link.node_rank = k
        member.link, member.gone, member.heard = link, None, time.monotonic()
        link.send({"proof": proof(token, "hub", k, link.nonce, nonce)})

    def _closed(self, link: Link, why: str) -> None:
        if link in self._strangers:
            return self._drop(link, why)
        member = self.members.get(-1 if link.node_rank is None else link.node_rank)
        if member is not None and member.link is link:
            member.link, member.gone, member.gone_wall = None, time.monotonic(), self._clock()

    def _drop(self, link: Link, why: str) -> None:
        link.close()
        self._strangers.pop(link, None)
        kind = why.partition(":")[0]  # the rest may be a stranger's own words, of which he has many
        self.dropped[kind] = self.dropped.get(kind, 0) + 1

    # Beats.

    def _take(self, member: Known, message: Message) -> None:
        if "ping" in message:
            return self._pong(member)
        got, sent = self._clock(), float(message["t"])
        ahead = sent - got if message["offset"] is None else float(message["offset"])
        cause, member.ahead = received_cause(message["cause"], ahead), ahead
        member.heard, member.beats = time.monotonic(), member.beats + 1
        member.state, member.trained = str(message["state"])[:20], message["trained"]
        member.ranks, member.findings = dict(message["ranks"]), list(message["findings"])
        member.stacks = message["stacks"] if message["stacks"] is None else dict(message["stacks"])
        member.own_ranks, member.begun = tuple(map(int, message["own_ranks"])), bool(message["begun"])
        member.final = message["final"] in _ENDS
        if cause is not None:
            self._end_or_leave(member, cause)
        self._finish()
        if member.link is not None and not member.link.waiting:
            often = member.beats % (1 + len(self.members) // _TABLE_NODES) == 0
            member.link.send({"t0": sent, "t1": got, **self._news(member, with_peers=often)})

    def _pong(self, member: Known) -> None:
        member.heard = time.monotonic()
        if member.link is not None and not member.link.waiting:
            member.link.send({"pong": 1})

    def _news(self, member: Known, *, with_peers: bool = False) -> Message:
        own = {str(self.meeting.hub): {"state": self._own.get("state"), "age": 0.0}}
        return {
            "t2": self._clock(),
            "cause": self.cause if member.left is None or self._stopping else member.left,
            "stop": self._stopping or member.left is not None,
            "finish": self.order is not None and not self._stopping and member.left is None,
            "team": self.team,
            "peers": {**own, **self.table} if with_peers else None,
            "stacks": self.stacks_wanted,
            "known_final": member.final,
        }

    def _broadcast(self) -> None:
        for member in self.members.values():
            if member.link is not None:
                member.link.send(self._news(member))

    # What becomes of the run.

    def _stop(self, cause: Cause) -> None:
        """The first cause stops everyone; one that turns out to have come before it takes its place."""
        first = earlier(self.cause, cause)
        if first != self.cause or not self._stopping:
            self.cause, self.order = first, Order(first)
            self._ordered = self._ordered or time.monotonic()
            self._broadcast()

    def _finish(self) -> None:
        """Once all that train have trained, nobody is needed any more."""
        trained = [self._own.get("trained", False), *(member.trained for member in self._staying())]
        if self.order is None and any(trained) and False not in trained:
            self.order = Order()
            self._broadcast()

    @property
    def _stopping(self) -> bool:
        return self.order is not None and self.order.cause is not None

    def _expected(self) -> Iterator[Known]:
        return (member for member in self.members.values() if not (member.final or member.lost))

    def _overdue(self, member: Known, now: float) -> tuple[str, float]:
        """Why a member must be taken for lost, and since when by this clock; ('', 0) while it need not."""
        meeting = self.meeting
        if member.heard is None:
            late = now - self._opened > meeting.start_timeout
            why = f"it did not report to node{meeting.hub} within {meeting.start_timeout:g} s (run.start_timeout)"
            return (why, self._clock()) if late else ("", 0.0)
        if member.gone is not None and now - member.gone > min(EOF_PATIENCE, meeting.peer_timeout):
            return "its supervisor ended without a word; something killed it", member.gone_wall
        if now - member.heard > meeting.peer_timeout:
            since = self._clock() - (now - member.heard)
            return f"{silence(meeting)}; its machine or its network is down", since
        return "", 0.0

    def _lose(self, member: Known, why: str, since: float) -> None:
        member.lost, member.state = True, "lost"
        self._end_or_leave(member, make_cause(member.node_rank, "node", "lost", why, since))

    def _end_or_leave(self, member: Known, cause: Cause) -> None:
        """What ended a member ends the run, unless the run can do without it."""
        if member.left is not None:
            return
        if cause["kind"] in ("failure", "lost") and cause["node_rank"] == member.node_rank and self._can_lose(member):
            return self._leave(member, cause)
        if cause["kind"] == "lost":
            self.lost[str(member.node_rank)] = {"since": cause["t"], "why": cause["reason"]}
        self._stop(fatal(cause, self.meeting, self._gone))

    def _can_lose(self, member: Known) -> bool:
        """Not while all stop; when all have trained no server is needed any more. Ranks that have not met yet never
        would without the lost ones."""
        crew, k = self.meeting.crew, member.node_rank
        if self._stopping:
            return False
        if crew.role(k) == "server" and self.order is not None:
            return True
        return crew.can_lose(k, self._gone) and (crew.role(k) == "server" or bool(member.trained) or self._begun())

    def _begun(self) -> bool:
        """Whether the ranks of all nodes have met: then some have started, and all nodes have told theirs."""
        known = all(member.own_ranks is not None for member in self._staying() if self._trains(member))
        return known and (bool(self._own.get("begun")) or any(member.begun for member in self.members.values()))

    def _trains(self, member: Known) -> bool:
        return self.meeting.crew.role(member.node_rank) != "server"

    def _leave(self, member: Known, cause: Cause) -> None:
        """The run goes on without a member, which is told to stop should it hear us."""
        self.gone[str(member.node_rank)] = {
            "since": cause["t"],
            "t": cause["t"] + member.ahead,
            "why": cause["reason"],
            "how": cause["kind"],
            "kind": f"{self.meeting.crew.role(member.node_rank)}-lost",
            "text": left_words(cause, self.meeting, self._gone),
        }
        member.left = cause
        if member.own_ranks and not member.trained:
            staying = [tuple(self._own["own_ranks"])]
            staying += [one.own_ranks or () for one in self._staying() if one.trained is False]
            self.team = next_team(self.team, staying, member.own_ranks, cause)
        self._finish()
        self._broadcast()

    @property
    def _gone(self) -> set[int]:
        return {member.node_rank for member in self._left()}

    def _left(self) -> Iterator[Known]:
        return (member for member in self.members.values() if member.left is not None)

    def _staying(self) -> Iterator[Known]:
        return (member for member in self.members.values() if member.left is None)

    def _excuse(self, pause: float) -> None:
        for member in self.members.values():
            member.heard = excused(member.heard, pause, self._looked)
            member.gone = excused(member.gone, pause, self._looked)

    def _row(self, member: Known, now: float) -> dict[str, Any]:
        return {"state": member.state, "age": None if member.heard is None else round(now - member.heard, 1)}


def excused(when: float | None, pause: float, now: float) -> float | None:
    """A time as if the pause had not been, but never one to come: what waited was read before."""
    return None if when is None else min(when + pause, now)


def silence(meeting: Meeting) -> str:
    """``no sign of life for 6 s (run.peer_timeout)``."""
    return f"no sign of life for {meeting.peer_timeout:g} s (run.peer_timeout)"


def listen(address: str, port: int) -> socket.socket:
    """A listening socket that never blocks; on all addresses when the one given is none of this machine's."""
    infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, place = infos[0]
    everywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            sock.bind(everywhere)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
