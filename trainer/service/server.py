"""The graph server: answers requests for the parts on its host, and makes whole batches for clients."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.core.errors import ServiceError, TrainerError, WireError
from trainer.core.files import write_whole
from trainer.sampler.subgraph_sampler import CountedAccess
from trainer.service.batch_scheduler import BatchScheduler, ScheduledRequest
from trainer.service.fair_queue import BlockingFairQueue, Peer
from trainer.service.handlers import Handlers, ServedGraph, Topology, is_long
from trainer.service.messages import BatchRequest, HelloInfo, ServerStats
from trainer.service.network_thread import NetworkThread, bound_listener
from trainer.service.service_keys import ServiceKeys
from trainer.service.stats import BusyTime, Counters, PeerStates, StatsReport
from trainer.service.stream import Received
from trainer.wire.frames import MAX_ARRAY, Kind, Message, Status, decode, encode

_MAX_REQUEST = 64 << 20  #: bytes of a request

_BUFFER_BYTES = 512 << 20  #: bytes of batches that clients have not acknowledged

_GLANCE = 1.0  #: seconds between checks whether the server stops

_STATS_EVERY = 2.0  #: seconds between two writes of the stats file

_DecodedRequest = tuple[Message, BatchRequest | None, Received]


class GraphServer:
    """Serves the parts on one host at one endpoint.

    ``threads``: number of threads for requests that need only the parts on this host; they never wait for other
    servers. ``batch_threads``: number of threads that make whole batches and answer requests that need other parts.

    ``max_request`` and ``max_answer``: largest size of the arrays of a request and of a reply, in bytes.
    ``topology``: function that returns the version of ``cluster.json`` and the list of all servers. ``stats_file`` is
    rewritten every two seconds.
    """

    def __init__(
        self, graph: ServedGraph, endpoint: str, info: HelloInfo, threads: int, keys: ServiceKeys | None = None, *,
        routed: CountedAccess | None = None, batch_threads: int = 2, buffer_bytes: int = _BUFFER_BYTES,
        max_request: int = _MAX_REQUEST, max_answer: int = MAX_ARRAY, topology: Topology | None = None,
        stats_file: Path | None = None, peers: PeerStates = lambda: (),
    ):  # fmt: skip
        self.endpoint = endpoint  #: contains the actual port once the server has started
        self._info, self._threads, self._batch_threads, self._keys = info, threads, batch_threads, keys
        self._max_request, self._max_answer, self._stats_file, self._peers = max_request, max_answer, stats_file, peers
        self._counters, self._busy = Counters(), BusyTime()
        self._short: BlockingFairQueue[tuple[Peer, Received]] = BlockingFairQueue()
        self._scheduler: BatchScheduler[_DecodedRequest] = BatchScheduler(buffer_bytes)
        topology = topology or (lambda: (info.version, info.servers))
        self._handlers = Handlers(graph, info, self.stats, topology, max_answer, routed)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Listen at the endpoint and start the threads. Raises ``ServiceError`` if listening fails."""
        listener, self.endpoint = bound_listener(self.endpoint)
        self._network = NetworkThread(
            listener, self._keys, self._short, self._scheduler, self._counters, self._max_request
        )  # fmt: skip
        work = [self._answer_short] * self._threads + [self._make_batches] * self._batch_threads
        work += [self._report_stats] * (self._stats_file is not None)
        self._workers = [threading.Thread(target=run, name=run.__name__.strip("_"), daemon=True) for run in work]
        for thread in (self._network, *self._workers):
            thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Stop the threads and free the port.

        Waits at most ``timeout`` seconds for requests that are being answered.
        """
        self._stopping.set()
        self._short.close()
        self._scheduler.close()
        self._network.stop()
        until = time.monotonic() + timeout
        for thread in (self._network, *self._workers):
            thread.join(max(0.0, until - time.monotonic()))

    def stats(self) -> ServerStats:
        return self._counters.read()

    @property
    def running(self) -> bool:
        return all(thread.is_alive() for thread in (self._network, *self._workers))

    def _answer_short(self) -> None:
        while (asked := self._short.get()) is not None:
            if answer := self._receive(*asked):
                self._network.reply(asked[0], answer)
            asked = None  # frees its memory

    def _receive(self, peer: Peer, received: Received) -> list[Any] | None:
        try:
            request = decode(received.frames, self._max_request, self._max_request)
            if request.status != Status.REQUEST or request.kind in (Kind.ALIVE, Kind.ACK):
                raise WireError("the message is not a request")
        except WireError:
            self._network.end(peer)
            return None
        if not is_long(request):
            return self._answer(peer, request, self._handlers.short)
        try:
            batch = BatchRequest.read(request) if request.kind == Kind.BATCH else None
        except WireError as error:
            return self._error(request, error)
        client = None if batch is None else batch.client
        refusal = self._scheduler.submit(
            ScheduledRequest(peer, request.request_id, (request, batch, received), client, request.size)
        )
        return None if refusal is None else self._error(request, ServiceError(f"request rejected: {refusal}"))

    def _make_batches(self) -> None:
        while not self._stopping.is_set():
            if (job := self._scheduler.next(_GLANCE)) is None:
                continue
            with self._busy.working():
                answer = self._do(job)
            if answer is not None:
                self._network.reply(job.peer, answer)

    def _do(self, job: ScheduledRequest[_DecodedRequest]) -> list[Any] | None:
        request, batch, _ = job.work
        if batch is None:
            answer = self._answer(job.peer, request, self._handlers.routed_answer)
            self._scheduler.done(job, 0)
            return answer
        start = time.perf_counter()
        try:
            is_open = functools.partial(self._network.is_open, job.peer)
            answer = encode(self._handlers.batch(request, batch, is_open), self._max_answer)
        except Exception as error:  # sent to the client; the server continues
            self._scheduler.failed(job)
            return self._error(request, error)
        self._counters.answered(request.kind, time.perf_counter() - start)
        return answer if self._scheduler.done(job, sum(map(len, answer))) else None

    def _answer(
        self, peer: Peer, request: Message, handler: Callable[[Message, Callable[[], bool]], Message]
    ) -> list[Any]:
        start = time.perf_counter()
        try:
            answer = encode(handler(request, functools.partial(self._network.is_open, peer)), self._max_answer)
        except Exception as error:  # sent to the client, too
            return self._error(request, error)
        self._counters.answered(request.kind, time.perf_counter() - start)
        return answer

    def _error(self, request: Message, error: Exception) -> list[Any]:
        self._counters.add("errors")
        self._counters.answered(request.kind, 0.0)
        if isinstance(error, TrainerError):
            return encode(request.error(str(error), error.wait))
        traceback.print_exception(error, file=sys.stderr)  # an unexpected error: to the log
        return encode(request.error(f"{type(error).__name__}: {error}", None))

    def _report_stats(self) -> None:
        path = self._stats_file
        assert path is not None
        report = StatsReport(
            self._info, self.endpoint, self._batch_threads, self._counters, self._busy, self._scheduler.status,
            self._peers,
        )  # fmt: skip
        while True:
            try:
                write_whole(path, json.dumps(report.make()))
            except OSError as error:
                print(f"stats file {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            if self._stopping.wait(_STATS_EVERY):
                return
