"""A connection between two supervisors: JSON lines over a non-blocking TCP socket, with mutual authentication.

Each end proves that it knows the run's token by an HMAC-SHA256 over both ends' nonces; the token is never sent.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import selectors
import socket
from collections.abc import Callable
from typing import Any

from launcher.node.child_process import Loop
from launcher.node.json_reader import loads

_MAX_GREETING = 1 << 10  # bytes of a line before the other end is authenticated

MAX_LINE = 1 << 18  #: bytes of a line afterwards

MAX_UNSENT = 1 << 20  #: bytes that may wait to be sent

_READ = 1 << 16

_READS_AT_ONCE = 8

Message = dict[str, Any]


class Link:
    """One end of a connection between two supervisors.

    ``received(message)`` is called for each message. ``closed(reason)`` is called if the connection ends without a call
    of ``close``.
    """

    def __init__(
        self, sock: socket.socket, loop: Loop, received: Callable[[Message], None], closed: Callable[[str], None]
    ) -> None:
        self.node_rank: int | None = None  #: of the other end, once it is authenticated
        self.nonce = ""
        self._sock, self._loop, self._received, self._closed = sock, loop, received, closed
        self._partial, self._unsent = b"", b""
        self._open, self._broken = True, False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(sock, selectors.EVENT_READ, self._ready)

    @property
    def waiting(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, or store it until the socket is writable.

        Closes the connection if more than ``MAX_UNSENT`` bytes are stored.
        """
        if not self._open or self._broken:
            return
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > MAX_UNSENT:
            self._end("the other end does not read")
        else:
            self._flush()

    def close(self) -> None:
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
        if not events & selectors.EVENT_READ:
            return
        for _ in range(_READS_AT_ONCE):
            if not self._open:
                return
            try:
                data = self._sock.recv(_READ)
            except BlockingIOError:
                return
            except OSError as error:
                return self._end(error.strerror or str(error))
            if not data:
                return self._end("connection closed")
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                if not self._open or self._too_long(line):
                    continue
                try:
                    message = loads(line)
                    if not isinstance(message, dict):
                        raise ValueError("not a JSON object")
                    self._received(message)
                except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
                    self._end(f"invalid message: {error!r}")
            if self._open:
                self._too_long(self._partial)

    def _flush(self) -> None:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            pass  # the loop calls ``_ready`` once the socket is writable
        except OSError:  # the other end has closed the connection; what it sent before is read first
            self._unsent, self._broken = b"", True
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._loop.watch(self._sock, events, self._ready)

    def _too_long(self, line: bytes) -> bool:
        limit = _MAX_GREETING if self.node_rank is None else MAX_LINE
        if len(line) > limit:
            self._end(f"a line of more than {limit} bytes")
        return len(line) > limit


def proof(token: str, role: str, node_rank: int, hub_nonce: str, member_nonce: str) -> str:
    """Return the proof, in hex, that ``role`` (hub or member) sends to show that it knows the token."""
    text = f"gnnfleet {role} {node_rank} {hub_nonce} {member_nonce}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def proven(shown: Any, token: str, role: str, node_rank: int, hub_nonce: str, member_nonce: str) -> bool:
    """Whether ``shown`` is ``proof(...)``; compared in constant time."""
    return isinstance(shown, str) and hmac.compare_digest(
        shown.encode(), proof(token, role, node_rank, hub_nonce, member_nonce).encode()
    )


def listen(address: str, port: int) -> socket.socket:
    """Return a listening non-blocking socket. It listens on all addresses if ``address`` is not one of this machine's.

    Raises OSError.
    """
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
