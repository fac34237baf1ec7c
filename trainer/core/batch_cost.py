"""Bytes, rows and seconds that making a batch took, counted per thread."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import NamedTuple


class FromHost(NamedTuple):
    """What one other host was good for."""

    remote_bytes: int = 0  #: received from it
    remote_rows: int = 0  #: that it owns, however they came
    cached_rows: int = 0
    held_rows: int = 0


class ByHost(dict[int, FromHost]):
    """By node rank; hosts without an entry were good for nothing. Values are added up, none is ever changed."""

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
    """Of one batch, or of several added up."""

    remote_bytes: int = 0  #: received from other hosts
    rows: int = 0  #: of nodes and edges, gathered; 0 with one host
    remote_rows: int = 0  #: of them, those that other hosts own, however they came
    cached_rows: int = 0  #: of the remote ones, from this host's cache
    held_rows: int = 0  #: of the remote ones, from batches made just before, which still hold them
    sample_s: float = 0.0  #: to find the subgraph, waiting left out
    gather_s: float = 0.0  #: to collect its rows, waiting left out
    wait_s: float = 0.0  #: waiting for other hosts
    by_host: ByHost = field(default_factory=ByHost)  #: the bytes and rows above, by whose they are

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, _values(self), _values(other)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*map(operator.sub, _values(self), _values(other)))

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """All of them added up."""
        return reduce(operator.add, costs, cls())

    def of_host(self, node_rank: int) -> Cost:
        """The same, all of it by this host."""
        mine = FromHost(self.remote_bytes, self.remote_rows, self.cached_rows, self.held_rows)
        return replace(self, by_host=ByHost({node_rank: mine}))

    @property
    def remote_share(self) -> float | None:
        """What part of the rows other hosts own; None with one host."""
        return round(self.remote_rows / self.rows, 4) if self.rows else None


_values = operator.attrgetter(*(field.name for field in fields(Cost)))


class CostMeter:
    """Adds up what the calling thread does; each thread takes its own."""

    def __init__(self) -> None:
        self._own = threading.local()

    def add(self, cost: Cost) -> None:
        self._own.cost = self._now() + cost

    def take(self) -> Cost:
        """What this thread has added since it last took."""
        cost = self._now()
        self._own.cost = Cost()
        return cost

    def _now(self) -> Cost:
        cost: Cost = getattr(self._own, "cost", Cost())
        return cost


class CostSum:
    """Adds up what several threads do."""

    def __init__(self) -> None:
        self._lock, self.sum = threading.Lock(), Cost()

    def add(self, cost: Cost) -> None:
        with self._lock:
            self.sum += cost
