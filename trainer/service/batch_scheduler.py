"""Chooses whose batch a graph server makes next: fair between clients, within a bound of bytes.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with the bytes of replies as cost: each client has a
tag, what was made for it so far, and the waiting client with the smallest tag is next. One that was away begins at the
tag served last. A batch's bytes are known only once it is made; until then the largest of the client's recent ones
stand for them, in its tag as in the buffer.

The buffer holds replies until they are taken. A client that holds some may have as much as is left free, no more
(dynamic thresholds: Choudhury and Hahne, 1998), so those that never take theirs leave room for others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer.service.fair_queue import FairQueue, Peer
from trainer.service.wire.messages import ClientName

_RECENT_REPLIES = 8  #: replies of which the largest stands for the next one

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class ScheduledRequest(Generic[Work]):
    """One request of one connection."""

    peer: Peer  #: the connection
    request_id: int
    work: Work
    client: ClientName | None = None  #: None for what is no batch
    size: int = 0  #: bytes of the request


@dataclass(frozen=True)
class ClientStatus:
    """One client at one moment."""

    name: str
    queue: int
    buffer_bytes: int
    batches: int
    bytes: int
    seconds_since: float  #: since it was last heard


@dataclass(frozen=True)
class SchedulerStatus:
    """The scheduler at one moment."""

    queue: int  #: requests waiting
    buffer_bytes: int  #: of replies sent and not taken yet, and reserved for those being made
    buffer_limit: int
    batches: int  #: made so far
    clients: tuple[ClientStatus, ...]


@dataclass(eq=False)
class ClientQueue(Generic[Work]):
    """One client; the scheduler's lock guards it."""

    name: ClientName
    tag: float  #: see the docstring of this file
    heard: float = 0.0
    blocked_since: float | None = None  #: its next batch fits since then not beside the others'
    queue: deque[ScheduledRequest[Work]] = field(default_factory=deque)
    queued_bytes: int = 0
    making: dict[ScheduledRequest[Work], int] = field(default_factory=dict)  #: bytes reserved
    sent: dict[tuple[Peer, int], int] = field(default_factory=dict)  #: bytes not taken yet, by peer and request id
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT_REPLIES))  #: bytes of its last batches
    batches: int = 0
    nbytes: int = 0
    _gone: set[ScheduledRequest[Work]] = field(default_factory=set)  #: being made for connections that have ended

    @property
    def held(self) -> int:
        """Bytes of the buffer."""
        return sum(self.making.values()) + sum(self.sent.values())

    @property
    def idle(self) -> bool:
        return not (self.queue or self.making or self.sent)

    def has_work(self, peer: Peer) -> bool:
        """Whether anything of a connection waits, is being made or has not been taken."""
        jobs = [*self.queue, *(job for job in self.making if job not in self._gone)]
        return any(job.peer == peer for job in jobs) or any(to == peer for to, _ in self.sent)

    def push(self, job: ScheduledRequest[Work]) -> None:
        self.queue.append(job)
        self.queued_bytes += job.size

    def start(self, cost: int) -> ScheduledRequest[Work]:
        """The first of the queue, from now on being made."""
        job = self.queue.popleft()
        self.queued_bytes -= job.size
        self.making[job] = cost
        self.tag += cost
        self.blocked_since = None
        return job

    def finish(self, job: ScheduledRequest[Work], nbytes: int) -> bool:
        """A batch is made; whether its connection is still there."""
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
        """No batch came of it."""
        del self.making[job]
        self._gone.discard(job)

    def acknowledge_sent(self, peer: Peer) -> None:
        """A connection asks again, so it has what was sent there, if that was all."""
        if not any(job.peer == peer for job in (*self.queue, *self.making)):
            self._forget_sent(peer)

    def drop(self, peer: Peer) -> None:
        """A connection has ended."""
        kept = [job for job in self.queue if job.peer != peer]
        self.queue = deque(kept)
        self.queued_bytes = sum(job.size for job in kept)
        self.blocked_since = self.blocked_since if kept else None
        self._gone |= {job for job in self.making if job.peer == peer}
        self._forget_sent(peer)

    def status(self, now: float) -> ClientStatus:
        return ClientStatus(self.name.name, len(self.queue), self.held, self.batches, self.nbytes, now - self.heard)

    def _forget_sent(self, peer: Peer) -> None:
        for key in [key for key in self.sent if key[0] == peer]:
            del self.sent[key]


