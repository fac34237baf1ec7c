"""Reads and writes messages on a TCP connection between a graph server and a client, plain or with TLS.

Each side begins with a greeting: ``GNFS`` · version u16 · flags u16 (1: TLS follows). A message is sent as the number
of its frames (see ``wire/frames.py``) u32, the size of each frame in bytes u64, and the frames, all little-endian. A
message without frames is a ping: a server sends a ping as soon as it admits a connection, and in reply to each ping.
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
from trainer.wire.frames import MAX_ARRAYS, SMALL, VERSION

MAX_FRAMES = MAX_ARRAYS + 1

_GREETING = struct.Struct("<4sHH")

_MAGIC = b"GNFS"

_TLS = 1

SCRATCH = 1 << 16  #: bytes read at once while messages are small; more than a TLS record

_DIRECT = 1 << 15  #: bytes; a frame of which at least this much is missing is read directly into its memory

_BUFFERS = 64  #: buffers per call of sendmsg

_RECORD = 1 << 18  #: bytes per call of send with TLS

_MAX_PINGS = 100  #: pings between two resets of ``MessageReader.pings``; a client sends one every two seconds

WOULD_BLOCK = (
    BlockingIOError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)  #: exceptions of a non-blocking socket that would have to wait

GREETING_BYTES = _GREETING.size


def greeting(encrypted: bool) -> bytes:
    return _GREETING.pack(_MAGIC, VERSION, _TLS * encrypted)


def greeting_problem(received: bytes, encrypted: bool) -> str:
    """Return why the other side's greeting is incompatible, or '' if it is compatible."""
    magic, version, flags = _GREETING.unpack(received)
    if magic != _MAGIC:
        return "the process that listens there is not a graph server"
    if version != VERSION:
        return f"it uses protocol version {version}, not {VERSION}: do both sides run the same version of gnnfleet?"
    if flags != _TLS * encrypted:
        mode = "encrypted" if flags else "not encrypted"
        return f"handshake refused: the graph server is {mode}; do both nodes have this run's service.key?"
    return ""


@dataclass
class Received:
    frames: list[Any]  #: buffers
    size: int  #: announced bytes of all frames; a message over the limit has only its first frame, if small
    freed: object = None  #: an object whose deletion shows that the message is no longer referenced


