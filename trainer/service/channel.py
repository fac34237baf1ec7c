"""One connection to a graph server: requests in flight, answers by request id, resending after a lost connection.

A server counts as alive as long as it says so (``ALIVE``) or bytes of an answer come in; a deadline is one of silence
therefore, though no wait is longer than ``_LONGEST`` deadlines.
"""

from __future__ import annotations

import math
import socket as plain
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import zmq
from zmq.utils.monitor import recv_monitor_message

from trainer.core.errors import WireError
from trainer.service.curve_keys import CurveKeys
from trainer.service.wire.frames import MAX_FRAME, Kind, Message, decode, encode

SLICE = 0.1  #: seconds; the longest a waiting thread stays away from close() and from news of the connection

GONE_AFTER = 3.0  #: seconds without a line until another holder is asked; half of it where the host refuses connections

_LONGEST = 10  #: deadlines that a server which is alive may take

_LOOK_EVERY = 0.25  #: seconds between looks at a connection on which nothing comes

_PROGRESS = 16_384  #: bytes on a connection that are more than heartbeats

_RECEIVED_AT = 128  #: offset of tcpi_bytes_received in Linux's struct tcp_info

_REJOIN_AFTER = 0.5  #: seconds until a refused connection is tried anew; libzmq itself gives those up

_HEARTBEAT_MS = 2_000

#: For servers that are stopped. Long, since nothing is heard while a frame of 1 MiB comes in over a slow, shared line.
_HEARTBEAT_TIMEOUT_MS = 30_000

_SILENT_HOST_MS = 10_000  #: for hosts that have vanished: nothing is acknowledged

_SLOW, _BUSY = "connected, so it is slow or stuck", "connected; it is alive but busy"

_REFUSED = "handshake refused: do both nodes have this run's service.key?"

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_GIVEN_UP = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


class Call:
    """A request in flight; ``reply`` is set once, by whichever thread receives it."""

    def __init__(self, request: Message, request_id: int):
        self.request, self.request_id = request, request_id
        self.reply: Message | None = None
        self.gone = False  #: the server was, when ``Channel.wait`` gave up