MAX_QUEUED = 64  #: requests waiting per client

MAX_QUEUED_BYTES = 64 << 20  #: of requests waiting per client

MAX_CLIENTS = 4096

PATIENCE = 2.0  #: seconds for which all others wait for a client whose batch does not fit beside theirs

FORGET = 60.0  #: seconds until a client without work is forgotten

_RECENT = 32


class BatchScheduler(Generic[Work]):
    """Hands out work to threads. Safe to use from several threads; ``clock`` is ``time.monotonic``'s kind.

    Other requests than batches (``ScheduledRequest.client`` is None) take turns with the batches, by connection.
    """

    def __init__(self, buffer_limit: int, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock = buffer_limit, clock
        self._changed = threading.Condition()
        self._clients: dict[int, ClientQueue[Work]] = {}
        self._busy: dict[int, ClientQueue[Work]] = {}  # those with work
        self._largest: deque[int] = deque(maxlen=_RECENT)  # of all clients' last batches
        self._client_of: dict[Peer, int] = {}  # connections with work, and whose they are
        self._others: FairQueue[ScheduledRequest[Work]] = FairQueue()
        self._running_others: set[ScheduledRequest[Work]] = set()
        self._others_next = False
        self._virtual = 0.0  # the tag served last
        self._batches = 0
        self._closed = False

    def submit(self, job: ScheduledRequest[Work]) -> str | None:
        """Take in a request; the reason when it is refused.

        What was sent to the same connection before counts as taken, unless more of its work is under way.
        """
        with self._changed:
            refusal = self._queue_other(job) if job.client is None else self._queue_batch(job)
            self._changed.notify_all()
            return refusal

    def next(self, timeout: float) -> ScheduledRequest[Work] | None:
        """The next job, waited for at most ``timeout`` seconds; None without one, and once closed.

        Every job must come back by ``done`` or ``failed``.
        """
        with self._changed:
            until = self._clock() + timeout
            while not self._closed:
                if job := self._choose():
                    return job
                left = until - self._clock()
                if left <= 0:
                    return None
                self._changed.wait(min(left, self._until_patience_ends()))
            return None

    def done(self, job: ScheduledRequest[Work], nbytes: int) -> bool:
        """A batch is made, or another answer: a batch takes ``nbytes``. Whether the connection is there to have it."""
        with self._changed:
            if job.client is None:
                self._running_others.discard(job)
                return True
            client = self._clients[job.client.number]
            there = client.finish(job, nbytes)
            self._batches += 1
            self._largest.append(nbytes)
            self._settle(client, job.peer)
            return there

    def failed(self, job: ScheduledRequest[Work]) -> None:
        """There is no batch, only an error to send, which holds nothing. It still costs as if there were."""
        with self._changed:
            if job.client is None:
                self._running_others.discard(job)
            else:
                client = self._clients[job.client.number]
                client.abandon(job)
                self._settle(client, job.peer)

    def taken(self, peer: Peer, request_id: int) -> None:
        """The reply to a request has arrived; other ids than those sent there say nothing."""
        with self._changed:
            if client := self._client_at(peer):
                client.heard = self._clock()
                client.sent.pop((peer, request_id), None)
                self._settle(client, peer)

    def gone(self, peer: Peer) -> None:
        """A connection has ended: what it asked for is dropped, what was sent to it is free."""
        with self._changed:
            self._others.drop(peer)
            if client := self._client_at(peer):
                client.drop(peer)
                self._settle(client, peer)

    def pause(self, peer: Peer) -> None:
        """Start nothing but batches for this connection, until it is let go: it takes no answers."""
        with self._changed:
            self._others.pause(peer)

    def resume(self, peer: Peer) -> None:
        with self._changed:
            self._others.resume(peer)
            self._changed.notify_all()

    def peers(self) -> list[Peer]:
        """Connections that wait for work, or have not taken it yet."""
        with self._changed:
            other = [*self._others.peers(), *(job.peer for job in self._running_others)]
            return list(dict.fromkeys([*self._client_of, *other]))

    def holders(self) -> set[Peer]:
        """Connections to which batches were sent that they have not taken yet."""
        with self._changed:
            return {peer for client in self._busy.values() for peer, _ in client.sent}

    def status(self) -> SchedulerStatus:
        """Queues, buffer and clients; forgets those long without work."""
        with self._changed:
            now = self._clock()
            for client in [one for one in self._clients.values() if one.idle and now - one.heard > FORGET]:
                del self._clients[client.name.number]
            clients = tuple(client.status(now) for client in self._clients.values())
            queue = len(self._others) + sum(client.queue for client in clients)
            return SchedulerStatus(queue, self._held(), self._limit, self._batches, clients)

    def close(self) -> None:
        """Wake all who wait; nothing is handed out any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _queue_other(self, job: ScheduledRequest[Work]) -> str | None:
        if self._others.of(job.peer) >= MAX_QUEUED:
            return f"{MAX_QUEUED} requests of this connection wait already"
        self._others.push(job.peer, job)
        return None

    def _queue_batch(self, job: ScheduledRequest[Work]) -> str | None:
        client, refusal = self._client_for(job)
        if client is None:
            return refusal
        client.heard = self._clock()
        if len(client.queue) >= MAX_QUEUED or client.queued_bytes + job.size > MAX_QUEUED_BYTES:
            return f"{len(client.queue)} batches of this client ({client.name.name}) wait already"
        client.acknowledge_sent(job.peer)
        if not client.queue:
            client.tag = max(client.tag, self._virtual)
        client.push(job)
        self._busy[client.name.number] = client
        self._client_of[job.peer] = client.name.number
        return None

    def _client_for(self, job: ScheduledRequest[Work]) -> tuple[ClientQueue[Work] | None, str]:
        """Whom a job is for, or why it is refused."""
        assert job.client is not None
        number = job.client.number
        if self._client_of.get(job.peer, number) != number:
            return None, "this connection has work under way as another client"
        if number not in self._clients:
            if len(self._clients) >= MAX_CLIENTS and not self._forget_one():
                return None, f"{MAX_CLIENTS} clients have work under way already"
            self._clients[number] = ClientQueue(job.client, self._virtual, self._clock())
        return self._clients[number], ""

    def _forget_one(self) -> bool:
        """Make room by the first one without work; whether there is any."""
        idle = next((number for number, client in self._clients.items() if client.idle), None)
        if idle is not None:
            del self._clients[idle]
        return idle is not None

    def _choose(self) -> ScheduledRequest[Work] | None:
        """The next job that may start now; batches and others in turn."""
        for other in (self._others_next, not self._others_next):
            job = self._next_other() if other else self._next_batch()
            if job is not None:
                self._others_next = not other
                return job
        return None

    def _next_other(self) -> ScheduledRequest[Work] | None:
        if job := self._others.pop():
            self._running_others.add(job)
        return job

    def _next_batch(self) -> ScheduledRequest[Work] | None:
        held, now = self._held(), self._clock()
        for client in self._waiting():
            cost = self._cost(client)
            if held == 0 or cost + client.held <= self._limit - held:
                return self._start(client, cost)
            if client.held:
                continue  # its own replies are in the way
            if client.blocked_since is None:
                client.blocked_since = now
            if now - client.blocked_since < PATIENCE:
                return None
        return None

    def _start(self, client: ClientQueue[Work], cost: int) -> ScheduledRequest[Work]:
        self._virtual = max(self._virtual, client.tag)
        return client.start(cost)

    def _waiting(self) -> Iterator[ClientQueue[Work]]:
        return iter(sorted((one for one in self._busy.values() if one.queue), key=lambda one: one.tag))

    def _cost(self, client: ClientQueue[Work]) -> int:
        """What its next batch will probably take: as its own recent ones, else as anyone's, else all there is."""
        if client.recent:
            return max(client.recent)
        return max(self._largest, default=0) or self._limit

    def _held(self) -> int:
        return sum(client.held for client in self._busy.values())

    def _until_patience_ends(self) -> float:
        """Seconds until a blocked client ceases to hold up the others."""
        now = self._clock()
        ends = [one.blocked_since + PATIENCE - now for one in self._busy.values() if one.blocked_since is not None]
        return min((left for left in ends if left > 0), default=threading.TIMEOUT_MAX)

    def _client_at(self, peer: Peer) -> ClientQueue[Work] | None:
        number = self._client_of.get(peer)
        return None if number is None else self._clients[number]

    def _settle(self, client: ClientQueue[Work], peer: Peer) -> None:
        """After a change for the better: a connection without work is forgotten, others may start."""
        if not client.has_work(peer):
            self._client_of.pop(peer, None)
        if client.idle:
            self._busy.pop(client.name.number, None)
        self._changed.notify_all()
