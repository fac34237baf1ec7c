"""Counts the bytes, rows and seconds spent on making batches, per thread."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import NamedTuple


class FromHost(NamedTuple):
    """Counts of one other host: bytes received from it, and gathered rows that it owns."""

    remote_bytes: int = 0  #: bytes received from the other host
    remote_rows: int = 0  #: gathered rows that the other host owns: received, cached or held
    cached_rows: int = 0  #: those of ``remote_rows`` that were cached
    held_rows: int = 0  #: those of ``remote_rows`` that were held


class ByHost(dict[int, FromHost]):
    """Maps node ranks to ``FromHost``. A missing entry stands for zero bytes and rows. Must not be changed."""

    def __add__(self, other: ByHost) -> ByHost:
        return self._with(other, 1) if other else self

    def __sub__(self, other: ByHost) -> ByHost:
        return self._with(other, -1) if other else self

    def _with(self, other: ByHost, sign: int) -> ByHost:
        both = ByHost(self)
        for host, more in other.items():
            known = self.get(host, FromHost())
            both[host] = FromHost(*(a + sign * b for a, b in zip(known, more, strict=True)))
        return both


@dataclass(frozen=True)
class Cost:
    """The bytes, rows and seconds spent on making one batch, or their sums over several batches."""

    remote_bytes: int = 0  #: bytes received from other hosts
    rows: int = 0  #: gathered rows of nodes and edges; 0 with one host
    remote_rows: int = 0  #: those of ``rows`` that other hosts own: received, cached or held
    cached_rows: int = 0  #: those of ``remote_rows`` from this host's row cache
    held_rows: int = 0  #: those of ``remote_rows`` that were copied from the batches made just before
    sample_s: float = 0.0  #: seconds of sampling, without waiting
    gather_s: float = 0.0  #: seconds of gathering rows, without waiting
    wait_s: float = 0.0  #: seconds of waiting for other hosts
    by_host: ByHost = field(default_factory=ByHost)  #: the remote bytes and rows above, per owning host

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, _values(self), _values(other)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*map(operator.sub, _values(self), _values(other)))

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        return reduce(operator.add, costs, cls())

    def of_host(self, node_rank: int) -> Cost:
        """Return a copy with all remote bytes and rows attributed to one host."""
        mine = FromHost(self.remote_bytes, self.remote_rows, self.cached_rows, self.held_rows)
        return replace(self, by_host=ByHost({node_rank: mine}))

    @property
    def remote_share(self) -> float | None:
        """Share of the gathered rows that other hosts own, 0 to 1, or None if no rows were counted."""
        return round(self.remote_rows / self.rows, 4) if self.rows else None


_values = operator.attrgetter(*(field.name for field in fields(Cost)))


class CostMeter:
    """Sums costs separately for each thread. ``add`` and ``take`` use the sum of the calling thread."""

    def __init__(self) -> None:
        self._own = threading.local()

    def add(self, cost: Cost) -> None:
        self._own.cost = self._now() + cost

    def take(self) -> Cost:
        """Return the sum of the costs that this thread has added, and reset the sum to zero."""
        cost = self._now()
        self._own.cost = Cost()
        return cost

    def _now(self) -> Cost:
        cost: Cost = getattr(self._own, "cost", Cost())
        return cost


class CostSum:
    def __init__(self) -> None:
        self._lock, self.sum = threading.Lock(), Cost()

    def add(self, cost: Cost) -> None:
        with self._lock:
            self.sum += cost
