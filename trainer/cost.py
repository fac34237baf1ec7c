"""What making a batch took: bytes, rows and seconds, counted by each thread for itself."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields


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

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, _values(self), _values(other)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*map(operator.sub, _values(self), _values(other)))

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """All of them added up."""
        return cls(*map(sum, zip(*map(_values, costs), strict=True)))

    @property
    def asked_rows(self) -> int:
        """Rows that other hosts were asked for."""
        return self.remote_rows - self.cached_rows - self.held_rows

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
