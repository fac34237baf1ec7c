"""Who is served next: whole batches, fairly between clients, within a bound of bytes.

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
from typing import Generic, TypeVar

from trainer.service.clients import DeskStatus, Job, ServedClient
from trainer.service.turns import Turns

MAX_QUEUED = 64  #: requests waiting per client

MAX_QUEUED_BYTES = 64 << 20  #: of requests waiting per client

MAX_CLIENTS = 4096

PATIENCE = 2.0  #: seconds for which all others wait for a client whose batch does not fit beside theirs

FORGET = 60.0  #: seconds until a client without work is forgotten

_RECENT = 32

Work = TypeVar("Work")


class BatchDesk(Generic[Work]):
    """Hands out work to threads. Safe to use from several threads; ``clock`` is ``time.monotonic``'s kind.

    Requests that are no batches (``Job.client`` is None) take turns with the batches, connection by connection.
    """

    def __init__(self, buffer_limit: int, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock = buffer_limit, clock
        self._changed = threading.Condition()
        self._clients: dict[int, ServedClient[Work]] = {}
        self._busy: dict[int, ServedClient[Work]] = {}  # those with work
        self._largest: deque[int] = deque(maxlen=_RECENT)  # of all clients' last batches
        self._client_of: dict[bytes, int] = {}  # connections with work, and whose they are
        self._beside: Turns[Job[Work]] = Turns()
        self._making_beside: set[Job[Work]] = set()
        self._beside_next = False
        self._virtual = 0.0  # the tag served last
        self._batches = 0
        self._closed = False

    def arrive(self, job: Job[Work]) -> str | None:
        """Take in a request; the reason when it is refused.

        What was sent to the same connection before counts as taken, unless more of its work is under way.
        """
        with self._changed:
            refusal = self._put_beside(job) if job.client is None else self._put(job)
            self._changed.notify_all()
            return refusal

    def next(self, timeout: float) -> Job[Work] | None:
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

    def done(self, job: Job[Work], nbytes: int) -> bool:
        """A batch is made, or another answer: a batch takes ``nbytes``. Whether the connection is there to have it."""
        with self._changed:
            if job.client is None:
                self._making_beside.discard(job)
                return True
            client = self._clients[job.client.number]
            there = client.finish(job, nbytes)
            self._batches += 1
            self._largest.append(nbytes)
            self._settle(client, job.peer)
            return there

    def failed(self, job: Job[Work]) -> None:
        """There is no batch, only an error to send, which holds nothing. It still costs as if there were."""
        with self._changed:
            if job.client is None:
                self._making_beside.discard(job)
            else:
                client = self._clients[job.client.number]
                client.abandon(job)
                self._settle(client, job.peer)

    def taken(self, peer: bytes, request_id: int) -> None:
        """The reply to a request has arrived; other ids than those sent there say nothing."""
        with self._changed:
            if client := self._client_at(peer):
                client.heard = self._clock()
                client.sent.pop((peer, request_id), None)
                self._settle(client, peer)

    def gone(self, peer: bytes) -> None:
        """A connection has ended: what it asked for is dropped, what was sent to it is free."""
        with self._changed:
            self._beside.drop(peer)
            if client := self._client_at(peer):
                client.drop(peer)
                self._settle(client, peer)

    def hold(self, peer: bytes) -> None:
        """Start nothing but batches for this connection, until it is let go: it takes no answers."""
        with self._changed:
            self._beside.hold(peer)

    def let_go(self, peer: bytes) -> None:
        with self._changed:
            self._beside.let_go(peer)
            self._changed.notify_all()

    def peers(self) -> list[bytes]:
        """Connections that wait for work, or have not taken it yet."""
        with self._changed:
            beside = [*self._beside.peers(), *(job.peer for job in self._making_beside)]
            return list(dict.fromkeys([*self._client_of, *beside]))

    def status(self) -> DeskStatus:
        """Queues, buffer and clients; forgets those long without work."""
        with self._changed:
            now = self._clock()
            for client in [one for one in self._clients.values() if one.idle and now - one.heard > FORGET]:
                del self._clients[client.name.number]
            clients = tuple(client.status(now) for client in self._clients.values())
            queue = len(self._beside) + sum(client.queue for client in clients)
            return DeskStatus(queue, self._held(), self._limit, self._batches, clients)

    def close(self) -> None:
        """Wake all who wait; nothing is handed out any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put_beside(self, job: Job[Work]) -> str | None:
        if self._beside.of(job.peer) >= MAX_QUEUED:
            return f"{MAX_QUEUED} requests of this connection wait already"
        self._beside.push(job.peer, job)
        return None

    def _put(self, job: Job[Work]) -> str | None:
        client, refusal = self._client_for(job)
        if client is None:
            return refusal
        client.heard = self._clock()
        if len(client.queue) >= MAX_QUEUED or client.queued_bytes + job.size > MAX_QUEUED_BYTES:
            return f"{len(client.queue)} batches of this client ({client.name.name}) wait already"
        client.take_sent(job.peer)
        if not client.queue:
            client.tag = max(client.tag, self._virtual)
        client.push(job)
        self._busy[client.name.number] = client
        self._client_of[job.peer] = client.name.number
        return None

    def _client_for(self, job: Job[Work]) -> tuple[ServedClient[Work] | None, str]:
        """Whom a job is for, or why it is refused."""
        assert job.client is not None
        number = job.client.number
        if self._client_of.get(job.peer, number) != number:
            return None, "this connection has work under way as another client"
        if number not in self._clients:
            if len(self._clients) >= MAX_CLIENTS and not self._forget_one():
                return None, f"{MAX_CLIENTS} clients have work under way already"
            self._clients[number] = ServedClient(job.client, self._virtual, self._clock())
        return self._clients[number], ""

    def _forget_one(self) -> bool:
        """Make room by the first one without work; whether there is any."""
        idle = next((number for number, client in self._clients.items() if client.idle), None)
        if idle is not None:
            del self._clients[idle]
        return idle is not None

    def _choose(self) -> Job[Work] | None:
        """The next job that may start now; batches and others in turn."""
        for beside in (self._beside_next, not self._beside_next):
            job = self._next_beside() if beside else self._next_batch()
            if job is not None:
                self._beside_next = not beside
                return job
        return None

    def _next_beside(self) -> Job[Work] | None:
        if job := self._beside.pop():
            self._making_beside.add(job)
        return job

    def _next_batch(self) -> Job[Work] | None:
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

    def _start(self, client: ServedClient[Work], cost: int) -> Job[Work]:
        self._virtual = max(self._virtual, client.tag)
        return client.start(cost)

    def _waiting(self) -> Iterator[ServedClient[Work]]:
        return iter(sorted((one for one in self._busy.values() if one.queue), key=lambda one: one.tag))

    def _cost(self, client: ServedClient[Work]) -> int:
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

    def _client_at(self, peer: bytes) -> ServedClient[Work] | None:
        number = self._client_of.get(peer)
        return None if number is None else self._clients[number]

    def _settle(self, client: ServedClient[Work], peer: bytes) -> None:
        """After a change for the better: a connection without work is forgotten, others may start."""
        if not client.has_work(peer):
            self._client_of.pop(peer, None)
        if client.idle:
            self._busy.pop(client.name.number, None)
        self._changed.notify_all()
