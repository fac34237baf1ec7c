"""Queues in which hosts and their connections take turns, whatever the number of items each has put there."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Peer(NamedTuple):
    """A connection."""

    address: str  #: the other host's
    number: int


class FairQueue(Generic[T]):
    """Items in the order of arrival per connection; hosts take turns, and each host's connections. Not thread-safe.

    A connection can be held up: its items wait, and count for nothing, until it is let go.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Peer, deque[T]]] = {}  # no empty ones
        self._held: dict[Peer, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Items that may be had now."""
        return self._count

    def of(self, peer: Peer) -> int:
        """How many items of a connection wait."""
        return len(self._hosts.get(peer.address, {}).get(peer, ())) + len(self._held.get(peer, ()))

    def peers(self) -> list[Peer]:
        """Connections with items."""
        waiting = [peer for queues in self._hosts.values() for peer in queues]
        return [*waiting, *(peer for peer, queue in self._held.items() if queue)]

    def push(self, peer: Peer, item: T) -> None:
        if peer in self._held:
            self._held[peer].append(item)
            return
        self._hosts.setdefault(peer.address, {}).setdefault(peer, deque()).append(item)
        self._count += 1

    def pause(self, peer: Peer) -> None:
        """Give out nothing of this connection."""
        if peer not in self._held:
            self._held[peer] = self._taken_out(peer)
            self._count -= len(self._held[peer])

    def resume(self, peer: Peer) -> None:
        """Give out its items again."""
        if queue := self._held.pop(peer, None):
            self._hosts.setdefault(peer.address, {})[peer] = queue
            self._count += len(queue)

    def pop(self) -> T | None:
        """The next item; None when there is none."""
        if not self._hosts:
            return None
        address = next(iter(self._hosts))
        queues = self._hosts.pop(address)
        peer = next(iter(queues))
        queue = queues.pop(peer)
        item = queue.popleft()
        if queue:
            queues[peer] = queue  # behind the others
        if queues:
            self._hosts[address] = queues
        self._count -= 1
        return item

    def drop(self, peer: Peer) -> None:
        """Forget what a connection asked, and that it was held."""
        self._count -= len(self._taken_out(peer))
        self._held.pop(peer, None)

    def _taken_out(self, peer: Peer) -> deque[T]:
        queues = self._hosts.get(peer.address, {})
        queue = queues.pop(peer, deque())
        if not queues:
            self._hosts.pop(peer.address, None)
        return queue


class BlockingFairQueue(Generic[T]):
    """``FairQueue`` between threads."""

    def __init__(self) -> None:
        self._turns: FairQueue[T] = FairQueue()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, peer: Peer, item: T) -> None:
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

    def of(self, peer: Peer) -> int:
        """How many items of a connection wait."""
        with self._changed:
            return self._turns.of(peer)

    def pause(self, peer: Peer) -> None:
        """Give out nothing of this connection."""
        with self._changed:
            self._turns.pause(peer)

    def resume(self, peer: Peer) -> None:
        """Give out its items again."""
        with self._changed:
            self._turns.resume(peer)
            self._changed.notify_all()

    def drop(self, peer: Peer) -> None:
        """Forget what a connection asked."""
        with self._changed:
            self._turns.drop(peer)

    def close(self) -> None:
        """Wake all who wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
