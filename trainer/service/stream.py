"""Messages on a TCP connection, plain or in TLS: what graph servers and their clients send each other.

Each side begins with a greeting: ``GNFS`` · version u16 · flags u16 (1: TLS follows). A message is a count u32, so many
sizes u64, and the parts of these sizes (``trainer.service.wire.frames`` says what is in them), all little-endian. A
message without parts is a sign of life: a server sends one as soon as a connection is admitted, and one back for
each that it receives.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import WireError
from trainer.service.wire.frames import MAX_ARRAYS, VERSION

MAX_PARTS = MAX_ARRAYS + 1

PING = struct.pack("<I", 0)  #: a message without parts

_GREETING = struct.Struct("<4sHH")

_MAGIC = b"GNFS"

_TLS = 1

SCRATCH = 1 << 16  #: bytes read at once while messages are small; more than a TLS record holds

_DIRECT = 1 << 15  #: bytes; a part of which so much is missing is read into its own memory

_BUFFERS = 64  #: handed to the kernel at once

_RECORD = 1 << 18  #: bytes handed to TLS at once

_MAX_PINGS = 100  #: at a time; honest peers send one every two seconds

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)  #: of a socket that does not block

GREETING_BYTES = _GREETING.size


def greeting(encrypted: bool) -> bytes:
    """What either side sends first."""
    return _GREETING.pack(_MAGIC, VERSION, _TLS * encrypted)


def greeting_problem(received: bytes, encrypted: bool) -> str:
    """Why the other side's greeting rules out talking to it; '' when nothing does."""
    magic, version, flags = _GREETING.unpack(received)
    if magic != _MAGIC:
        return "what listens there is no graph server"
    if version != VERSION:
        return f"it speaks version {version} of the protocol, not {VERSION}: is the code there the same?"
    if flags != _TLS * encrypted:
        is_it = "encrypted" if flags else "not encrypted"
        return f"handshake refused: the graph server is {is_it}; do both nodes have this run's service.key?"
    return ""


@dataclass
class Received:
    """One message."""

    parts: list[Any]  #: buffers
    size: int  #: bytes of all parts, as announced; of a message over the limit only the first part is kept
    freed: object = None  #: whose end tells that nobody refers to the message any more


