"""The thread of a graph server that moves messages between the network and its queues."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

import zmq

from trainer.core.errors import ServiceError, WireError
from trainer.service.batch_scheduler import BatchScheduler
from trainer.service.curve_keys import CurveKeys
from trainer.service.fair_queue import BlockingFairQueue
from trainer.service.stats import Counters
from trainer.service.wire import messages
from trainer.service.wire.frames import MAX_FRAME, Kind, Status, decode, encode, head_of, kind_of

REPLIES = "inproc://replies"

_ALIVE_EVERY = 1.0  #: seconds

_FULL_GLANCE_MS = 1  #: until the next look at a full queue; dropped requests leave no reply to wake for

_AT_ONCE = 16  #: messages taken from one socket before the others have their turn

_SENT_AHEAD = 4  #: answers of one connection that wait in memory for the line; then its questions wait, too

_HELD_GLANCE_MS = 5  #: until the next look at a line that was full

_HELD_QUESTIONS = 256  #: of a connection that takes no answers; more are dropped

_RECEIVED_AHEAD = 64  #: messages of one connection that wait in memory; beyond that the network holds them

_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

ShortQueue = BlockingFairQueue[tuple[bytes, list[Any]]]


class NetworkThread(threading.Thread):
    """Runs until the context ends; the only user of its sockets.

    What can be answered or refused without the network's sight goes to ``short``; a reply whose connection has ended
    is dropped. A connection that takes no answers is paused in both queues. Connections with scheduled work hear each
    second that the server lives.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], front: zmq.Socket[bytes], short: ShortQueue,
        scheduler: BatchScheduler[Any], counters: Counters, backlog: int, max_request: int,
    ):  # fmt: skip
        super().__init__(name="network", daemon=True)
        self._front, self._monitor = front, front.get_monitor_socket(_REFUSALS)
        self._replies = context.socket(zmq.PULL)
        self._replies.rcvhwm = self._replies.linger = 0
        self._replies.bind(REPLIES)
        self._short, self._scheduler, self._counters = short, scheduler, counters
        self._backlog, self._max_request = backlog, max_request
        self._alive = encode(messages.alive())
        self._alive_at = 0.0
        self._held: dict[bytes, deque[list[Any]]] = {}  # answers that did not fit on the line

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replies, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated), contextlib.ExitStack() as closing:  # stop() ends the context
            for socket in (self._front, self._replies, self._monitor):
                closing.callback(socket.close, linger=0)
            while True:
                full = len(self._short) >= self._backlog
                poller.register(self._front, 0 if full else zmq.POLLIN)
                ready = dict(poller.poll(self._patience_ms(full)))
                self._send_held()
                if self._replies in ready:
                    self._drain(self._replies, self._reply)
                if self._front in ready:
                    self._drain(self._front, self._arrive)
                if self._monitor in ready:
                    self._drain(self._monitor, lambda _: self._counters.add("refused"))
                self._send_alive()

    def _patience_ms(self, full: bool) -> int:
        if full:
            return _FULL_GLANCE_MS
        return _HELD_GLANCE_MS if self._held else int(1000 * _ALIVE_EVERY)

    @staticmethod
    def _drain(socket: zmq.Socket[bytes], take: Any) -> None:
        for _ in range(_AT_ONCE):
            try:
                take(socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return

    def _reply(self, frames: list[Any]) -> None:
        self._counters.add("bytes_out", sum(map(len, frames[1:])))
        peer = bytes(frames[0])
        if peer in self._held:
            self._held[peer].append(frames)
        elif not self._send(frames):
            self._held[peer] = deque([frames])
            self._short.pause(peer)
            self._scheduler.pause(peer)

    def _send_held(self) -> None:
        for peer, answers in list(self._held.items()):
            while answers and self._send(answers[0]):
                answers.popleft()
            if not answers:
                del self._held[peer]
                self._short.resume(peer)
                self._scheduler.resume(peer)

    def _send(self, frames: list[Any]) -> bool:
        """Whether there was room on the line, or nobody there any more."""
        try:
            self._front.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:  # EHOSTUNREACH: the connection has ended
            self._scheduler.gone(bytes(frames[0]))
            self._short.drop(bytes(frames[0]))
        return True

    def _arrive(self, frames: list[Any]) -> None:
        peer, *body = frames
        size = sum(map(len, body))
        self._counters.add("bytes_in", size)
        kind = kind_of(body)
        if kind is None:
            self._counters.add("malformed")
        elif size > self._max_request:
            self._refuse(peer, body, size)
        elif kind == Kind.TAKEN:
            self._taken(bytes(peer), body)
        elif bytes(peer) in self._held and self._short.of(bytes(peer)) >= _HELD_QUESTIONS:
            self._counters.add("malformed")
        else:
            self._short.put(bytes(peer), (bytes(peer), body))

    def _refuse(self, peer: Any, body: list[Any], size: int) -> None:
        """Tell an asker of too much, who would wait for an answer else; what was sent is not looked into."""
        self._counters.add("malformed")
        cause = f"the request takes {size} bytes, over {self._max_request}; ask for fewer nodes or pairs at once"
        self._send([peer, *encode(head_of(body).error(cause))])

    def _taken(self, peer: bytes, body: list[Any]) -> None:
        try:
            message = decode(body, 0, 0)
            if message.status != Status.REQUEST:
                raise WireError("a reply")
        except WireError:
            self._counters.add("malformed")
            return
        self._scheduler.taken(peer, message.request_id)

    def _send_alive(self) -> None:
        now = time.monotonic()
        if now < self._alive_at:
            return
        self._alive_at = now + _ALIVE_EVERY
        for peer in self._scheduler.peers():
            self._send([peer, *self._alive])


def bound_front(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: CurveKeys | None
) -> tuple[zmq.Socket[bytes], str]:
    """The ROUTER socket at ``endpoint``, and the endpoint with its real port. Raises ``ServiceError``."""
    front = context.socket(zmq.ROUTER)
    front.router_mandatory = True
    front.sndhwm = _SENT_AHEAD
    front.rcvhwm = _RECEIVED_AHEAD
    front.linger = 0
    front.backlog = 1024
    front.ipv6 = "[" in endpoint
    front.maxmsgsize = MAX_FRAME
    front.heartbeat_ivl, front.heartbeat_timeout = 2_000, 10_000
    if keys is not None:
        keys.secure_server(front)
    try:
        front.bind(endpoint)
    except zmq.ZMQError as error:
        front.close(linger=0)
        raise ServiceError(_bind_failed(endpoint, error)) from None
    return front, front.getsockopt_string(zmq.LAST_ENDPOINT)


def _bind_failed(endpoint: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"graph server: {endpoint} is in use by another process; end it or choose another port"
    return f"graph server: cannot listen at {endpoint}: {error.strerror}; is it an address of this host?"
