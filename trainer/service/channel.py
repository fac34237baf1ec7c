"""One connection to a graph server. Matches replies to requests by id, and resends requests after a reconnect.

A keep-alive (``ALIVE``) or bytes of a reply restart the deadline of a request. In total, a request waits for at most
``_LONGEST`` times its deadline.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from trainer.core import slabs
from trainer.core.errors import WireError
from trainer.core.files import allow_many_files
from trainer.service import stream
from trainer.service.service_keys import ServiceKeys, is_pinned
from trainer.service.stream import WOULD_BLOCK, MessageReader, MessageWriter
from trainer.wire.frames import MAX_MESSAGE, Kind, Message, decode, encode

_SLICE = 0.1  #: seconds after which a waiting thread checks for ``close()`` and for changes of the connection

GONE_AFTER = 3.0  #: seconds without a connection until a replica is used; half of that if the host refuses connections

_LONGEST = 10  #: a wait ends after this many times its deadline, even if the server is alive

_PROGRESS = 16_384  #: received bytes that count as progress of a reply; more than pings alone can amount to

_PING_AFTER = 2.0  #: seconds without a byte after which the server is pinged

_STOPPED_AFTER = 30.0  #: seconds without a byte after which a connection counts as lost

_CONNECT_TIME = 5.0  #: seconds that an attempt to connect may take, including the handshake

_FIRST_PAUSE, _LAST_PAUSE = 0.1, 1.0  #: seconds between attempts to connect

_UNATTENDED = 1.0  #: seconds without a call of a method, after which the time limits of the connection start anew

_SLOW, _BUSY = "connected, but the server is slow or stuck", "connected; the server is alive but busy"

_REFUSED = "handshake refused: do both nodes have this run's service.key?"


class Call:
    def __init__(self, request: Message, request_id: int):
        self.request, self.request_id = request, request_id
        self.reply: Message | None = None
        self.gone = False  #: ``Channel.wait`` gave up because the server was unreachable


class _State(Enum):
    DOWN = 1  #: not connected; waits before the next attempt
    CONNECTING = 2
    GREETING = 3  #: waiting for the server's greeting
    HANDSHAKE = 4  #: TLS handshake
    WELCOME = 5  #: waiting for the first ping, with which the server admits this client
    UP = 6


class Channel:
    """A TCP connection to a graph server that is reopened when it is lost. Thread-safe.

    Bytes are read and sent only during ``submit``, ``send`` and ``wait``.
    """

    def __init__(self, endpoint: str, keys: ServiceKeys | None, gone_after: float | None = None):
        """``gone_after``: seconds without a connection after which ``wait`` gives up. None: only at the deadline."""
        allow_many_files()
        self.lock = threading.Lock()
        self.owner = threading.current_thread()
        self.state = "no connection"  #: description for messages
        self.bytes_received = 0
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._context = None if keys is None else keys.client_context()
        self._server = "" if keys is None else keys.server or keys.public
        self._gone_after = gone_after
        self._calls: WeakValueDictionary[int, Call] = WeakValueDictionary()  # drops calls that nothing refers to
        self._last_id = 0
        self._closed = self._refused = False
        self._down_since: float | None = time.monotonic()
        self._heard_at = float("-inf")  # last keep-alive or progress of a reply
        self._at = _State.DOWN
        self._sock: socket.socket | None = None
        self._reader, self._writer = MessageReader(MAX_MESSAGE, _memory), MessageWriter()
        self._began = self._read_at = self._pinged_at = 0.0  # times of the attempt, the last byte, the last ping
        self._attended_at = time.monotonic()  # last call that read or sent
        self._retry_at, self._pause = 0.0, _FIRST_PAUSE
        self._progress = 0  # bytes since ``_heard_at`` was last set because of them
        self._step()

    def submit(self, request: Message) -> Call:
        """Send a request. Raises ``WireError`` if the request cannot be encoded."""
        with self.lock:
            self._last_id += 1
            call = Call(request, self._last_id)
            parts = encode(request, request_id=self._last_id)
            self._attend()
            self._calls[self._last_id] = call
            if self._at == _State.UP:
                self._put(parts)
            else:
                self._step()
        return call

    def send(self, message: Message) -> None:
        with self.lock:
            self._put(encode(message))

    def wait(self, call: Call, until: float, check: Callable[[], None]) -> Message | None:
        """Wait for the reply to ``call`` until the time ``until`` of ``time.monotonic()``.

        Returns None if no reply arrives or the server is unreachable. A keep-alive or bytes of a reply restart the time
        limit. ``check`` is called at least every ``_SLICE`` seconds, and may raise an error to end the wait.
        """
        deadline = until - time.monotonic()
        while call.reply is None:
            check()
            last = min(max(until, self._heard_at + deadline), until + (_LONGEST - 1) * deadline)
            left = last - time.monotonic()
            patience = max(0.0, min(left, _SLICE))
            if self.lock.acquire(timeout=patience):
                try:
                    received = call.reply is not None or self._receive(patience)
                    call.gone = not received and self._is_gone()
                finally:
                    self.lock.release()
                if not received and (left <= 0 or call.gone):
                    return None
            elif left <= 0:
                return None
        return call.reply

    def abandon(self, call: Call) -> None:
        """Give up a call. Reconnects, so that the server drops the request."""
        with self.lock:
            self._calls.pop(call.request_id, None)
            if not self._closed:
                self._lose(self.state)
                self._step()

    def close(self) -> None:
        """Close the connection. Threads that wait for a reply notice this within ``_SLICE`` seconds."""
        with self.lock:
            self._closed = True
            self._drop()

    def _receive(self, patience: float) -> bool:
        self._attend()
        until = time.monotonic() + patience
        while not self._closed:
            self._step()
            if self._at == _State.UP and self._read():
                return True
            now = time.monotonic()
            if self._at == _State.UP:
                if now - self._read_at > _STOPPED_AFTER:
                    self._lose("connection lost")
                elif now - max(self._read_at, self._pinged_at) > _PING_AFTER:
                    self._pinged_at = now
                    self._put(())
            left = until - now
            if left <= 0:
                return False
            # Wait for the socket, or for the time of the next attempt to connect.
            if self._sock is None:
                time.sleep(max(0.0, min(left, self._retry_at - time.monotonic())))
                continue
            wanted = select.POLLOUT if self._at == _State.CONNECTING or self._writer.unsent else 0
            poll = select.poll()
            poll.register(self._sock, wanted | (0 if self._at == _State.CONNECTING else select.POLLIN))
            poll.poll(max(1, round(1000 * left)))
            if self._at == _State.UP and self._writer.unsent:
                self._flush()
        return False

    def _attend(self) -> None:
        now = time.monotonic()
        # Nobody reads meanwhile, so missing bytes do not mean that the server is stuck.
        if not self._calls or now - self._attended_at > _UNATTENDED:
            self._read_at, self._retry_at = now, min(self._retry_at, now)
            self._down_since = None if self._down_since is None else now
        self._attended_at = now

    def _read(self) -> bool:
        assert self._sock is not None
        try:
            while not self._reader.messages:
                self._reader.pings = 0
                self._progress += self._reader.read(self._sock.recv_into)
                self._read_at = time.monotonic()
                if self._progress >= _PROGRESS:
                    self._progress, self._heard_at = 0, self._read_at
        except WOULD_BLOCK:
            return False
        except (OSError, EOFError):
            self._lose("connection lost")
            return False
        except WireError as error:
            self._lose(f"connected, but the server sent an invalid message: {error}")
            return False
        received = self._reader.messages.popleft()
        self.bytes_received += received.size
        try:
            reply = decode(received.frames)
        except WireError as error:
            self.state = f"connected, but the server sent an invalid message: {error}"
            return True
        if reply.kind == Kind.ALIVE:
            self.state, self._heard_at = _BUSY, time.monotonic()
            self._put(())  # a ping, so that the server keeps replies to this client
        elif (call := self._calls.pop(reply.request_id, None)) is not None:
            call.reply = reply
        return True

    # Connecting.

    def _step(self) -> None:
        if self._at == _State.UP:
            return
        try:
            if self._at == _State.DOWN and time.monotonic() >= self._retry_at:
                self._began = time.monotonic()
                family, _, _, _, place = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
                self._sock = socket.socket(family, socket.SOCK_STREAM)
                stream.set_options(self._sock)
                self._reader, self._writer = MessageReader(MAX_MESSAGE, _memory), MessageWriter()
                self._hello = b""
                status = self._sock.connect_ex(place)
                if status not in (0, errno.EINPROGRESS):
                    raise OSError(status, os.strerror(status))
                self._at = _State.CONNECTING
            if self._at == _State.CONNECTING:
                assert self._sock is not None
                poll = select.poll()
                poll.register(self._sock, select.POLLOUT)
                if poll.poll(0):
                    if status := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        raise OSError(status, os.strerror(status))
                    self._writer.put_raw(stream.greeting(self._context is not None))
                    self._at = _State.GREETING
                    self.state = self._keep_refusal("connected, but no graph server speaks there")
            if self._at == _State.GREETING:
                assert self._sock is not None
                self._writer.send(self._sock)
                while len(self._hello) < stream.GREETING_BYTES:
                    received = self._sock.recv(stream.GREETING_BYTES - len(self._hello))
                    if not received:
                        raise EOFError
                    self._hello += received
                if problem := stream.greeting_problem(self._hello, self._context is not None):
                    self._fail(problem, None)
                elif self._context is not None:
                    self._sock = self._context.wrap_socket(self._sock, do_handshake_on_connect=False)
                    self._at = _State.HANDSHAKE
                else:
                    self._at = _State.WELCOME
            if self._at == _State.HANDSHAKE:
                assert isinstance(self._sock, ssl.SSLSocket)
                self._sock.do_handshake()
                if is_pinned(self._sock, {self._server}):
                    self._at = _State.WELCOME
                else:
                    self._fail(_REFUSED, None)
            if self._at == _State.WELCOME:
                assert self._sock is not None
                while not (self._reader.pings or self._reader.messages):
                    self._reader.read(self._sock.recv_into)
                self._at, self.state = _State.UP, _SLOW
                self._down_since, self._refused, self._pause = None, False, _FIRST_PAUSE
                self._read_at = time.monotonic()
                for call in list(self._calls.values()):
                    self._writer.put(encode(call.request, request_id=call.request_id))
                self._flush()
        except WOULD_BLOCK:
            pass
        except (ssl.SSLError, ConnectionResetError, EOFError) as error:
            refused = self._context is not None and self._at in (_State.HANDSHAKE, _State.WELCOME)
            self._fail(_REFUSED if refused else self._keep_refusal("connection lost"), error)
        except (OSError, UnicodeError) as error:  # UnicodeError: ``a..b`` is no name of a host
            self._fail(self.state, error)
        if self._at not in (_State.DOWN, _State.UP) and time.monotonic() - self._began > _CONNECT_TIME:
            self._fail(self.state, None)

    def _keep_refusal(self, state: str) -> str:
        return self.state if self.state.startswith("handshake refused") else state

    def _fail(self, state: str, error: BaseException | None) -> None:
        self.state, self._refused = state, isinstance(error, ConnectionRefusedError)
        self._drop()
        self._retry_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _LAST_PAUSE)

    def _lose(self, state: str) -> None:
        self.state = state
        self._drop()
        self._retry_at = time.monotonic()

    def _drop(self) -> None:
        self._at = _State.DOWN
        self._down_since = time.monotonic() if self._down_since is None else self._down_since
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _is_gone(self) -> bool:
        """Return whether the connection has been down for ``gone_after`` seconds.

        Half of that time is enough if the host is up but refuses connections to the port.
        """
        if self._gone_after is None or self._down_since is None:
            return False
        return time.monotonic() - self._down_since >= (self._gone_after / 2 if self._refused else self._gone_after)

    # Sending.

    def _put(self, parts: Any) -> None:
        # ``_step`` sends requests again once the connection is up.
        if self._at == _State.UP:
            self._writer.put(parts)
            self._flush()

    def _flush(self) -> None:
        assert self._sock is not None
        try:
            self._writer.send(self._sock)
        except OSError:
            self._lose("connection lost")


def _memory(size: int) -> Any:
    return slabs.empty((size,), np.uint8)
