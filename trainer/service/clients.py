"""What the desk knows of one client: its queue, what is being made for it, and what it has not taken yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer.service.messages import ClientName

_RECENT = 8  #: replies of which the largest stands for the next one

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class Job(Generic[Work]):
    """One request of one connection."""

    peer: bytes  #: the connection
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
class DeskStatus:
    """The desk at one moment."""

    queue: int  #: requests waiting
    buffer_bytes: int  #: of replies sent and not taken yet, and reserved for those being made
    buffer_limit: int
    batches: int  #: made so far
    clients: tuple[ClientStatus, ...]


@dataclass(eq=False)
class ServedClient(Generic[Work]):
    """One client; the desk's lock guards it."""

    name: ClientName
    tag: float  #: see ``desk``
    heard: float = 0.0
    blocked_since: float | None = None  #: its next batch fits since then not beside the others'
    queue: deque[Job[Work]] = field(default_factory=deque)
    queued_bytes: int = 0
    making: dict[Job[Work], int] = field(default_factory=dict)  #: bytes reserved
    sent: dict[tuple[bytes, int], int] = field(default_factory=dict)  #: bytes not taken yet, by peer and request id
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))  #: bytes of its last batches
    batches: int = 0
    nbytes: int = 0
    _gone: set[Job[Work]] = field(default_factory=set)  #: being made for connections that have ended

    @property
    def held(self) -> int:
        """Bytes of the buffer."""
        return sum(self.making.values()) + sum(self.sent.values())

    @property
    def idle(self) -> bool:
        return not (self.queue or self.making or self.sent)

    def has_work(self, peer: bytes) -> bool:
        """Whether anything of a connection waits, is being made or has not been taken."""
        jobs = [*self.queue, *(job for job in self.making if job not in self._gone)]
        return any(job.peer == peer for job in jobs) or any(to == peer for to, _ in self.sent)

    def push(self, job: Job[Work]) -> None:
        self.queue.append(job)
        self.queued_bytes += job.size

    def start(self, cost: int) -> Job[Work]:
        """The first of the queue, from now on being made."""
        job = self.queue.popleft()
        self.queued_bytes -= job.size
        self.making[job] = cost
        self.tag += cost
        self.blocked_since = None
        return job

    def finish(self, job: Job[Work], nbytes: int) -> bool:
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

    def abandon(self, job: Job[Work]) -> None:
        """No batch came of it."""
        del self.making[job]
        self._gone.discard(job)

    def take_sent(self, peer: bytes) -> None:
        """A connection asks again, so it has what was sent there, if that was all."""
        if not any(job.peer == peer for job in (*self.queue, *self.making)):
            self._forget_sent(peer)

    def drop(self, peer: bytes) -> None:
        """A connection has ended."""
        kept = [job for job in self.queue if job.peer != peer]
        self.queue = deque(kept)
        self.queued_bytes = sum(job.size for job in kept)
        self.blocked_since = self.blocked_since if kept else None
        self._gone |= {job for job in self.making if job.peer == peer}
        self._forget_sent(peer)

    def status(self, now: float) -> ClientStatus:
        return ClientStatus(self.name.name, len(self.queue), self.held, self.batches, self.nbytes, now - self.heard)

    def _forget_sent(self, peer: bytes) -> None:
        for key in [key for key in self.sent if key[0] == peer]:
            del self.sent[key]
