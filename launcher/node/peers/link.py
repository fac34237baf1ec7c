"""A connection between two supervisors: JSON lines over a non-blocking socket, both ends authenticated.

Both ends prove that they know the run's token by HMAC-SHA256 over both ends' nonces, without showing it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import selectors
import socket
from collections.abc import Callable
from typing import Any

from launcher.node.child_process import Loop

MAX_GREETING = 1 << 10  #: bytes of a line before the other end is known

MAX_LINE = 1 << 18  #: bytes of a line afterwards

MAX_UNSENT = 1 << 20  #: bytes that may wait for an end that does not read

_READ = 1 << 16

_READS_AT_ONCE = 8

Message = dict[str, Any]


class Link:
    """One end of a connection; ``heard`` gets each message, ``closed`` why it has ended (not after ``close``)."""

    def __init__(
        self, sock: socket.socket, loop: Loop, heard: Callable[[Message], None], closed: Callable[[str], None]
    ) -> None:
        self.node_rank: int | None = None  #: who is at the other end, once that is proven
        self.nonce = ""
        self._sock, self._loop, self._heard, self._closed = sock, loop, heard, closed
        self._received, self._unsent = b"", b""
        self._open = True
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(sock, selectors.EVENT_READ, self._ready)

    @property
    def waiting(self) -> bool:
        """Whether the other end has not yet taken what was sent."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send, or keep until the other end takes it; one that takes nothing is given up."""
        if not self._open:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > MAX_UNSENT:
            self._end("it takes nothing of what is sent")
        else:
            self._flush()

    def close(self) -> None:
        """End it from this side."""
        if self._open:
            self._open = False
            self._loop.unwatch(self._sock)
            self._sock.close()

    def _end(self, why: str) -> None:
        if self._open:
            self.close()
            self._closed(why)

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if events & selectors.EVENT_READ and self._open:
            self._read()

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            pass  # when it can be written, the loop says so
        except OSError as error:
            return self._end(error.strerror or str(error))
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._loop.watch(self._sock, events, self._ready)

    def _read(self) -> None:
        for _ in range(_READS_AT_ONCE):
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                return
            except OSError as error:
                return self._end(error.strerror or str(error))
            if not data:
                return self._end("connection closed")
            self._take(data)
            if not self._open:
                return

    def _take(self, data: bytes) -> None:
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            if self._open and not self._too_long(line):
                self._take_line(line)
        if self._open:
            self._too_long(self._received)

    def _too_long(self, line: bytes) -> bool:
        limit = MAX_GREETING if self.node_rank is None else MAX_LINE
        if len(line) > limit:
            self._end(f"a line of more than {limit} bytes")
        return len(line) > limit

    def _take_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("no object")
            self._heard(message)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            self._end(f"not understood: {error!r}")


def proof(token: str, role: str, node_rank: int, hub_nonce: str, member_nonce: str) -> str:
    """What ``role`` (hub, member) shows to prove that it knows the token."""
    text = f"gnnfleet {role} {node_rank} {hub_nonce} {member_nonce}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def proven(shown: Any, token: str, role: str, node_rank: int, hub_nonce: str, member_nonce: str) -> bool:
    """Whether ``shown`` is that proof."""
    return isinstance(shown, str) and hmac.compare_digest(
        shown.encode(), proof(token, role, node_rank, hub_nonce, member_nonce).encode()
    )
