"""Decides in which order a graph server makes batches: fairly between clients, and within a limit of buffered bytes.

Uses start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with the bytes of replies as cost. Until a batch
is made, its cost is estimated from the client's recent batches. The buffer contains replies until clients acknowledge
them. A batch is made only if the buffer is empty, or if the client's bytes in the buffer, including this batch, are at
most the free bytes of the buffer (dynamic thresholds: Choudhury and Hahne, 1998). Each batch that is being made may
exceed the buffer by what its estimate lacks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer.service.fair_queue import FairQueue, Peer
from trainer.service.messages import ClientName

_RECENT_REPLIES = 8  #: number of a client's recent batches; the largest is the estimate for its next batch

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class ScheduledRequest(Generic[Work]):
    """A request that waits for a thread of the server or is being answered, and its connection."""

    peer: Peer  #: the connection
    request_id: int
    work: Work
    client: ClientName | None = None  #: None if the request is not for a batch
    size: int = 0  #: bytes of the request


@dataclass(frozen=True)
class _ClientStatus:
    name: str
    queue: int  #: number of waiting requests
    buffer_bytes: int  #: bytes of the buffer that this client uses or has reserved
    batches: int  #: number of batches made so far
    bytes: int  #: bytes of these batches
    seconds_since: float  #: seconds since its last message


@dataclass(frozen=True)
class SchedulerStatus:
    queue: int  #: number of waiting requests
    buffer_bytes: int  #: bytes of unacknowledged replies, and bytes reserved for replies being made
    buffer_limit: int
    batches: int  #: number of batches made so far
    clients: tuple[_ClientStatus, ...]


@dataclass(eq=False)
class _ClientQueue(Generic[Work]):
    """The requests and buffered replies of one client. Callers must hold the lock of the scheduler."""

    name: ClientName
    tag: float  #: cost of its batches so far; see the module docstring
    heard: float = 0.0  #: time of its last message
    blocked_since: float | None = None  #: time since which its next batch does not fit into the buffer
    queue: deque[ScheduledRequest[Work]] = field(default_factory=deque)
    queued_bytes: int = 0
    making: dict[ScheduledRequest[Work], int] = field(default_factory=dict)  #: bytes reserved for each batch being made
    #: bytes of each unacknowledged reply, by peer and request id
    sent: dict[tuple[Peer, int], int] = field(default_factory=dict)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT_REPLIES))  #: bytes of its last batches
    batches: int = 0
    nbytes: int = 0  #: bytes of all its batches
    _gone: set[ScheduledRequest[Work]] = field(default_factory=set)  #: those of ``making`` whose peer is gone

    @property
    def held(self) -> int:
        """Return how many bytes of the buffer this client uses or has reserved."""
        return sum(self.making.values()) + sum(self.sent.values())

    @property
    def idle(self) -> bool:
        return not (self.queue or self.making or self.sent)

    def has_work(self, peer: Peer) -> bool:
        """Return whether a connection has a pending request or an unacknowledged reply."""
        jobs = [*self.queue, *(job for job in self.making if job not in self._gone)]
        return any(job.peer == peer for job in jobs) or any(to == peer for to, _ in self.sent)

    def push(self, job: ScheduledRequest[Work]) -> None:
        self.queue.append(job)
        self.queued_bytes += job.size

    def start(self, cost: int) -> ScheduledRequest[Work]:
        """Remove and return the first request of the queue, and reserve ``cost`` bytes of the buffer for the reply."""
        job = self.queue.popleft()
        self.queued_bytes -= job.size
        self.making[job] = cost
        self.tag += cost
        self.blocked_since = None
        return job

    def finish(self, job: ScheduledRequest[Work], nbytes: int) -> bool:
        """Record that a batch of ``nbytes`` was made. Returns whether the requesting connection is still open."""
        self.tag += nbytes - self.making.pop(job)
        self.recent.append(nbytes)
        self.batches += 1
        self.nbytes += nbytes
        if job in self._gone:
            self._gone.remove(job)
            return False
        key = job.peer, job.request_id
        self.sent[key] = self.sent.get(key, 0) + nbytes
        return True

    def abandon(self, job: ScheduledRequest[Work]) -> None:
        del self.making[job]
        self._gone.discard(job)

    def acknowledge_sent(self, peer: Peer) -> None:
        """Treat all replies to a connection as acknowledged, unless a request of it is queued or being answered."""
        if not any(job.peer == peer for job in (*self.queue, *self.making)):
            self._forget_sent(peer)

    def drop(self, peer: Peer) -> None:
        kept = [job for job in self.queue if job.peer != peer]
        self.queue = deque(kept)
        self.queued_bytes = sum(job.size for job in kept)
        self.blocked_since = self.blocked_since if kept else None
        self._gone |= {job for job in self.making if job.peer == peer}
        self._forget_sent(peer)

    def status(self, now: float) -> _ClientStatus:
        return _ClientStatus(self.name.name, len(self.queue), self.held, self.batches, self.nbytes, now - self.heard)

    def _forget_sent(self, peer: Peer) -> None:
        for key in [key for key in self.sent if key[0] == peer]:
            del self.sent[key]


MAX_QUEUED = 64  #: waiting requests per client

_MAX_QUEUED_BYTES = 64 << 20  #: bytes of waiting requests per client

MAX_CLIENTS = 4096

PATIENCE = 2.0  #: seconds for which other clients wait while the next batch of one does not fit into the buffer

FORGET = 60.0  #: seconds after which a client without work is removed

_RECENT = 32  #: number of recent batches of all clients


class BatchScheduler(Generic[Work]):
    """Queue of requests for the batch threads of a graph server. Thread-safe.

    Requests for batches alternate with requests of other kinds, whose ``client`` is None. For the latter, connections
    are served in turn. ``clock``: returns the time in seconds.
    """

    def __init__(self, buffer_limit: int, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock = buffer_limit, clock
        self._changed = threading.Condition()
        self._clients: dict[int, _ClientQueue[Work]] = {}
        self._busy: dict[int, _ClientQueue[Work]] = {}  # the clients with work, by number
        self._largest: deque[int] = deque(maxlen=_RECENT)  # bytes of the last batches of all clients
        self._client_of: dict[Peer, int] = {}  # client of each connection with work
        self._others: FairQueue[ScheduledRequest[Work]] = FairQueue()
        self._running_others: set[ScheduledRequest[Work]] = set()
        self._others_next = False
        self._virtual = 0.0  # tag of the client served last
        self._batches = 0
        self._closed = False

    def submit(self, job: ScheduledRequest[Work]) -> str | None:
        """Queue a request. Returns None, or the reason why the request is rejected.

        A request for a batch acknowledges earlier batches on its connection, unless the connection has other pending
        requests.
        """
        with self._changed:
            refusal = None
            if job.client is not None:
                refusal = self._queue_batch(job)
            elif self._others.of(job.peer) >= MAX_QUEUED:
                refusal = f"{MAX_QUEUED} requests of this connection are already waiting"
            else:
                self._others.push(job.peer, job)
            self._changed.notify_all()
            return refusal

    def next(self, timeout: float) -> ScheduledRequest[Work] | None:
        """Return the next request, or None if none can start within ``timeout`` seconds or the scheduler is closed.

        The caller must report each request by ``done`` or ``failed``.
        """
        with self._changed:
            until = self._clock() + timeout
            while not self._closed:
                if job := self._choose():
                    return job
                now = self._clock()
                if now >= until:
                    return None
                # Wake up as well when the patience with a client ends.
                blocked = [one.blocked_since for one in self._busy.values() if one.blocked_since is not None]
                ends = [since + PATIENCE for since in blocked if since + PATIENCE > now]
                self._changed.wait(min([until, *ends]) - now)
            return None

    def done(self, job: ScheduledRequest[Work], nbytes: int) -> bool:
        """Record that a request was answered. ``nbytes``: size of the reply if it is a batch.

        Returns whether the reply should be sent: False if it is a batch whose connection was closed meanwhile.
        """
        with self._changed:
            if job.client is None:
                self._running_others.discard(job)
                return True
            client = self._clients[job.client.number]
            is_open = client.finish(job, nbytes)
            self._batches += 1
            self._largest.append(nbytes)
            self._update(client, job.peer)
            return is_open

    def failed(self, job: ScheduledRequest[Work]) -> None:
        """Record that a request failed, and release the buffer space that was reserved for its reply."""
        with self._changed:
            if job.client is None:
                self._running_others.discard(job)
            else:
                client = self._clients[job.client.number]
                client.abandon(job)
                self._update(client, job.peer)

    def acknowledge(self, peer: Peer, request_id: int) -> None:
        """Record that a client has acknowledged the reply to a request. Unknown request ids are ignored."""
        with self._changed:
            if client := self._client_at(peer):
                client.heard = self._clock()
                client.sent.pop((peer, request_id), None)
                self._update(client, peer)

    def connection_closed(self, peer: Peer) -> None:
        with self._changed:
            self._others.drop(peer)
            if client := self._client_at(peer):
                client.drop(peer)
                self._update(client, peer)

    def pause(self, peer: Peer) -> None:
        """Hold back the requests of a connection, except requests for batches, until ``resume`` is called."""
        with self._changed:
            self._others.pause(peer)

    def resume(self, peer: Peer) -> None:
        with self._changed:
            self._others.resume(peer)
            self._changed.notify_all()

    def peers(self) -> list[Peer]:
        """Return the connections that have pending requests or unacknowledged replies."""
        with self._changed:
            other = [*self._others.peers(), *(job.peer for job in self._running_others)]
            return list(dict.fromkeys([*self._client_of, *other]))

    def unacknowledged_peers(self) -> set[Peer]:
        with self._changed:
            return {peer for client in self._busy.values() for peer, _ in client.sent}

    def status(self) -> SchedulerStatus:
        """Return the state of queues, buffer and clients. Removes clients that had no work for ``FORGET`` seconds."""
        with self._changed:
            now = self._clock()
            for client in [one for one in self._clients.values() if one.idle and now - one.heard > FORGET]:
                del self._clients[client.name.number]
            clients = tuple(client.status(now) for client in self._clients.values())
            queue = len(self._others) + sum(client.queue for client in clients)
            return SchedulerStatus(queue, self._buffer_used(), self._limit, self._batches, clients)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _queue_batch(self, job: ScheduledRequest[Work]) -> str | None:
        assert job.client is not None
        number = job.client.number
        if self._client_of.get(job.peer, number) != number:
            return "this connection has pending requests as another client"
        if number not in self._clients:
            if len(self._clients) >= MAX_CLIENTS:
                idle = next((known for known, client in self._clients.items() if client.idle), None)
                if idle is None:
                    return f"{MAX_CLIENTS} clients already have pending requests"
                del self._clients[idle]
            self._clients[number] = _ClientQueue(job.client, self._virtual, self._clock())
        client = self._clients[number]
        client.heard = self._clock()
        if len(client.queue) >= MAX_QUEUED or client.queued_bytes + job.size > _MAX_QUEUED_BYTES:
            return f"{len(client.queue)} batches of this client ({client.name.name}) are already waiting"
        client.acknowledge_sent(job.peer)
        if not client.queue:
            client.tag = max(client.tag, self._virtual)
        client.push(job)
        self._busy[number] = client
        self._client_of[job.peer] = number
        return None

    def _choose(self) -> ScheduledRequest[Work] | None:
        """Start a batch or another request, in turn if both can start; None if none can."""
        for other in (self._others_next, not self._others_next):
            job = self._others.pop() if other else self._next_batch()
            if job is not None:
                self._others_next = not other
                if other:
                    self._running_others.add(job)
                return job
        return None

    def _next_batch(self) -> ScheduledRequest[Work] | None:
        used, now = self._buffer_used(), self._clock()
        for client in sorted((one for one in self._busy.values() if one.queue), key=lambda one: one.tag):
            cost = max(client.recent, default=0) or max(self._largest, default=0) or self._limit
            if used == 0 or cost + client.held <= self._limit - used:
                self._virtual = max(self._virtual, client.tag)
                return client.start(cost)
            if client.held:
                continue  # waits until the client acknowledges replies
            if client.blocked_since is None:
                client.blocked_since = now
            if now - client.blocked_since < PATIENCE:
                return None
        return None

    def _buffer_used(self) -> int:
        return sum(client.held for client in self._busy.values())

    def _client_at(self, peer: Peer) -> _ClientQueue[Work] | None:
        number = self._client_of.get(peer)
        return None if number is None else self._clients[number]

    def _update(self, client: _ClientQueue[Work], peer: Peer) -> None:
        if not client.has_work(peer):
            self._client_of.pop(peer, None)
        if client.idle:
            self._busy.pop(client.name.number, None)
        self._changed.notify_all()
