"""A node's end of its connection to the hub (see ``launcher.node.peers.model``).

As in NTP (RFC 5905, section 8): of a round trip with times t0 (sent here), t1 (arrived there), t2 (sent there) and
t3 (arrived here) the clocks differ by ((t0 - t1) + (t3 - t2)) / 2, wrong by at most half the time on the way.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from launcher.node.child_process import Loop
from launcher.node.peers.hub import excused, silence
from launcher.node.peers.link import Link, Message, proof, proven
from launcher.node.peers.model import EOF_PATIENCE, Cause, Meeting, Order, Report, Team, make_cause, received_cause

_KEPT = 32  # round trips; older ones tell of a clock that may have drifted since

_SLACK = 0.005  # seconds by which two round trips may disagree beyond what their times on the way allow


class ClockOffset:
    """This clock minus the other one, in seconds, by the quickest of the last round trips."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (time on the way, offset)

    @property
    def value(self) -> float | None:
        """None before the first round trip."""
        return min(self._trips)[1] if self._trips else None

    @property
    def quickest(self) -> float | None:
        """Seconds the quickest round trip took."""
        return min(self._trips)[0] if self._trips else None

    def add(self, t0: float, t1: float, t2: float, t3: float) -> None:
        """Take in a round trip; one that contradicts those before means that a clock was set."""
        on_the_way = (t3 - t0) - (t2 - t1)
        if on_the_way < 0:  # a clock was set in the midst of it
            return
        offset = ((t0 - t1) + (t3 - t2)) / 2
        if self._trips:
            best, known = min(self._trips)
            if abs(offset - known) > (on_the_way + best) / 2 + _SLACK:
                self._trips.clear()
        self._trips.append((on_the_way, offset))


_TRY_EVERY = 0.3  # seconds between two attempts to connect

_TRY_FOR = 1.0  # seconds an attempt may take; a new one gets through a mended line sooner than TCP's later repeats

_TRIPS_FOR = 3.0  # round trips an attempt gets at least

_PING_EVERY = 0.2  # seconds between two signs of life

_PINGS = 640  # a second that the hub takes from all members

_SILENT = 2.0  # seconds without an answer after which a new connection is made

_LATE = 2.0  # seconds between two looks that mean: this machine itself stood still

_QUICK_TRIPS = 4  # round trips made at once, for the clocks' offset


