"""The graph server: answers for the parts one host owns."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from trainer.errors import ServiceError, TrainerError, WireError
from trainer.sample.edge_slice import edge_slice
from trainer.sample.types import GraphAccess
from trainer.service import hops, protocol
from trainer.service.keys import CurveKeys, start_authenticator
from trainer.service.protocol import HelloInfo, ServerStats
from trainer.service.wire import MAX_FRAME, MAX_HEAD, Kind, Message, Status, decode, encode
from trainer.store.part import PartStore

_BACKLOG = 32  #: requests waiting per thread; beyond that the network queues hold them
_FULL_GLANCE_MS = 1  #: until the next look at a full queue; dropped requests leave no reply that would wake the mover
_REPLIES = "inproc://replies"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class _Counters:
    """The numbers behind ``ServerStats``; several threads add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("requests", "errors", "malformed", "refused", "bytes_in", "bytes_out"), 0)
        self._seconds = {kind.name.lower(): 0.0 for kind in Kind}

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def answered(self, kind: Kind, seconds: float) -> None:
        with self._lock:
            self._counts["requests"] += 1
            self._seconds[kind.name.lower()] += seconds

    def read(self) -> ServerStats:
        with self._lock:
            return ServerStats(**self._counts, seconds=dict(self._seconds))


class ServedGraph(GraphAccess, Protocol):
    """What a server answers from."""

    @property
    def store(self) -> PartStore: ...


