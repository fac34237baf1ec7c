"""Chooses the host that answers for each part, and detects when lost hosts return."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import ServiceError, first_wait
from trainer.wire.request import A, Request

HERE, NOBODY = -1, -2  #: values in place of a node rank, for this process and for no host

_RETRY_EVERY = 1.0  #: seconds between attempts to reach a lost host

_POLL = 0.05  #: seconds between checks while waiting


_T_co = TypeVar("_T_co", covariant=True)


class PendingAnswer(Protocol[_T_co]):
    """An answer that may not have arrived yet.

    ``result`` waits for at most ``timeout`` seconds, by default until the client's deadline. ``received`` is the number
    of bytes of the answer, once it has arrived.
    """

    @property
    def received(self) -> int: ...

    def result(self, timeout: float | None = None) -> _T_co: ...


@dataclass(frozen=True)
class ReadyAnswer(Generic[A]):
    """An answer of a host that is simulated in this process."""

    answer: A
    received: int = 0

    def result(self, timeout: float | None = None) -> A:
        return self.answer


class RemoteHost(Protocol):
    """The methods of ``service.client.HostClient`` that ``DistGraph`` uses."""

    @property
    def part_ids(self) -> Sequence[int]: ...

    @property
    def name(self) -> str: ...

    def greet(self) -> PendingAnswer[Any]: ...

    def submit(self, request: Request[A]) -> PendingAnswer[A]: ...


class PartHolders:
    """The holders of each part, and which hosts are lost. Thread-safe.

    This process itself answers for its own parts. The first holder that is tried for another part depends on the part
    number and on ``turn``, which is the node rank of this process. Lost hosts are used again once they answer.
    """

    def __init__(
        self, num_parts: int, own: Collection[int], remotes: Mapping[int, RemoteHost], turn: int, server_wait: float
    ):
        self.server_wait = server_wait
        self.remotes: dict[int, RemoteHost] = {}  #: clients of the other hosts, by node rank
        self._num_parts, self._own, self._turn = num_parts, own, turn
        self._lock = threading.Lock()
        self._lost: dict[int, _LostHost] = {}
        self.set_remotes(remotes)

    def set_remotes(self, remotes: Mapping[int, RemoteHost]) -> None:
        """Send future requests to these hosts only. Hosts that are left out may still answer earlier requests."""
        with self._lock:
            # Requests to removed hosts may be in flight.
            self._lost = {
                host: lost_host for host, lost_host in self._lost.items() if remotes.get(host) is self.remotes[host]
            }
            self.remotes = {**self.remotes, **remotes}
            self._of_part = [_in_turn(part, self._own, remotes, self._turn) for part in range(self._num_parts)]
            self._table = self._make_table()

    def table(self) -> Array:
        """Return the host that answers for each part, int16 [num_parts + 2]. Part p is at index p + 1.

        The first and last entries, for ids in no part, are ``NOBODY``. If all holders of a part are lost, its entry is
        the holder that is tried first.
        """
        if self._lost:
            self._check_lost()
        return self._table

    def lost_hosts(self) -> frozenset[int]:
        """Check which lost hosts are back, and return the node ranks of those that are still lost."""
        if self._lost:
            self._check_lost()
        return frozenset(self._lost)

    def lost(self, host: int, error: ServiceError) -> None:
        with self._lock:
            if host in self._lost:
                self._lost[host].error = error
            else:
                self._lost[host] = _LostHost(self.remotes[host], error)
            self._table = self._make_table()

    def wait_for(self, parts: Iterable[int]) -> None:
        """Wait until each of these parts has a reachable holder.

        Raises ``ServiceError`` with the hosts' errors if all holders of a part have been lost for ``server_wait``
        seconds.
        """
        wanted, begin = sorted(set(parts)), time.monotonic()
        while True:
            lost, holders, now = dict(self._lost), self._of_part, time.monotonic()  # other threads change them
            missing = [part for part in wanted if lost.keys() >= set(holders[part])]
            if not missing:
                return
            since = [max((lost[host].since for host in holders[part]), default=begin) for part in missing]
            if now - max(since) >= self.server_wait:
                hosts = dict.fromkeys(host for part in missing for host in self._of_part[part])
                causes = [lost_host.error for host in hosts if (lost_host := self._lost.get(host)) is not None]
                numbers, wait = ", ".join(map(str, missing)), first_wait(causes)
                raise ServiceError(
                    f"{'part' if len(missing) == 1 else 'parts'} {numbers}: no graph server that holds "
                    f"{'it' if len(missing) == 1 else 'them'} came back within {self.server_wait:g} s (run.server_wait)"
                    "\n" + "\n".join(map(str, causes)),
                    wait=wait and replace(wait, seconds=self.server_wait),
                )
            time.sleep(_POLL)
            self._check_lost()

    def _check_lost(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            back = [host for host, lost_host in self._lost.items() if lost_host.is_back()]
            for host in back:
                del self._lost[host]
            if back:
                self._table = self._make_table()
        finally:
            self._lock.release()

    def _make_table(self) -> Array:
        answering = [
            next((host for host in hosts if host not in self._lost), hosts[0] if hosts else HERE)
            for hosts in self._of_part
        ]
        return np.array([NOBODY, *answering, NOBODY], np.int16)


class _LostHost:
    def __init__(self, host: RemoteHost, error: ServiceError):
        self.error, self.since = error, time.monotonic()
        self._host, self._next_check = host, 0.0
        self._probe: PendingAnswer[Any] | None = None

    def is_back(self) -> bool:
        if time.monotonic() < self._next_check:
            return False
        try:
            self._probe = self._probe or self._host.greet()
            self._probe.result(0)
        except ServiceError as error:
            self.error = error
            self._next_check = time.monotonic() + _RETRY_EVERY
            return False
        return True


def _in_turn(part: int, own: Collection[int], remotes: Mapping[int, RemoteHost], turn: int) -> tuple[int, ...]:
    """Return the holders of a part in the order in which they are tried; ``(HERE,)`` for a part of this process."""
    if part in own:
        return (HERE,)
    holders = [host for host in sorted(remotes) if part in remotes[host].part_ids]
    first = (turn + part) % len(holders) if holders else 0
    return (*holders[first:], *holders[:first])