class Member:
    """The hub as a member sees it; nothing it does can block but looking up the name of its host."""

    def __init__(self, meeting: Meeting, loop: Loop, clock: Callable[[], float] = time.time) -> None:
        self.meeting = meeting
        self.order: Order | None = None
        self.cause: Cause | None = None
        self.lost: dict[str, dict[str, Any]] = {}
        self.gone: dict[str, dict[str, Any]] = {}
        self.team: Team | None = None
        self.spare = meeting.crew.spare()
        self.stacks_wanted = False
        self._loop, self._clock = loop, clock
        self._offset, self._trips = ClockOffset(), 0
        self._own: Report | None = None
        self._peers: dict[str, dict[str, Any]] = {}
        self._peers_told = 0.0
        self._place: tuple[int, Any] | None = None  # family and address, once looked up
        self._connecting: socket.socket | None = None
        self._link: Link | None = None
        self._silent: Link | None = None  # kept until a new one is proven: its end would tell the hub that we died
        self._heard: float | None = None
        self._gone: float | None = None
        self._known_final = False
        self._hub_nonce = ""
        self._trouble = ""  # why the last attempt to connect failed
        self._opened = self._looked = self._tried = self._pinged = time.monotonic()
        self._ping_every = max(_PING_EVERY, len(meeting.labels) / _PINGS)

    # As any supervisor's peers.

    @property
    def offset(self) -> float | None:
        return self._offset.value

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        """As the hub told last, the hub itself as heard."""
        now = time.monotonic()
        rows = {k: {**row, "age": _add(row["age"], now - self._peers_told)} for k, row in self._peers.items()}
        key = str(self.meeting.hub)
        hub = {"state": rows.get(key, {}).get("state", "absent"), "age": _add(0.0, now - (self._heard or now))}
        rows[key] = hub if self._heard is not None else {"state": "absent", "age": None}
        return {k: row for k, row in rows.items() if k != str(self.meeting.node_rank)}

    def open(self) -> None:
        self._opened = self._looked = time.monotonic()
        self._connect()

    def look(self) -> None:
        """Keep the connection, and notice when the hub is lost."""
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        if pause > _LATE:
            self._heard, self._gone = excused(self._heard, pause, now), excused(self._gone, pause, now)
        if not self.lost:
            why, since = self._overdue(now)
            if why:
                self._lose(why, since)
        silent = self._heard is not None and now - self._heard > min(_SILENT, self.meeting.peer_timeout / 2)
        if self._link is not None and now - self._tried > _SILENT and (silent or self._link.node_rank is None):
            self._set_aside(self._link)
        late = now - self._tried > (_TRY_EVERY if self._connecting is None else self._try_for)
        if self._link is None and late and not self.parted():
            self._connect()
        if now - self._pinged >= self._ping_every:
            self._ping(now)

    def report(self, report: Report) -> None:
        self._own = report
        self._send()

    def parted(self) -> bool:
        """Whether the hub knows this node's end, or is lost itself."""
        return self._known_final or bool(self.lost)

    def close(self) -> None:
        self._forget_attempt()
        for link in (self._link, self._silent):
            if link is not None:
                link.close()
        self._link = self._silent = None

    # The connection.

    @property
    def _try_for(self) -> float:
        """Not longer than need be where the way to the hub is known: after a cut each attempt may be the first to get
        through."""
        trip = self._offset.quickest
        return _TRY_FOR if trip is None else min(_TRY_FOR, max(_TRY_EVERY, _TRIPS_FOR * trip))

    def _ping(self, now: float) -> None:
        """Between reports: who has been heard just before a cut bears a longer one."""
        self._pinged = now
        if self._proven is not None and not self._proven.waiting:
            self._proven.send({"ping": 1})

    def _connect(self) -> None:
        self._forget_attempt()
        self._tried = time.monotonic()
        try:
            family, place = self._place or self._look_up()
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._trouble = error.strerror or str(error)
            return
        sock.setblocking(False)
        self._connecting = sock
        status = sock.connect_ex(place)
        if status not in (0, errno.EINPROGRESS):
            return self._failed_attempt(status)
        self._loop.watch(sock, selectors.EVENT_WRITE, lambda _: self._connected())

    def _look_up(self) -> tuple[int, Any]:
        found = socket.getaddrinfo(self.meeting.address, self.meeting.port, type=socket.SOCK_STREAM)
        self._place = found[0][0], found[0][4]
        return self._place

    def _connected(self) -> None:
        sock = self._connecting
        assert sock is not None
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            return self._failed_attempt(status)
        self._loop.unwatch(sock)
        self._connecting = None
        self._link = link = Link(
            sock, self._loop, lambda message: self._take(link, message), lambda why: self._closed(link, why)
        )

    def _failed_attempt(self, status: int) -> None:
        self._trouble = os.strerror(status)
        self._forget_attempt()

    def _forget_attempt(self) -> None:
        if self._connecting is not None:
            self._loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None

    def _set_aside(self, link: Link) -> None:
        """Give up a connection: one that never got anywhere at once, one gone silent when there is another."""
        self._link = None
        if link.node_rank is None:
            return link.close()
        self._drop_silent()
        self._silent = link

    def _drop_silent(self) -> None:
        if self._silent is not None:
            self._silent.close()
            self._silent = None

    def _closed(self, link: Link, why: str) -> None:
        self._trouble = why
        if link is self._silent:
            self._silent = None
        else:
            self._link = None
        if self._heard is not None and self._gone is None and self._proven is None:
            self._gone = time.monotonic()

    @property
    def _proven(self) -> Link | None:
        """The connection to the hub."""
        return self._link if self._link is not None and self._link.node_rank is not None else self._silent

    # Messages.

    def _take(self, link: Link, message: Message) -> None:
        if link.node_rank is not None:
            return self._news(message)
        meeting, token = self.meeting, self.meeting.token
        k = meeting.node_rank
        if "hello" in message:
            self._hub_nonce, link.nonce = str(message["hello"]), secrets.token_hex(16)
            shown = proof(token, "member", k, self._hub_nonce, link.nonce)
            link.send({"node_rank": k, "nonce": link.nonce, "proof": shown})
        elif proven(message["proof"], token, "hub", k, self._hub_nonce, link.nonce):
            link.node_rank = self.meeting.hub
            self._drop_silent()
            self._heard, self._gone = time.monotonic(), None
            self._send()
        else:
            raise ValueError(f"what listens there is not node{meeting.hub} of this run")

    def _send(self) -> None:
        link = self._proven
        if link is None or self._own is None or link.waiting:
            return
        link.send({"t": self._clock(), "offset": self.offset, **self._own})

    def _news(self, message: Message) -> None:
        now = self._clock()
        self._heard = time.monotonic()
        if "pong" in message:
            return
        if "t0" in message:
            self._offset.add(float(message["t0"]), float(message["t1"]), float(message["t2"]), now)
        if message["peers"] is not None:
            self._peers, self._peers_told = dict(message["peers"]), self._heard
        self._known_final = self._known_final or bool(message["known_final"])
        self.stacks_wanted = self.stacks_wanted or bool(message["stacks"])
        self.team = message["team"] or self.team
        behind = (float(message["t2"]) - now) if self.offset is None else -self.offset
        self.cause = received_cause(message["cause"], behind)
        if message["stop"]:
            self.order = Order(self.cause)
        elif message["finish"]:
            self.order = self.order or Order()
        self._trips += 1
        if self._trips < _QUICK_TRIPS:
            self._send()

    # The hub lost.

    def _overdue(self, now: float) -> tuple[str, float]:
        meeting = self.meeting
        if self._heard is None:
            late = now - self._opened > meeting.start_timeout
            place, trouble = f"{meeting.address} port {meeting.port}", self._trouble or "no answer"
            why = (
                f"it could not be reached at {place} within {meeting.start_timeout:g} s (run.start_timeout): {trouble}"
            )
            return (why, self._clock()) if late else ("", 0.0)
        refused = self._trouble == os.strerror(errno.ECONNREFUSED)
        if self._gone is not None and refused and now - self._gone > min(EOF_PATIENCE, meeting.peer_timeout):
            return "its supervisor ended without a word; something killed it", self._clock() - (now - self._gone)
        if now - self._heard > meeting.peer_timeout:
            return f"{silence(meeting)}; its machine or the network is down", self._clock() - (now - self._heard)
        return "", 0.0

    def _lose(self, why: str, since: float) -> None:
        self.lost[str(self.meeting.hub)] = {"since": since, "why": why}
        if self.order is None:
            self.cause = make_cause(self.meeting.hub, "node", "lost", why, since)
            self.order = Order(self.cause)


def _add(age: Any, seconds: float) -> float | None:
    return None if age is None else round(float(age) + seconds, 1)