class GraphServer:
    """Serves the parts of one host on one endpoint.

    One thread moves messages between the network and a queue; ``threads`` threads take requests from
    the queue, so a slow one holds up nobody while another thread is free. A handler's error goes back
    to the asker; bytes that are no request are dropped and counted.
    """

    def __init__(
        self,
        graph: ServedGraph,
        endpoint: str,
        info: HelloInfo,
        threads: int,
        keys: CurveKeys | None = None,
        max_frame: int = MAX_FRAME,
    ):
        self.endpoint = endpoint  #: with the real port once started
        self._graph, self._info, self._threads, self._keys, self._max_frame = graph, info, threads, keys, max_frame
        self._counters = _Counters()
        self._queue: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._handlers: dict[Kind, Callable[[Message], Message]] = {
            Kind.HELLO: lambda request: request.reply(text=protocol.info_text(self._info)),
            Kind.STATS: lambda request: request.reply(text=protocol.info_text(self.stats())),
            Kind.SAMPLE: self._sample,
            Kind.GATHER: self._gather,
            Kind.HAS_EDGES: self._has_edges,
            Kind.EDGES: self._edges,
        }

    def start(self) -> None:
        """Bind and answer from now on, in threads. Raises ``ServiceError`` when the endpoint cannot be bound."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=min(4, self._threads))
        self._authenticator = None if self._keys is None else start_authenticator(self._context, self._keys)
        front, monitor = self._bind()
        replies = self._socket(zmq.PULL)
        replies.bind(_REPLIES)
        self._mover = threading.Thread(target=self._move, args=(front, replies, monitor), name="mover", daemon=True)
        self._mover.start()
        for _ in range(self._threads):
            out = self._socket(zmq.PUSH)
            out.connect(_REPLIES)
            threading.Thread(target=self._work, args=(out,), name="graph", daemon=True).start()

    def stop(self, timeout: float = 2.0) -> None:
        """Stop answering and free the port; waits at most ``timeout`` seconds for running handlers."""
        if self._authenticator is not None:
            self._authenticator.stop()
        for _ in range(self._threads):
            self._queue.put([])
        ending = threading.Thread(target=self._context.term, daemon=True)
        ending.start()
        ending.join(timeout)

    def stats(self) -> ServerStats:
        """Counters since the start."""
        return self._counters.read()

    @property
    def running(self) -> bool:
        """False once the thread that moves messages has ended."""
        return self._mover.is_alive()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket between threads of this server; nothing may be dropped on it."""
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        return socket

    def _bind(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The bound ROUTER socket and its monitor of refused connections."""
        front = self._context.socket(zmq.ROUTER)
        _set_options(front, self.endpoint, self._max_frame)
        if self._keys is not None:
            self._keys.secure_server(front)
        monitor = front.get_monitor_socket(_REFUSALS)
        try:
            front.bind(self.endpoint)
        except zmq.ZMQError as error:
            front.disable_monitor()
            monitor.close(linger=0)
            front.close(linger=0)
            self.stop()
            raise ServiceError(_bind_failed(self.endpoint, error)) from None
        self.endpoint = front.getsockopt_string(zmq.LAST_ENDPOINT)
        return front, monitor

    def _move(self, front: zmq.Socket[bytes], replies: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        """Between the network and the queue until the context ends; the only user of these sockets."""
        poller = zmq.Poller()
        poller.register(replies, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated), contextlib.ExitStack() as closing:  # stop() ends the context
            for socket in (front, replies, monitor):
                closing.callback(socket.close, linger=0)
            while True:
                full = self._queue.qsize() >= _BACKLOG * self._threads
                poller.register(front, 0 if full else zmq.POLLIN)
                ready = dict(poller.poll(_FULL_GLANCE_MS if full else None))
                if replies in ready:
                    frames = replies.recv_multipart(copy=False)
                    self._counters.add("bytes_out", _size(frames))
                    front.send_multipart(frames, copy=False)
                if front in ready:
                    frames = front.recv_multipart(copy=False)
                    self._counters.add("bytes_in", _size(frames))
                    self._queue.put(frames)
                if monitor in ready:
                    monitor.recv_multipart()
                    self._counters.add("refused")

    def _work(self, out: zmq.Socket[bytes]) -> None:
        """Answer requests until ``stop()`` puts an empty one into the queue."""
        with contextlib.suppress(zmq.ContextTerminated), out:  # stop() came while a handler ran
            while frames := self._queue.get():
                peer, *body = frames
                if answer := self._answer(body):
                    out.send_multipart([peer, *answer], copy=False)

    def _answer(self, frames: list[Any]) -> list[Any] | None:
        """Frames of the reply; None for bytes that are no request."""
        try:
            request = decode(frames, self._max_frame)
            if request.status != Status.REQUEST:
                raise WireError("a reply was sent to a server")
        except WireError:
            self._counters.add("malformed")
            return None
        start = time.perf_counter()
        try:
            answer = encode(self._handlers[request.kind](request), self._max_frame)
        except Exception as error:  # whatever a handler raises belongs to the asker, not to this server
            self._counters.add("errors")
            answer = encode(request.error(_cause(error)))
        self._counters.answered(request.kind, time.perf_counter() - start)
        return answer

    def _sample(self, request: Message) -> Message:
        samples = self._graph.sample_hops(hops.read_sample_request(request))
        return request.reply(hops.sample_arrays(samples))

    def _gather(self, request: Message) -> Message:
        asked = protocol.read_gather_request(request)
        return request.reply(protocol.row_arrays(asked, self._graph.gather(asked)))

    def _has_edges(self, request: Message) -> Message:
        return request.reply([self._graph.has_edges(*protocol.read_has_edges_request(request))])

    def _edges(self, request: Message) -> Message:
        edges = edge_slice(self._graph.store, *protocol.read_edges_request(request))
        return request.reply(protocol.edge_arrays(edges))


def _size(frames: list[Any]) -> int:
    """Bytes of a message without the peer's identity."""
    return sum(map(len, frames[1:]))


def _cause(error: Exception) -> str:
    """The text for the asker; an unexpected error also leaves its traceback in the server's log."""
    if isinstance(error, TrainerError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"


def _bind_failed(endpoint: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return f"graph server: {endpoint} is in use by another process; end it or choose another port"
    return f"graph server: cannot listen at {endpoint}: {error.strerror}; is it an address of this host?"


def _set_options(front: zmq.Socket[bytes], endpoint: str, max_frame: int) -> None:
    front.sndhwm = 0  # a ROUTER drops what is over this mark; clients bound what is in flight
    front.linger = 0
    front.backlog = 1024
    front.ipv6 = "[" in endpoint
    front.maxmsgsize = max(max_frame, MAX_HEAD)
    front.heartbeat_ivl, front.heartbeat_timeout = 2_000, 10_000
