"""One connection to a graph server: requests in flight, answers by request id, resending after a lost line."""

from __future__ import annotations

import math
import socket as plain
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import zmq
from zmq.utils.monitor import recv_monitor_message

from trainer.errors import WireError
from trainer.service.keys import CurveKeys
from trainer.service.wire import MAX_FRAME, Message, decode, encode

SLICE = 0.1  #: seconds; the longest a waiting thread stays away from close() and from news of the connection
GONE_AFTER = 10.0  #: seconds a lost server may take to come back, once its host refuses connections
_PROBE_EVERY = 1.0  #: seconds
_REJOIN_AFTER = 0.5  #: seconds until a refused connection is tried anew; libzmq itself gives those up
_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 10_000
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


class Channel:
    """A DEALER socket. Threads take turns through ``lock``; normally one thread owns the channel."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None):
        self.lock = threading.Lock()
        self.owner = threading.current_thread()
        self.state = "no connection"  #: in words, for messages
        self.bytes_received = 0
        self._endpoint = endpoint
        self._calls: WeakValueDictionary[int, Call] = WeakValueDictionary()  # an abandoned call vanishes
        self._last_id = 0
        self._patience_ms = -1
        self._met = False
        self._lost = False
        self._gone = False
        self._probe_at = math.inf
        self._rejoin_at: float | None = None
        self._socket = context.socket(zmq.DEALER)
        _set_options(self._socket, endpoint)
        if keys is not None:
            keys.secure_client(self._socket)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(endpoint)

    def submit(self, request: Message) -> Call:
        """Send a request. Raises ``WireError`` when it cannot be sent as it is."""
        with self.lock:
            self._last_id += 1
            call = Call(request, self._last_id)
            frames = encode(request, request_id=self._last_id)
            self._calls[self._last_id] = call
            self._send(frames)
        return call

    def wait(self, call: Call, until: float, check: Callable[[], None]) -> Message | None:
        """The reply to ``call``; None when ``time.monotonic()`` passes ``until`` first, or the server is gone.

        ``check`` is called at least every ``SLICE`` and may raise to give up.
        """
        while call.reply is None:
            check()
            left = until - time.monotonic()
            patience = max(0.0, min(left, SLICE))
            if self.lock.acquire(timeout=patience):
                try:
                    received = call.reply is not None or self._receive(patience)
                finally:
                    self.lock.release()
                if not received and (left <= 0 or self._gone):
                    return None
            elif left <= 0:
                return None
        return call.reply

    def close(self) -> None:
        """Close the sockets; waiting threads let go of the lock within a slice. Closing twice is harmless."""
        with self.lock:
            if self._socket.closed:
                return
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
        call = self._calls.pop(reply.request_id, None)
        if call is not None:
            call.reply = reply

    def _watch(self) -> None:
        """Follow the connection; after a new one, send again what has no answer yet."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = "connected, so it is slow or stuck"
                self._met, self._gone, self._probe_at = True, False, math.inf
                if self._lost:
                    self._lost = False
                    self._resend()
            elif event == zmq.EVENT_CONNECTED:
                self._says("connected, but no graph server speaks there")
            elif event == zmq.EVENT_DISCONNECTED:
                self._lost = True
                if self._met:  # one that has yet to start is waited for until the deadline
                    self._probe_at = min(self._probe_at, time.monotonic() + GONE_AFTER)
                self._says("connection lost")
            else:
                self.state = _REFUSED
                if event in _GIVEN_UP:
                    self._rejoin_at = time.monotonic() + _REJOIN_AFTER
        if self._rejoin_at is not None and time.monotonic() >= self._rejoin_at:
            self._rejoin()
        if time.monotonic() >= self._probe_at:
            self._probe_at = time.monotonic() + _PROBE_EVERY
            self._gone = _refuses(self._endpoint)

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
