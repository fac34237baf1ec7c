"""Fair queues: hosts are served in turn, and the connections of each host are served in turn."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Peer(NamedTuple):
    """Identifies a connection of a graph server by the address of the other host and a number."""

    address: str  #: IP address of the other host
    number: int


class FairQueue(Generic[T]):
    """A queue that serves hosts in turn and the connections of a host in turn. Not thread-safe.

    Items of one connection stay in order. ``pop`` and ``len`` ignore the items of a paused connection.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Peer, deque[T]]] = {}  # without empty queues
        self._paused: dict[Peer, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, peer: Peer) -> int:
        """Return the number of items of a connection, even if it is paused."""
        return len(self._hosts.get(peer.address, {}).get(peer, ())) + len(self._paused.get(peer, ()))

    def peers(self) -> list[Peer]:
        waiting = [peer for queues in self._hosts.values() for peer in queues]
        return [*waiting, *(peer for peer, queue in self._paused.items() if queue)]

    def push(self, peer: Peer, item: T) -> None:
        if peer in self._paused:
            self._paused[peer].append(item)
            return
        self._hosts.setdefault(peer.address, {}).setdefault(peer, deque()).append(item)
        self._count += 1

    def pause(self, peer: Peer) -> None:
        """Hold back the items of a connection until ``resume``."""
        if peer not in self._paused:
            self._paused[peer] = self._remove(peer)
            self._count -= len(self._paused[peer])

    def resume(self, peer: Peer) -> None:
        if queue := self._paused.pop(peer, None):
            self._hosts.setdefault(peer.address, {})[peer] = queue
            self._count += len(queue)

    def pop(self) -> T | None:
        if not self._hosts:
            return None
        address = next(iter(self._hosts))
        queues = self._hosts.pop(address)
        peer = next(iter(queues))
        queue = queues.pop(peer)
        item = queue.popleft()
        if queue:
            queues[peer] = queue  # at the end
        if queues:
            self._hosts[address] = queues
        self._count -= 1
        return item

    def drop(self, peer: Peer) -> None:
        """Remove the items of a connection, and end its pause."""
        self._count -= len(self._remove(peer))
        self._paused.pop(peer, None)

    def _remove(self, peer: Peer) -> deque[T]:
        queues = self._hosts.get(peer.address, {})
        queue = queues.pop(peer, deque())
        if not queues:
            self._hosts.pop(peer.address, None)
        return queue


class BlockingFairQueue(Generic[T]):
    """A thread-safe ``FairQueue`` whose ``get`` waits for an item."""

    def __init__(self) -> None:
        self._queue: FairQueue[T] = FairQueue()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, peer: Peer, item: T) -> None:
        with self._changed:
            self._queue.push(peer, item)
            self._changed.notify()

    def get(self) -> T | None:
        """Wait for the next item, remove it and return it. Returns None once the queue is closed."""
        with self._changed:
            while not self._closed:
                if len(self._queue):
                    return self._queue.pop()
                self._changed.wait()
            return None

    def of(self, peer: Peer) -> int:
        with self._changed:
            return self._queue.of(peer)

    def pause(self, peer: Peer) -> None:
        with self._changed:
            self._queue.pause(peer)

    def resume(self, peer: Peer) -> None:
        with self._changed:
            self._queue.resume(peer)
            self._changed.notify_all()

    def drop(self, peer: Peer) -> None:
        with self._changed:
            self._queue.drop(peer)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
