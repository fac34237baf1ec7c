"""A member's side of its connection to the hub, and the offset between the clocks of member and hub.

The offset is measured as in NTP (RFC 5905, section 8).
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
from launcher.node.json_records import ORDERS
from launcher.node.peers.hub import KILLED, excused, silence
from launcher.node.peers.link import Link, Message, proof, proven
from launcher.node.peers.model import (
    Order,
    Peers,
    Report,
    Turn,
    eof_patience,
    make_cause,
    received_cause,
)
from launcher.node.spec import NodeSpec

_KEPT = 32  # round trips; older ones are dropped as the clocks may have drifted since

_SLACK = 0.005  # seconds by which the offsets of two round trips may differ beyond their maximum errors


class ClockOffset:
    """Seconds by which this clock is ahead of the hub's, from the quickest of the last ``_KEPT`` round trips."""

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # (network time, offset) in seconds

    @property
    def value(self) -> float | None:
        return min(self._trips)[1] if self._trips else None

    @property
    def quickest(self) -> float | None:
        """Seconds of the quickest round trip, without the hub's processing time; None before the first round trip."""
        return min(self._trips)[0] if self._trips else None

    def add(self, t0: float, t1: float, t2: float, t3: float) -> None:
        """Add a round trip: sent here at t0, received by the hub at t1, answered at t2, received here at t3."""
        on_the_way = (t3 - t0) - (t2 - t1)
        if on_the_way < 0:  # a clock was set during the round trip
            return
        offset = ((t0 - t1) + (t3 - t2)) / 2
        if self._trips:
            best, known = min(self._trips)
            if abs(offset - known) > (on_the_way + best) / 2 + _SLACK:
                self._trips.clear()
        self._trips.append((on_the_way, offset))


_TRY_EVERY = 0.3  # seconds between two attempts to connect

# Timeout of an attempt in seconds. After a network cut a new attempt succeeds sooner than TCP's retransmissions.
_TRY_FOR = 1.0

_USUAL_TIMEOUT = 6.0  # default of run.peer_timeout

_TRIPS_FOR = 3.0  # timeout of an attempt, as a multiple of the quickest round trip

_PING_EVERY = 0.2  # seconds between two pings

_PINGS = 640  # pings per second that the hub receives from all members together

_SILENT = 2.0  # seconds without an answer after which a new connection is opened

_LATE = 2.0  # seconds between two calls of ``look`` that mean that this machine was suspended

_QUICK_TRIPS = 4  # first round trips, made without a pause to measure the clock offset


