"""Queues in which connections take turns, whatever the number of items each has put there."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items in the order of arrival per connection, the connections taking turns. Not thread-safe.

    A connection can be held up: its items wait, and count for nothing, until it is let go.
    """

    def __init__(self) -> None:
        self._queues: dict[bytes, deque[T]] = {}
        self._held: dict[bytes, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Items that may be had now."""
        return self._count

    def of(self, peer: bytes) -> int:
        """How many items of a connection wait."""
        return len(self._queues.get(peer, ())) + len(self._held.get(peer, ()))

    def peers(self) -> list[bytes]:
        """Connections with items."""
        return [*self._queues, *(peer for peer, queue in self._held.items() if queue)]

    def push(self, peer: bytes, item: T) -> None:
        if peer in self._held:
            self._held[peer].append(item)
            return
        self._queues.setdefault(peer, deque()).append(item)
        self._count += 1

    def pause(self, peer: bytes) -> None:
        """Give out nothing of this connection."""
        if peer not in self._held:
            self._held[peer] = self._queues.pop(peer, deque())
            self._count -= len(self._held[peer])

    def resume(self, peer: bytes) -> None:
        """Give out its items again."""
        if queue := self._held.pop(peer, None):
            self._queues[peer] = queue
            self._count += len(queue)

    def pop(self) -> T | None:
        """The next item; None when there is none."""
        if not self._queues:
            return None
        peer = next(iter(self._queues))
        queue = self._queues.pop(peer)
        item = queue.popleft()
        if queue:
            self._queues[peer] = queue  # behind the others
        self._count -= 1
        return item

    def drop(self, peer: bytes) -> None:
        """Forget what a connection asked, and that it was held."""
        self._count -= len(self._queues.pop(peer, ()))
        self._held.pop(peer, None)


class BlockingFairQueue(Generic[T]):
    """``FairQueue`` between threads."""

    def __init__(self) -> None:
        self._turns: FairQueue[T] = FairQueue()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, peer: bytes, item: T) -> None:
        with self._changed:
            self._turns.push(peer, item)
            self._changed.notify()

    def get(self) -> T | None:
        """The next item, waited for; None once closed."""
        with self._changed:
            while not self._closed:
                if len(self._turns):
                    return self._turns.pop()
                self._changed.wait()
            return None

    def of(self, peer: bytes) -> int:
        """How many items of a connection wait."""
        with self._changed:
            return self._turns.of(peer)

    def pause(self, peer: bytes) -> None:
        """Give out nothing of this connection."""
        with self._changed:
            self._turns.pause(peer)

    def resume(self, peer: bytes) -> None:
        """Give out its items again."""
        with self._changed:
            self._turns.resume(peer)
            self._changed.notify_all()

    def drop(self, peer: bytes) -> None:
        """Forget what a connection asked."""
        with self._changed:
            self._turns.drop(peer)

    def close(self) -> None:
        """Wake all who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