class MessageReader:
    """Cuts the bytes of a connection into messages.

    Messages of more than ``limit`` bytes are read to their end and their parts, but a first one of at most 64 KiB,
    are not kept. ``allocate`` gives memory for parts, uint8 [size].
    """

    def __init__(
        self, limit: int, allocate: Callable[[int], Array] = lambda size: np.empty(size, np.uint8),
        scratch: memoryview | None = None,
    ):  # fmt: skip
        """``scratch``: memory of ``SCRATCH`` bytes that readers of one thread share."""
        self.messages: deque[Received] = deque()  #: complete ones
        self.pings = 0  #: messages without parts since the owner last set it to 0
        self.partial = 0  #: bytes held of a message that is not complete
        self._limit, self._allocate = limit, allocate
        self._scratch = memoryview(bytearray(SCRATCH)) if scratch is None else scratch
        self._head = bytearray()  # count and sizes, until they are complete
        self._sizes: list[int] = []  # of the parts of the current message
        self._parts: list[Any] = []
        self._size = 0  # of the current message
        self._part: memoryview | None = None  # being filled; None between messages
        self._filled = 0  # bytes of the current part that have come
        self._skip = False  # the current part is not kept

    def read(self, receive: Callable[[memoryview], int]) -> int:
        """Make one call of ``receive`` (a socket's ``recv_into``) and take in what it gives; the number of bytes.

        Raises what ``receive`` does, ``EOFError`` at the end of the connection, and ``WireError`` for bytes that are
        no messages.
        """
        direct = self._part is not None and not self._skip and len(self._part) - self._filled >= _DIRECT
        target = self._part[self._filled :] if direct and self._part is not None else self._scratch
        count = receive(target)
        if count == 0:
            raise EOFError
        if direct:
            self._advance(count)
        else:
            self._take(self._scratch[:count])
        return count

    def _take(self, data: memoryview) -> None:
        while len(data):
            if self._part is None:
                data = self._take_sizes(data)
                continue
            count = min(len(data), self._left)
            if not self._skip:
                self._part[self._filled : self._filled + count] = data[:count]
            self._advance(count)
            data = data[count:]

    @property
    def _left(self) -> int:
        """Bytes missing of the current part."""
        return self._sizes[len(self._parts)] - self._filled

    def _take_sizes(self, data: memoryview) -> memoryview:
        """Take what belongs to the count and the sizes of a message; the rest."""
        missing = 4 - len(self._head)
        if missing <= 0:
            missing = 4 + 8 * self._count - len(self._head)
        self._head += data[:missing]
        if len(self._head) >= 4:
            if self._count > MAX_PARTS:
                raise WireError(f"a message of {self._count} parts; {MAX_PARTS} are possible")
            if self._count == 0:
                self._ping()
            elif len(self._head) == 4 + 8 * self._count:
                self._begin()
        return data[missing:]

    @property
    def _count(self) -> int:
        return int.from_bytes(self._head[:4], "little")

    def _ping(self) -> None:
        self._head.clear()
        self.pings += 1
        if self.pings > _MAX_PINGS:
            raise WireError(f"{self.pings} messages without parts")

    def _begin(self) -> None:
        self._sizes = list(struct.unpack_from(f"<{self._count}Q", self._head, 4))
        self._head.clear()
        self._parts, self._size = [], sum(self._sizes)
        self._next_part()

    def _next_part(self) -> None:
        """Begin the next part that is not empty; end the message where there is none."""
        while len(self._parts) < len(self._sizes):
            size = self._sizes[len(self._parts)]
            over = self._size > self._limit
            self._skip = over and (len(self._parts) > 0 or size > SCRATCH)
            self._filled = 0
            if size:
                self._part = self._scratch if self._skip else memoryview(self._memory(size)).cast("B")
                return
            self._parts.append(b"")
        self._part = None
        self.messages.append(Received(self._parts, self._size))
        self._parts, self.partial = [], 0

    def _memory(self, size: int) -> Any:
        return bytearray(size) if not self._parts else self._allocate(size)

    def _advance(self, count: int) -> None:
        """So many more bytes of the current part have come."""
        self._filled += count
        self.partial += 0 if self._skip else count
        if self._left == 0:
            assert self._part is not None
            self._parts.append(b"" if self._skip else self._part.obj)
            self._next_part()


class MessageWriter:
    """What waits to be sent on a connection that does not block."""

    def __init__(self) -> None:
        self.unsent = 0  #: bytes
        self.messages = 0  #: that are not sent whole
        self._buffers: deque[memoryview] = deque()
        self._ends: deque[int] = deque()  # of messages: bytes put so far at each one's end
        self._put = self._sent = 0

    def put(self, parts: Sequence[Any]) -> None:
        """Queue a message."""
        sizes = [len(part) for part in parts]
        prefix = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        self._add(prefix + parts[0] if parts else prefix)
        for part in parts[1:]:
            self._add(part)
        self._ends.append(self._put)
        self.messages += 1

    def put_raw(self, data: bytes) -> None:
        """Queue bytes that are no message: a greeting."""
        self._add(data)

    def send(self, sock: socket.socket) -> int:
        """Send as much as goes at once; the number of bytes. Raises ``OSError`` when the connection has ended."""
        total = 0
        try:
            while self._buffers:
                if isinstance(sock, ssl.SSLSocket):
                    count = sock.send(self._buffers[0][:_RECORD])
                else:
                    count = sock.sendmsg(list(islice(self._buffers, _BUFFERS)))
                total += count
                self._drop(count)
        except WOULD_BLOCK:
            pass
        self._sent += total
        self.unsent -= total
        while self._ends and self._ends[0] <= self._sent:
            self._ends.popleft()
            self.messages -= 1
        return total

    def _add(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        if len(view):
            self._buffers.append(view)
            self.unsent += len(view)
            self._put += len(view)

    def _drop(self, count: int) -> None:
        while count:
            first = self._buffers[0]
            if count < len(first):
                self._buffers[0] = first[count:]
                return
            count -= len(first)
            self._buffers.popleft()


def set_options(sock: socket.socket) -> None:
    """No waiting for more to send; a host that has vanished is noticed after ten seconds without acknowledgement."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):  # Linux's
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
