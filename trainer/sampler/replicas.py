"""Which host answers for each part: its first living holder; finds lost holders again."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import ServiceError
from trainer.core.schema import EdgeType
from trainer.sampler.types import HopRequest, RowRequest

HERE, NOBODY = -1, -2  #: instead of a node rank

_RETRY_EVERY = 1.0  #: seconds

_POLL = 0.05  #: seconds


class PendingAnswer(Protocol):
    """An answer under way; ``result`` waits at most ``timeout`` seconds, or else the client's deadline."""

    def result(self, timeout: float | None = None) -> Any: ...


class RemoteHost(Protocol):
    """What routing needs of ``service.client.HostClient``."""

    @property
    def part_ids(self) -> Sequence[int]: ...

    @property
    def name(self) -> str: ...

    def submit_hello(self) -> PendingAnswer: ...

    def submit_sample(self, requests: Sequence[HopRequest]) -> PendingAnswer: ...

    def submit_gather(self, requests: Sequence[RowRequest]) -> PendingAnswer: ...

    def submit_has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> PendingAnswer: ...

    def submit_edges(self, part_id: int, edge_type: EdgeType, first: int, count: int) -> PendingAnswer: ...


class PartHolders:
    """The hosts of all parts and which of them are gone; safe to use from several threads.

    Own parts are answered here. Holders of another part take turns by part and ``turn``, so that several nodes do not
    all ask the same one. A host that was gone is asked for a sign of life all the while, and used again after that.
    """

    def __init__(
        self, num_parts: int, own: Collection[int], remotes: Mapping[int, RemoteHost], turn: int, server_wait: float
    ):
        self.server_wait = server_wait
        self.remotes: dict[int, RemoteHost] = {}  #: by node rank
        self._num_parts, self._own, self._turn = num_parts, own, turn
        self._lock = threading.Lock()
        self._gone: dict[int, _LostHost] = {}
        self.set_remotes(remotes)

    def set_remotes(self, remotes: Mapping[int, RemoteHost]) -> None:
        """Ask these from now on. Those that are left out may still be under way, so they stay known."""
        with self._lock:
            self._gone = {host: gone for host, gone in self._gone.items() if remotes.get(host) is self.remotes[host]}
            self.remotes = {**self.remotes, **remotes}
            self._of_part = [_in_turn(part, self._own, remotes, self._turn) for part in range(self._num_parts)]
            self._table = self._make_table()

    def table(self) -> Array:
        """int16 [num_parts + 2]: who answers for part p at p + 1; the ends are no part.

        A part without a living holder keeps its first one. 16 bits are sorted by radix.
        """
        if self._gone:
            self._check_lost()
        return self._table

    def lost_hosts(self) -> frozenset[int]:
        """Those that are gone, after a look at whether they have come back."""
        if self._gone:
            self._check_lost()
        return frozenset(self._gone)

    def lost(self, host: int, error: ServiceError) -> None:
        """``host`` did not answer any more."""
        with self._lock:
            if host in self._gone:
                self._gone[host].error = error
            else:
                self._gone[host] = _LostHost(self.remotes[host], error)
            self._table = self._make_table()

    def wait_for(self, parts: Iterable[int]) -> None:
        """Until each of these parts has a living holder.

        Raises ``ServiceError`` with the cause of each that is missing, ``server_wait`` seconds after the last holder
        of a part was lost.
        """
        wanted = sorted(set(parts))
        while missing := self._missing(wanted):
            if time.monotonic() - max(map(self._alone_since, missing)) >= self.server_wait:
                raise ServiceError(self._given_up(missing))
            time.sleep(_POLL)
            self._check_lost()

    def _missing(self, parts: Sequence[int]) -> list[int]:
        gone = set(self._gone)
        return [part for part in parts if gone.issuperset(self._of_part[part])]

    def _alone_since(self, part: int) -> float:
        """When the last of its holders was lost."""
        since = [gone.since for host in self._of_part[part] if (gone := self._gone.get(host)) is not None]
        return max(since, default=time.monotonic())  # without any: one came back just now

    def _given_up(self, parts: Sequence[int]) -> str:
        hosts = dict.fromkeys(host for part in parts for host in self._of_part[part])
        causes = [str(gone.error) for host in hosts if (gone := self._gone.get(host)) is not None]
        numbers = ", ".join(map(str, parts))
        return (
            f"{'part' if len(parts) == 1 else 'parts'} {numbers}: no graph server that holds "
            f"{'it' if len(parts) == 1 else 'them'} came back within {self.server_wait:g} s (run.server_wait)\n"
            + "\n".join(causes)
        )

    def _check_lost(self) -> None:
        """See whether those that are gone have come back; one thread at a time, waiting for nothing."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            back = [host for host, gone in self._gone.items() if gone.is_back()]
            for host in back:
                del self._gone[host]
            if back:
                self._table = self._make_table()
        finally:
            self._lock.release()

    def _make_table(self) -> Array:
        answering = [
            next((host for host in hosts if host not in self._gone), hosts[0] if hosts else HERE)
            for hosts in self._of_part
        ]
        return np.array([NOBODY, *answering, NOBODY], np.int16)


class _LostHost:
    """A host that does not answer, and the greeting that waits for it."""

    def __init__(self, host: RemoteHost, error: ServiceError):
        self.error, self.since = error, time.monotonic()
        self._host, self._next_check = host, 0.0
        self._greeting: PendingAnswer | None = None

    def is_back(self) -> bool:
        """Whether it has answered; looks at most every ``_RETRY_EVERY`` seconds."""
        if time.monotonic() < self._next_check:
            return False
        try:
            self._greeting = self._greeting or self._host.submit_hello()
            self._greeting.result(0)
        except ServiceError as error:
            self.error = error
            self._next_check = time.monotonic() + _RETRY_EVERY
            return False
        return True


def _in_turn(part: int, own: Collection[int], remotes: Mapping[int, RemoteHost], turn: int) -> tuple[int, ...]:
    """The holders of a part in the order they are asked; (HERE,) where it is opened, () where nobody has it."""
    if part in own:
        return (HERE,)
    holders = [host for host in sorted(remotes) if part in remotes[host].part_ids]
    first = (turn + part) % len(holders) if holders else 0
    return (*holders[first:], *holders[:first])