class Member(Peers):
    """The ``Peers`` of a member: its connection to the hub. No method blocks, except to resolve the hub's host name."""

    def __init__(self, spec: NodeSpec, loop: Loop, clock: Callable[[], float] = time.time) -> None:
        super().__init__(spec)
        self._spare = spec.crew.spare()
        self.stacks_wanted = False
        self._loop, self._clock = loop, clock
        self._offset, self._trips = ClockOffset(), 0
        self._own: Report | None = None
        self._peers: dict[str, dict[str, Any]] = {}
        self._peers_received = 0.0
        self._hub_address: tuple[int, Any] | None = None  # family and socket address, once resolved
        self._connecting: socket.socket | None = None
        self._link: Link | None = None
        # A silent connection stays open until a new one is authenticated: else the hub would count this node as lost.
        self._silent: Link | None = None
        self._heard: float | None = None
        self._gone: float | None = None
        self._known_final = False
        self._hub_nonce = ""
        self._trouble = ""  # why the last attempt to connect failed
        self._opened = self._looked = self._tried = self._pinged = time.monotonic()
        self._ping_every = max(_PING_EVERY, len(spec.nodes) / _PINGS)

    # Methods of ``Peers``.

    @property
    def offset(self) -> float | None:
        return self._offset.value

    @property
    def table(self) -> dict[str, dict[str, Any]]:
        """The state of each other node, as the hub last reported it.

        "age": seconds since the hub last received a message from that node. For the hub itself: seconds since this node
        last received a message from the hub.
        """
        now = time.monotonic()
        rows = {k: {**row, "age": _add(row["age"], now - self._peers_received)} for k, row in self._peers.items()}
        key = str(self.spec.hub)
        hub = {"state": rows.get(key, {}).get("state", "absent"), "age": _add(0.0, now - (self._heard or now))}
        rows[key] = hub if self._heard is not None else {"state": "absent", "age": None}
        return {k: row for k, row in rows.items() if k != str(self.spec.node_rank)}

    @property
    def spare(self) -> list[int]:
        return self._spare

    def open(self) -> None:
        self._opened = self._looked = time.monotonic()
        self._connect()

    def look(self) -> None:
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        if pause > _LATE:
            self._heard, self._gone = excused(self._heard, pause, now), excused(self._gone, pause, now)
        if not self.lost:
            why, since = self._overdue(now)
            if why:
                self.lost[str(self.spec.hub)] = {"since": since, "why": why}
                if self.order is None:
                    self.cause = make_cause(self.spec.hub, "node", "lost", why, since)
                    self.order = Order(self.cause)
        silent = self._heard is not None and now - self._heard > min(_SILENT, self.spec.peer_timeout / 2)
        # On slow machines a connection gets longer: the hub may have accepted it already, and left the previous one.
        tried_for = _SILENT * max(1.0, self.spec.peer_timeout / _USUAL_TIMEOUT)
        if self._link is not None and now - self._tried > tried_for and (silent or self._link.node_rank is None):
            # A new connection replaces it. If the hub has proved its identity on it, it stays open until the new one is
            # authenticated.
            link, self._link = self._link, None
            if link.node_rank is None:
                link.close()
            else:
                self._drop_silent()
                self._silent = link
        late = now - self._tried > (_TRY_EVERY if self._connecting is None else self._attempt_timeout)
        if self._link is None and late and not self.may_leave():
            self._connect()
        if now - self._pinged >= self._ping_every:
            # Pings go out more often than reports: after a network cut, nearly all of ``peer_timeout`` is left to
            # reconnect.
            self._pinged = now
            if self._proven is not None and not self._proven.waiting:
                self._proven.send({"ping": 1})

    def report(self, report: Report) -> None:
        self._own = report
        self._send()

    def may_leave(self) -> bool:
        return self._known_final or bool(self.lost)

    def begin(self, spec: NodeSpec) -> None:
        super().begin(spec)
        self._spare = spec.crew.spare()
        self.lost, self.stacks_wanted, self._known_final, self._own = {}, False, False, None

    def call(self, turn: Turn) -> None:
        raise AssertionError("only the lead node calls a turn")

    def leave(self) -> None:
        """Close the connection to a hub that counts as lost. The hub is told first, as it may be alive."""
        if self._proven is not None:
            self._proven.send({"away": 1})
        self.close()

    def close(self) -> None:
        self._forget_attempt()
        for link in (self._link, self._silent):
            if link is not None:
                link.close()
        self._link = self._silent = None

    # The connection.

    @property
    def _attempt_timeout(self) -> float:
        # A small multiple of a round trip, so that a new attempt begins soon after a network cut.
        trip = self._offset.quickest
        return _TRY_FOR if trip is None else min(_TRY_FOR, max(_TRY_EVERY, _TRIPS_FOR * trip))

    def _connect(self) -> None:
        self._forget_attempt()
        self._tried = time.monotonic()
        try:
            if self._hub_address is None:
                hub = self.spec.hub_node
                found = socket.getaddrinfo(hub.address, hub.control_port, type=socket.SOCK_STREAM)
                self._hub_address = found[0][0], found[0][4]
            family, place = self._hub_address
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

    def _connected(self) -> None:
        sock = self._connecting
        assert sock is not None
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            return self._failed_attempt(status)
        self._loop.unwatch(sock)
        self._connecting = None
        self._link = link = Link(
            sock, self._loop, lambda message: self._receive(link, message), lambda why: self._closed(link, why)
        )

    def _failed_attempt(self, status: int) -> None:
        self._trouble = os.strerror(status)
        self._forget_attempt()

    def _forget_attempt(self) -> None:
        if self._connecting is not None:
            self._loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None

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
        """The connection to the hub if the hub has proved its identity, else None."""
        return self._link if self._link is not None and self._link.node_rank is not None else self._silent

    # Messages.

    def _receive(self, link: Link, message: Message) -> None:
        """Answer the hub's greeting, check its proof, or take its orders. Raises ValueError on a wrong proof."""
        if link.node_rank is not None:
            return self._take_orders(message)
        spec, token, k = self.spec, self.spec.token, self.spec.node_rank
        if "hello" in message:
            self._hub_nonce, link.nonce = str(message["hello"]), secrets.token_hex(16)
            shown = proof(token, "member", k, self._hub_nonce, link.nonce)
            link.send({"node_rank": k, "nonce": link.nonce, "proof": shown})
        elif proven(message["proof"], token, "hub", k, self._hub_nonce, link.nonce):
            link.node_rank = self.spec.hub
            self._drop_silent()
            self._heard, self._gone = time.monotonic(), None
            self._send()
        else:
            port = spec.hub_node.control_port
            raise ValueError(f"the process that listens on port {port} is not node{spec.hub} of this run")

    def _send(self) -> None:
        link = self._proven
        if link is None or self._own is None or link.waiting:
            return
        link.send({"t": self._clock(), "offset": self.offset, **self._own})

    def _take_orders(self, message: Message) -> None:
        now = self._clock()
        self._heard = time.monotonic()
        if "pong" in message:
            return
        orders, num_nodes = ORDERS(message), len(self.spec.nodes)
        decision = orders["decision"]
        if decision and decision["restart"]:
            cause, nodes = decision["cause"], (decision["lead"], decision["first"], *decision["nodes"])
            if cause is None or max(cause["node_rank"], *nodes) >= num_nodes:
                raise ValueError("a restart without a cause, or of unknown nodes")
        if "t0" in orders and "t1" in orders:
            self._offset.add(orders["t0"], orders["t1"], orders["t2"], now)
        if orders["peers"] is not None:
            self._peers, self._peers_received = orders["peers"], self._heard
        self.decision = decision or self.decision
        self.turn = orders["turn"] or self.turn
        self._known_final = self._known_final or orders["known_final"]
        if orders["generation"] not in (None, self.spec.generation):
            return  # orders for another attempt
        self.stacks_wanted = self.stacks_wanted or orders["stacks"]
        behind = orders["t2"] - now if self.offset is None else -self.offset
        self.cause = received_cause(orders["cause"], behind, num_nodes)
        if orders["stop"]:
            self.order = Order(self.cause)
        elif orders["finish"]:
            self.order = self.order or Order()
        self._trips += 1
        if self._trips < _QUICK_TRIPS:
            self._send()

    # Loss of the hub.

    def _overdue(self, now: float) -> tuple[str, float]:
        """Return why the hub counts as lost and since when, in seconds since the epoch; ('', 0) if it is not lost."""
        spec, hub = self.spec, self.spec.hub_node
        if self._heard is None:
            late = now - self._opened > spec.start_timeout
            place, trouble = f"{hub.address} port {hub.control_port}", self._trouble or "no answer"
            why = f"it could not be reached at {place} within {spec.start_timeout:g} s (run.start_timeout): {trouble}"
            return (why, self._clock()) if late else ("", 0.0)
        refused = self._trouble == os.strerror(errno.ECONNREFUSED)
        if self._gone is not None and refused and now - self._gone > eof_patience(spec.peer_timeout):
            return KILLED, self._clock() - (now - self._gone)
        if now - self._heard > spec.peer_timeout:
            return f"{silence(spec)}; its machine or the network is down", self._clock() - (now - self._heard)
        return "", 0.0


def _add(age: Any, seconds: float) -> float | None:
    return None if age is None else round(float(age) + seconds, 1)