class Channel:
    """A DEALER socket. Threads take turns through ``lock``; normally one thread owns the channel."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None,
        gone_after: float | None = None,
    ):  # fmt: skip
        """``gone_after``: seconds without a connection until waiting is in vain; None: only the deadline counts."""
        self.lock = threading.Lock()
        self.owner = threading.current_thread()
        self.state = "no connection"  #: in words, for messages
        self.bytes_received = 0
        self._context, self._endpoint, self._keys, self._gone_after = context, endpoint, keys, gone_after
        self._calls: WeakValueDictionary[int, Call] = WeakValueDictionary()  # an abandoned call vanishes
        self._last_id = 0
        self._lost = False
        self._down_since: float | None = time.monotonic()
        self._refused = False
        self._look_at = -math.inf
        self._heard_at = -math.inf
        self._rejoin_at: float | None = None
        self._connect()

    def submit(self, request: Message) -> Call:
        """Send a request. Raises ``WireError`` when it cannot be sent as it is."""
        with self.lock:
            self._last_id += 1
            call = Call(request, self._last_id)
            frames = encode(request, request_id=self._last_id)
            self._calls[self._last_id] = call
            self._send(frames)
        return call

    def tell(self, message: Message) -> None:
        """Send what has no answer; it is lost when the line is."""
        with self.lock:
            if not self._socket.closed:
                self._send(encode(message))

    def wait(self, call: Call, until: float, check: Callable[[], None]) -> Message | None:
        """The reply to ``call``; None when ``time.monotonic()`` passes ``until`` first, or the server is gone.

        A server that is alive has its time again from then on. ``check`` is called at least every ``SLICE`` and may
        raise to give up.
        """
        deadline = until - time.monotonic()
        while call.reply is None:
            check()
            last = min(max(until, self._heard_at + deadline), until + (_LONGEST - 1) * deadline)
            left = last - time.monotonic()
            patience = max(0.0, min(left, SLICE))
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
        """Nobody waits for the reply any more: make a new connection, so that the server forgets it too.

        Else it would come and not be taken, and stay in the server's buffer. A socket that is only disconnected keeps
        its connection until somebody uses it again.
        """
        with self.lock:
            self._calls.pop(call.request_id, None)
            if not self._socket.closed:
                self._lost = True
                self._down_since = time.monotonic() if self._down_since is None else self._down_since
                self._disconnect()
                self._connect()

    def close(self) -> None:
        """Close the sockets; waiting threads let go of the lock within a slice. Closing twice is harmless."""
        with self.lock:
            if not self._socket.closed:
                self._disconnect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        _set_options(self._socket, self._endpoint)
        if self._keys is not None:
            self._keys.secure_client(self._socket)
        self._patience_ms, self._activity = -1, _TcpActivity()
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(self._endpoint)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _receive(self, patience: float) -> bool:
        """Take one message, waiting at most ``patience`` seconds; without one, see to the connection."""
        if self._socket.closed:
            return False
        milliseconds = math.ceil(patience * 1000)
        if milliseconds != self._patience_ms:
            self._socket.setsockopt(zmq.RCVTIMEO, milliseconds)
            self._patience_ms = milliseconds
        try:
            frames = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            self._watch()
            return False
        self.bytes_received += sum(map(len, frames))
        self._deliver(frames)
        return True

    def _deliver(self, frames: list[Any]) -> None:
        """Hand a reply to its call; late duplicates and foreign bytes have none."""
        try:
            reply = decode(frames)
        except WireError as error:
            self.state = f"connected, but its answer is no message: {error}"
            return
        if reply.kind == Kind.ALIVE:
            self.state, self._heard_at = _BUSY, time.monotonic()
            return
        call = self._calls.pop(reply.request_id, None)
        if call is not None:
            call.reply = reply

    def _watch(self) -> None:
        """Follow the connection; after a new one, send again what has no answer yet."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._note(event["event"], event["value"])
        now = time.monotonic()
        if self._rejoin_at is not None and now >= self._rejoin_at:
            self._rejoin()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._refused = self._gone_after is not None and self._down_since is not None and _refuses(self._endpoint)
            if self._down_since is None and self._activity.moves():
                self._heard_at = now

    def _note(self, event: int, value: int) -> None:
        """What the monitor says of the connection."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.state = _SLOW
            self._down_since, self._refused = None, False
            if self._lost:
                self._lost = False
                self._resend()
        elif event == zmq.EVENT_CONNECTED:
            self._activity = _TcpActivity(value)
            self._says("connected, but no graph server speaks there")
        elif event == zmq.EVENT_DISCONNECTED:
            self._lost = True
            self._down_since = time.monotonic() if self._down_since is None else self._down_since
            self._says("connection lost")
        else:
            self.state = _REFUSED
            if event in _GIVEN_UP:
                self._rejoin_at = time.monotonic() + _REJOIN_AFTER

    def _is_gone(self) -> bool:
        """Whether there has been no connection for so long that another holder had better be asked."""
        if self._gone_after is None or self._down_since is None:
            return False
        return time.monotonic() - self._down_since >= (self._gone_after / 2 if self._refused else self._gone_after)

    def _says(self, state: str) -> None:
        """A refusal stays the word until a handshake succeeds, whatever the next attempts come to."""
        self.state = self.state if self.state == _REFUSED else state

    def _rejoin(self) -> None:
        self._rejoin_at = None
        self._socket.disconnect(self._endpoint)
        self._socket.connect(self._endpoint)

    def _resend(self) -> None:
        for call in list(self._calls.values()):
            self._send(encode(call.request, request_id=call.request_id))

    def _send(self, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:  # refused just now, so there is no line to queue on; the next connection resends
            self._lost = True


class _TcpActivity:
    """A connection as the kernel sees it: whether bytes come in, though no message is complete yet."""

    def __init__(self, descriptor: int = -1):
        self._descriptor, self._received = descriptor, 0

    def moves(self) -> bool:
        """Whether more than heartbeats has come in since it last said so."""
        if self._descriptor < 0:
            return False
        try:  # the descriptor is libzmq's and may be closed by now
            line = plain.socket(fileno=self._descriptor)
        except OSError:
            return False
        try:
            info = line.getsockopt(plain.IPPROTO_TCP, plain.TCP_INFO, _RECEIVED_AT + 8)
            received = int.from_bytes(info[_RECEIVED_AT:], sys.byteorder)
        except OSError:
            return False
        finally:
            line.detach()
        if received - self._received < _PROGRESS:
            return False
        self._received = received
        return True


def _refuses(endpoint: str) -> bool:
    """Whether the host says that nobody listens there; one that says nothing may only be cut off for a while."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        plain.create_connection((host.strip("[]"), int(port)), timeout=SLICE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _set_options(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0  # callers bound what is in flight; nothing may be dropped
    socket.maxmsgsize = MAX_FRAME
    socket.ipv6 = "[" in endpoint
    socket.connect_timeout = 5_000
    socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1_000
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
    socket.tcp_maxrt = _SILENT_HOST_MS
    socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, 4, 2