class MessageReader:
    """Splits the bytes received on a connection into messages.

    The frames of a message over ``limit`` bytes are discarded, except the first frame if it has at most 64 KiB.
    Memory for a frame is allocated as its bytes arrive, twice as much each time: a sender must send at least half of
    what it makes the reader allocate. If the sender is trusted, ``allocate`` returns the whole memory, uint8 [size],
    of each frame except the first.
    """

    def __init__(self, limit: int, allocate: Callable[[int], Array] | None = None, scratch: memoryview | None = None):
        """``scratch``: a buffer of ``SCRATCH`` bytes that all readers of one thread may share."""
        self.messages: deque[Received] = deque()  #: complete messages
        self.pings = 0  #: pings since the owner last set it to 0
        self.partial = 0  #: stored bytes of the incomplete message
        self._limit, self._allocate = limit, allocate
        self._scratch = memoryview(bytearray(SCRATCH)) if scratch is None else scratch
        self._head = bytearray()  # count and sizes, until they are complete
        self._sizes: list[int] = []  # sizes of the frames of the current message
        self._frames: list[Any] = []
        self._size = 0  # size of the current message
        self._frame: memoryview | None = None  # the frame that is being filled; None between messages
        self._filled = 0  # bytes received of the current frame
        self._skip = False  # whether the current frame is discarded

    def read(self, receive: Callable[[memoryview], int]) -> int:
        """Call ``receive`` (a socket's ``recv_into``) once and process the bytes. Returns the number of bytes.

        Raises ``EOFError`` at the end of the connection, ``WireError`` for invalid bytes, and errors of ``receive``.
        """
        target, direct = self._scratch, False
        if self._frame is not None and not self._skip and self._left >= _DIRECT:
            target, direct = self._room(self._frame), True
        count = receive(target)
        if count == 0:
            raise EOFError
        if direct:
            self._advance(count)
            return count
        data = self._scratch[:count]
        while len(data):
            if self._frame is None:
                data = self._take_sizes(data)
                continue
            taken = min(len(data), self._left)
            if not self._skip:
                room = self._room(self._frame)
                taken = min(taken, len(room))
                room[:taken] = data[:taken]
            self._advance(taken)
            data = data[taken:]
        return count

    @property
    def _left(self) -> int:
        return self._sizes[len(self._frames)] - self._filled

    def _take_sizes(self, data: memoryview) -> memoryview:
        missing = 4 - len(self._head)
        if missing <= 0:
            missing = 4 + 8 * self._count - len(self._head)
        self._head += data[:missing]
        if len(self._head) >= 4:
            if self._count > MAX_FRAMES:
                raise WireError(f"the message has {self._count} frames; the limit is {MAX_FRAMES}")
            if self._count == 0:
                self._head.clear()
                self.pings += 1
                if self.pings > _MAX_PINGS:
                    raise WireError(f"more than {_MAX_PINGS} pings arrived in a short time")
            elif len(self._head) == 4 + 8 * self._count:
                self._sizes = list(struct.unpack_from(f"<{self._count}Q", self._head, 4))
                if min(self._sizes[1:], default=SMALL + 1) <= SMALL:  # would take far more memory than bytes
                    raise WireError(f"a frame after the first has {min(self._sizes[1:])} bytes, expected over {SMALL}")
                self._head.clear()
                self._frames, self._size = [], sum(self._sizes)
                self._next_frame()
        return data[missing:]

    @property
    def _count(self) -> int:
        return int.from_bytes(self._head[:4], "little")

    def _next_frame(self) -> None:
        while len(self._frames) < len(self._sizes):
            size = self._sizes[len(self._frames)]
            over = self._size > self._limit
            self._skip = over and (len(self._frames) > 0 or size > SCRATCH)
            self._filled = 0
            if size:
                if self._skip:
                    self._frame = self._scratch
                elif self._allocate is None or not self._frames:
                    self._frame = np.empty(min(size, SCRATCH), np.uint8).data
                else:
                    self._frame = self._allocate(size).data.cast("B")
                return
            self._frames.append(b"")
        self._frame = None
        self.messages.append(Received(self._frames, self._size))
        self._frames, self.partial = [], 0

    def _room(self, frame: memoryview) -> memoryview:
        """Return the free memory of the current frame, which is enlarged if it is full."""
        if self._filled == len(frame):
            larger = np.empty(min(2 * len(frame), self._sizes[len(self._frames)]), np.uint8).data
            larger[: len(frame)] = frame
            self._frame = frame = larger
        return frame[self._filled :]

    def _advance(self, count: int) -> None:
        self._filled += count
        self.partial += 0 if self._skip else count
        if self._left == 0:
            assert self._frame is not None
            self._frames.append(b"" if self._skip else self._frame.obj)
            self._next_frame()


class MessageWriter:
    def __init__(self) -> None:
        self.unsent = 0  #: bytes
        self.messages = 0  #: number of messages that are not completely sent
        self._buffers: deque[memoryview] = deque()
        self._ends: deque[int] = deque()  # number of bytes queued up to the end of each message
        self._put = self._sent = 0

    def put(self, frames: Sequence[Any]) -> None:
        sizes = [len(frame) for frame in frames]
        prefix = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        self._add(prefix + frames[0] if frames else prefix)
        for frame in frames[1:]:
            self._add(frame)
        self._ends.append(self._put)
        self.messages += 1

    def put_raw(self, data: bytes) -> None:
        """Queue bytes that are not a message: the greeting."""
        self._add(data)

    def send(self, sock: socket.socket) -> int:
        """Send as many bytes as possible without blocking, and return their number. Raises ``OSError``."""
        total = 0
        try:
            while self._buffers:
                if isinstance(sock, ssl.SSLSocket):
                    count = sock.send(self._buffers[0][:_RECORD])
                else:
                    count = sock.sendmsg(list(islice(self._buffers, _BUFFERS)))
                total += count
                while count:
                    first = self._buffers[0]
                    if count < len(first):
                        self._buffers[0] = first[count:]
                        break
                    count -= len(first)
                    self._buffers.popleft()
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


def set_options(sock: socket.socket) -> None:
    """Make a socket non-blocking, disable Nagle's algorithm and enable TCP keep-alive.

    Sending and receiving then fail once the other host has been unreachable for ten seconds.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):  # on Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
