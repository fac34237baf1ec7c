"""The ends of edges, by original edge id: requested from the hosts that store them, or held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph
from trainer.sampler.types import RowRequest

EDGES_AT_ONCE = 1 << 20  #: edges that are read at a time while all edges of a graph are read


class EdgeEndpoints(Protocol):
    """The ends of n edges, as original node ids. Thread-safe.

    An edge is identified by its *position*, 0 to n - 1. If the n edges are all edges of a type, positions are original
    ids.
    """

    def __len__(self) -> int: ...

    def ends_of(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return sources and targets, int64 [n] each. Raises ``ServiceError`` and ``PartitionError``."""
        ...

    def add_to(self, digest: Any) -> None:
        """Add the edges to a ``hashlib`` object."""
        ...


@dataclass(frozen=True)
class HeldEndpoints:
    src: Array  #: int32|int64 [E] original ids
    dst: Array  #: int32|int64 [E]

    def __len__(self) -> int:
        return len(self.src)

    def ends_of(self, positions: Ids) -> tuple[Ids, Ids]:
        src, dst = self.src[positions], self.dst[positions]
        return src.astype(np.int64, copy=False), dst.astype(np.int64, copy=False)

    def add_to(self, digest: Any) -> None:
        digest.update(np.ascontiguousarray(self.src).data)
        digest.update(np.ascontiguousarray(self.dst).data)


@dataclass(frozen=True)
class StoredEndpoints:
    graph: Graph
    edge_type: EdgeType

    def __len__(self) -> int:
        return self.graph.manifest.edges[self.edge_type].num_edges

    def ends_of(self, positions: Ids) -> tuple[Ids, Ids]:
        return self.graph.access.endpoints(self.edge_type, positions)

    def add_to(self, digest: Any) -> None:
        # The number is enough: opening a graph checks that all ranks have the same partition.
        digest.update(f"all {len(self)} edges".encode())


def all_times(graph: Graph, edge_type: EdgeType, attr: str) -> Ids:
    """Return the integer attribute ``attr`` of all edges of a type in order of their original ids, int64 [E].

    Requests the values of edges on other hosts from these hosts. Raises ``ServiceError``.
    """
    count = graph.manifest.edges[edge_type].num_edges
    times = np.empty(count, np.int64)
    for first in range(0, count, EDGES_AT_ONCE):
        wanted = RowRequest(edge_type, np.arange(first, min(first + EDGES_AT_ONCE, count)), ("orig_id", attr))
        (rows,) = graph.access.gather([wanted])
        times[rows["orig_id"]] = rows[attr]
    return times


def edges_in_order(ends: EdgeEndpoints, at_once: int = EDGES_AT_ONCE) -> Iterator[tuple[int, Ids, Ids]]:
    """Yield all edges in order of position, in groups of ``at_once`` edges.

    A group is (position of its first edge, sources, targets). Raises ``ServiceError``.
    """
    for first in range(0, len(ends), at_once):
        yield first, *ends.ends_of(np.arange(first, min(first + at_once, len(ends))))
