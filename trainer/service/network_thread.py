"""The thread of a graph server that receives requests from all connections and sends replies.

The memory for each client host is limited:

- If its complete requests take ``HOST_REQUESTS / 2`` bytes, only its connections with an incomplete request are read.
- If all its requests take more than ``HOST_REQUESTS`` bytes, its connection with the oldest incomplete request is
  closed.
- If its unsent replies take more than ``_HOST_ANSWERS`` bytes, its requests are held back, and its connections that do
  not receive replies are closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainer.core.errors import ServiceError, WireError
from trainer.service import messages, stream
from trainer.service.batch_scheduler import BatchScheduler
from trainer.service.fair_queue import BlockingFairQueue, Peer
from trainer.service.service_keys import Admission, ServiceKeys, is_pinned
from trainer.service.stats import Counters
from trainer.service.stream import WOULD_BLOCK, MessageReader, MessageWriter, Received
from trainer.wire.frames import Kind, decode, encode, head_of

MAX_CONNECTIONS = 8192

HOST_REQUESTS = 128 << 20  #: bytes of pending requests per host

_HOST_ANSWERS = 128 << 20  #: bytes of unsent replies per host

HANDSHAKE_TIME = 10.0  #: seconds within which a connection must be admitted

MAX_QUEUED = 64  #: a connection with this many queued requests is not read

_ALIVE_EVERY = 1.0  #: seconds between keep-alives

_TICK = 0.25  #: seconds between checks of deadlines and limits

_GLANCE = 0.005  #: seconds between checks of connections that are not read

_ACCEPTED_AT_ONCE = 32

_READS_AT_ONCE = 4  #: reads of one connection before the others are served

_MESSAGES_AT_ONCE = 32  #: messages of one connection before the others are served

_SENT_AHEAD = 4  #: the requests of a connection with more unsent replies than this wait

_SILENT = 8.0  #: seconds without activity after which a connection with unacknowledged batches is closed

#: A connection with unsent replies counts as not receiving if fewer than ``_PROGRESS`` bytes are sent in ``_STUCK`` s.
_STUCK, _PROGRESS = 0.5, 1 << 16

_BACKLOG = 1024

_ShortQueue = BlockingFairQueue[tuple[Peer, Received]]


class _State(Enum):
    GREETING = 1  #: waiting for the client's greeting
    HANDSHAKE = 2  #: TLS handshake
    OPEN = 3


@dataclass(eq=False)
class _Host:
    address: str
    connections: set[_Connection] = field(default_factory=set)
    requests: int = 0  #: bytes of complete requests without a reply
    partial: int = 0  #: bytes of incomplete requests
    unsent: int = 0  #: bytes of unsent replies


@dataclass(eq=False)
class _Connection:
    sock: socket.socket
    peer: Peer
    host: _Host
    reader: MessageReader
    since: float  #: time when it was opened; all times are those of ``time.monotonic()``
    state: _State = _State.GREETING
    writer: MessageWriter = field(default_factory=MessageWriter)
    mask: int = select.EPOLLIN  #: events that epoll watches
    hello: bytes = b""  #: bytes of the client's greeting received so far
    paused: bool = False  #: its requests are held back
    pings: int = 0  #: number of pings answered
    partial_since: float = 0.0  #: time when the first bytes of the incomplete message were received
    progress: int = 0  #: bytes of replies sent since ``progress_since``
    progress_since: float = 0.0
    active_at: float = 0.0  #: time when bytes were last received or sent

    def __post_init__(self) -> None:
        self.descriptor = self.sock.fileno()


class NetworkThread(threading.Thread):
    """The thread that owns all sockets of a graph server. Runs until ``stop()``.

    ``short`` and ``scheduler``: the queues of received requests. Each second, sends a keep-alive to every connection
    with requests or unacknowledged batches in ``scheduler``. Closes a connection that sends an invalid message.
    """

    def __init__(
        self, listener: socket.socket, keys: ServiceKeys | None, short: _ShortQueue, scheduler: BatchScheduler[Any],
        counters: Counters, max_request: int,
    ):  # fmt: skip
        super().__init__(name="network", daemon=True)
        self._listener, self._admission = listener, None if keys is None else Admission(keys)
        self._short, self._scheduler, self._counters, self._max_request = short, scheduler, counters, max_request
        self._alive = encode(messages.alive())
        self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)  # when no other thread can wake this thread any more
        self._scratch = memoryview(bytearray(stream.SCRATCH))
        self._woken = self._stopping = False
        self._accepting = True  # False for a moment after ``accept`` has failed
        self._outbox: deque[tuple[Peer, Sequence[Any] | None]] = deque()
        self._freed: deque[tuple[_Host, int]] = deque()
        self._by_fd: dict[int, _Connection] = {}
        self._by_peer: dict[Peer, _Connection] = {}
        self._hosts: dict[str, _Host] = {}
        self._unread: set[_Connection] = set()  # connections that are currently not read
        self._count = 0
        self._tick_at = self._alive_at = 0.0

    # Methods for other threads.

    def reply(self, peer: Peer, parts: Sequence[Any]) -> None:
        """Send a reply, unless the connection is closed."""
        self._outbox.append((peer, parts))
        self._wake_up()

    def is_open(self, peer: Peer) -> bool:
        return peer in self._by_peer

    def end(self, peer: Peer) -> None:
        self._outbox.append((peer, None))
        self._wake_up()

    def stop(self) -> None:
        """End the thread, and close all connections and the listener."""
        self._stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    # The loop.

    def run(self) -> None:
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)
        try:
            while not self._stopping:
                self._turn()
        finally:
            for connection in list(self._by_fd.values()):
                connection.sock.close()
            self._listener.close()
            self._epoll.close()

    def _turn(self) -> None:
        events = self._epoll.poll(_GLANCE if self._unread else _TICK)
        # Replies of other threads.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._woken = False  # before reading the outbox, so that later replies wake this thread again
        while self._outbox:
            peer, parts = self._outbox.popleft()
            connection = self._by_peer.get(peer)
            if parts is None:
                self._counters.add("malformed")
                if connection is not None:
                    self._close(connection)
                continue
            self._counters.add("bytes_out", sum(map(len, parts)))
            if connection is not None:
                self._send(connection, parts)
        # Sockets that are ready.
        for descriptor, event in events:
            if descriptor == self._listener.fileno():
                self._accept()
            elif connection := self._by_fd.get(descriptor):
                self._serve(connection, event)
        while self._freed:
            host, size = self._freed.popleft()
            host.requests -= size
            self._forget(host)
        for readable in [one for one in self._unread if self._may_be_read(one)]:
            self._unread.discard(readable)
            self._serve(readable, select.EPOLLIN)
            self._watch(readable)
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + _TICK
            self._tick(now)

    def _serve(self, connection: _Connection, event: int) -> None:
        if event & (select.EPOLLERR | select.EPOLLHUP):
            self._close(connection)
            return
        try:
            if event & select.EPOLLOUT:
                connection.active_at = time.monotonic()
                self._flush(connection)
            if event & select.EPOLLIN:
                self._read(connection)
        except (OSError, EOFError):
            self._close(connection)
        except WireError:
            self._counters.add("malformed")
            self._close(connection)

    # Connections.

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, place = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # closed by the client
                continue
            except OSError:  # no descriptor or memory left: others may be closed until the next tick
                self._close_unadmitted()
                self._epoll.modify(self._listener, 0)
                self._accepting = False
                return
            if len(self._by_fd) >= MAX_CONNECTIONS and not self._close_unadmitted():
                self._counters.add("refused")
                sock.close()
                continue
            try:
                stream.set_options(sock)
            except OSError:  # closed by the client
                sock.close()
                continue
            self._count += 1
            address = str(place[0])
            host = self._hosts.setdefault(address, _Host(address))
            reader = MessageReader(self._max_request, scratch=self._scratch)
            connection = _Connection(sock, Peer(address, self._count), host, reader, time.monotonic())
            host.connections.add(connection)
            self._by_fd[sock.fileno()] = self._by_peer[connection.peer] = connection
            self._epoll.register(sock, connection.mask)
            connection.writer.put_raw(stream.greeting(self._admission is not None))
            host.unsent += connection.writer.unsent
            self._serve(connection, select.EPOLLOUT)

    def _close_unadmitted(self) -> bool:
        """Close the oldest connection without a finished handshake. Returns whether there was one."""
        waiting = [one for one in self._by_fd.values() if one.state != _State.OPEN]
        if waiting:
            self._close(min(waiting, key=lambda one: one.since))
        return bool(waiting)

    def _close(self, connection: _Connection) -> None:
        descriptor, host, peer = connection.descriptor, connection.host, connection.peer
        if self._by_peer.pop(peer, None) is None:
            return
        del self._by_fd[descriptor]
        self._unread.discard(connection)
        with contextlib.suppress(OSError, ValueError):  # closed by TLS
            self._epoll.unregister(descriptor)
        connection.sock.close()
        host.connections.discard(connection)
        host.partial -= connection.reader.partial
        host.unsent -= connection.writer.unsent
        self._forget(host)
        if connection.state != _State.OPEN:
            self._counters.add("refused")
            return
        self._scheduler.connection_closed(peer)
        self._short.drop(peer)

    def _forget(self, host: _Host) -> None:
        if not host.connections and not host.requests and self._hosts.get(host.address) is host:
            del self._hosts[host.address]

    def _watch(self, connection: _Connection) -> None:
        if connection.peer not in self._by_peer:
            return
        mask = 0 if connection in self._unread else select.EPOLLIN
        mask |= select.EPOLLOUT if connection.writer.unsent else 0
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.descriptor, mask)

    # Receiving.

    def _read(self, connection: _Connection) -> None:
        if connection.state == _State.GREETING:
            try:
                received = connection.sock.recv(stream.GREETING_BYTES - len(connection.hello))
            except WOULD_BLOCK:
                return
            if not received:
                raise EOFError
            connection.hello += received
            if len(connection.hello) < stream.GREETING_BYTES:
                return
            if stream.greeting_problem(connection.hello, self._admission is not None):
                self._close(connection)
                return
            if self._admission is None:
                self._open(connection)
            elif connection.writer.unsent:  # a new connection always has room for the 8 bytes of the greeting
                raise EOFError
            else:
                connection.state = _State.HANDSHAKE
                connection.sock = self._admission.context().wrap_socket(
                    connection.sock, server_side=True, do_handshake_on_connect=False
                )
        if connection.state == _State.HANDSHAKE:
            assert isinstance(connection.sock, ssl.SSLSocket) and self._admission is not None
            try:
                connection.sock.do_handshake()
            except WOULD_BLOCK:
                return
            except OSError:
                self._close(connection)
                return
            if not is_pinned(connection.sock, self._admission.admitted):
                self._close(connection)
                return
            self._open(connection)
        reader, host = connection.reader, connection.host
        try:
            for _ in range(_READS_AT_ONCE):
                if not self._take_messages(connection):
                    return
                before = reader.partial
                reader.read(connection.sock.recv_into)
                connection.active_at = time.monotonic()
                if reader.partial and not before:
                    connection.partial_since = time.monotonic()
                host.partial += reader.partial - before
                if host.partial + host.requests > HOST_REQUESTS:
                    begun = [one for one in host.connections if one.reader.partial]
                    if begun:
                        self._counters.add("malformed")
                        self._close(min(begun, key=lambda one: one.partial_since))
        except WOULD_BLOCK:
            pass
        self._take_messages(connection)

    def _take_messages(self, connection: _Connection) -> bool:
        """Queue some of the requests that have been read, and reply to pings.

        Returns whether the connection may be read again now.
        """
        reader = connection.reader
        if connection.peer not in self._by_peer:
            return False
        for _ in range(_MESSAGES_AT_ONCE):
            if not reader.messages or not self._may_be_read(connection):
                break
            received = reader.messages.popleft()
            self._counters.add("bytes_in", received.size)
            head = head_of(received.frames)
            if head is None:
                raise WireError("the message is not a request")
            if received.size > self._max_request:
                cause = f"the request takes {received.size} bytes, over {self._max_request}"
                self._counters.add("malformed")
                self._send(connection, encode(head.error(f"{cause}; ask for fewer nodes or pairs at once")))
            elif head.kind == Kind.ACK:
                decode(received.frames, 0, 0)
                self._scheduler.acknowledge(connection.peer, head.request_id)
            else:
                connection.host.requests += received.size
                received.freed = _Freed(self._freed, connection.host, received.size)
                self._short.put(connection.peer, (connection.peer, received))
        if reader.pings > connection.pings and not connection.writer.unsent:
            connection.pings = reader.pings
            self._send(connection, ())
        if reader.messages or not self._may_be_read(connection):
            self._unread.add(connection)
            self._watch(connection)
            return False
        return connection.peer in self._by_peer

    def _may_be_read(self, connection: _Connection) -> bool:
        if connection.paused or self._short.of(connection.peer) >= MAX_QUEUED:
            return False
        return connection.host.requests < HOST_REQUESTS // 2 or connection.reader.partial > 0

    def _open(self, connection: _Connection) -> None:
        connection.state = _State.OPEN
        self._send(connection, ())

    # Sending.

    def _send(self, connection: _Connection, parts: Sequence[Any]) -> None:
        before = connection.writer.unsent
        connection.writer.put(parts)
        connection.host.unsent += connection.writer.unsent - before
        if not before:
            connection.progress, connection.progress_since = 0, time.monotonic()
        try:
            self._flush(connection)
        except OSError:
            self._close(connection)

    def _flush(self, connection: _Connection) -> None:
        sent = connection.writer.send(connection.sock)
        connection.host.unsent -= sent
        connection.progress += sent
        if connection.progress >= _PROGRESS:
            connection.progress, connection.progress_since = 0, time.monotonic()
        self._pause_or_resume(connection)
        self._watch(connection)

    def _pause_or_resume(self, connection: _Connection) -> None:
        ahead = connection.writer.messages > _SENT_AHEAD or connection.host.unsent > _HOST_ANSWERS
        if ahead == connection.paused:
            return
        connection.paused = ahead
        for queue in (self._short, self._scheduler):
            (queue.pause if ahead else queue.resume)(connection.peer)

    # Periodic work.

    def _tick(self, now: float) -> None:
        if not self._accepting:
            self._accepting = True
            self._epoll.modify(self._listener, select.EPOLLIN)
        for connection in [one for one in self._by_fd.values() if one.state != _State.OPEN]:
            if now - connection.since > HANDSHAKE_TIME:
                self._close(connection)
        for connection in self._by_fd.values():
            connection.reader.pings = connection.pings = 0
        for host in list(self._hosts.values()):
            if host.unsent > _HOST_ANSWERS:
                for connection in list(host.connections):
                    if connection.writer.unsent and now - connection.progress_since > _STUCK:
                        self._close(connection)  # it could send almost nothing recently
            for connection in list(host.connections):
                if connection.paused:
                    self._pause_or_resume(connection)
        if now >= self._alive_at:
            self._alive_at = now + _ALIVE_EVERY
            for peer in self._scheduler.unacknowledged_peers():
                if (holder := self._by_peer.get(peer)) is not None and now - holder.active_at > _SILENT:
                    self._close(holder)
            for peer in self._scheduler.peers():
                if (waiting := self._by_peer.get(peer)) is not None and not waiting.writer.unsent:
                    self._send(waiting, self._alive)


class _Freed:
    """An object attached to a request.

    When the request is no longer referenced, the object appends the request's host and size to ``to``.
    """

    def __init__(self, to: deque[tuple[_Host, int]], host: _Host, size: int):
        self._to, self._freed = to, (host, size)

    def __del__(self) -> None:
        self._to.append(self._freed)


def bound_listener(endpoint: str) -> tuple[socket.socket, str]:
    """Listen at ``tcp://address:port``. Returns the socket, and the endpoint with the actual port.

    Raises ``ServiceError`` if listening fails.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    bare = host.strip("[]")
    try:
        family, _, _, _, place = socket.getaddrinfo(
            None if bare == "*" else bare, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: ``a..b`` is no name of a host
        raise ServiceError(_bind_failed(endpoint, error)) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ServiceError(_bind_failed(endpoint, error)) from None
    listener.setblocking(False)
    return listener, f"tcp://{host}:{listener.getsockname()[1]}"


def _bind_failed(endpoint: str, error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"graph server: {endpoint} is in use by another process; end it or choose another port"
    why = error.strerror if isinstance(error, OSError) else "no host has such a name"
    return f"graph server: cannot listen at {endpoint}: {why}; is it an address of this host?"
