"""Draws the nodes of GraphSAINT's subgraphs: by out-degree, by the degrees of edges' ends, or by random walks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.rng import GOLDEN, fractions, hashed
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, edge_salt
from trainer.graph.open import Graph
from trainer.loader.edge_endpoints import EDGES_AT_ONCE, EdgeEndpoints, edges_in_order
from trainer.sampler.types import HopRequest, RowRequest

_MOST_SUMS = 1 << 25  #: largest number of running sums of edge weights that are kept, 8 bytes each


@dataclass(frozen=True)
class SaintNodeDraw:
    """Draws nodes with replacement. The chance of a node is proportional to its out-degree."""

    running: Ids  #: int64 [N] running sum of the nodes' out-degrees

    @classmethod
    def of(cls, ends: EdgeEndpoints, num_nodes: int) -> SaintNodeDraw:
        """Count out-degrees: reads all edges. Raises ``ServiceError``."""
        return cls(np.cumsum(_degrees(ends, num_nodes)[0], dtype=np.int64))

    def __call__(self, key: int, count: int) -> Ids:
        """Draw ``count`` nodes. Returns the distinct ones: original ids, ascending."""
        return np.unique(np.searchsorted(self.running, uniform(key, count, int(self.running[-1])), "right"))


@dataclass(frozen=True)
class SaintEdgeDraw:
    """Draws edges with replacement.

    The chance of an edge is proportional to the in-degree of its source plus the out-degree of its target.
    """

    ends: EdgeEndpoints
    width: int  #: number of edges between two running sums
    #: int64 [ceil(E / width)] running sum of the edges' weights at the end of each group of edges; None: all weights
    #: are 0, and all edges are equally likely
    running: Ids | None
    out_degree: Array  #: int32|int64 [N]
    in_degree: Array  #: int32|int64 [N]

    @classmethod
    def of(cls, ends: EdgeEndpoints, num_nodes: int, most_sums: int = _MOST_SUMS) -> SaintEdgeDraw:
        """Compute degrees and running sums of the edges' weights: reads all edges twice. Raises ``ServiceError``.

        Keeps 8 or 16 bytes per node, and at most ``most_sums`` sums of 8 bytes.
        """
        width = 1
        while len(ends) > most_sums * width:
            width *= 2
        out_degree, in_degree = _degrees(ends, num_nodes)
        sums = np.empty(-(-len(ends) // width), np.int64)
        for first, src, dst in edges_in_order(ends, max(EDGES_AT_ONCE, width)):
            _sum_weights(src, dst, in_degree, out_degree, width, sums[first // width :])
        return cls(ends, width, np.cumsum(sums, out=sums) if sums.any() else None, out_degree, in_degree)

    def __call__(self, key: int, count: int) -> Ids:
        """Draw ``count`` edges. Returns the distinct nodes at their ends: original ids, ascending."""
        return np.unique(np.concatenate(self._drawn(key, count)[1:]))

    def edges(self, key: int, count: int) -> Ids:
        return self._drawn(key, count)[0]

    def _drawn(self, key: int, count: int) -> tuple[Ids, Ids, Ids]:
        if self.running is None:
            edges = uniform(key, count, len(self.ends))
            return edges, *self.ends.ends_of(edges)
        sums = uniform(key, count, int(self.running[-1]))
        # Only the sum after every ``width``-th edge is stored; the edges before it are read again.
        group = np.searchsorted(self.running, sums, "right")
        if self.width == 1:
            return group, *self.ends.ends_of(group)
        distinct, at = np.unique(group, return_inverse=True)
        edges = (distinct[:, None] * self.width + np.arange(self.width)).reshape(-1)
        src, dst = self.ends.ends_of(np.minimum(edges, len(self.ends) - 1))
        begin = np.where(group > 0, self.running[group - 1], 0)
        _find(src, dst, self.in_degree, self.out_degree, self.width, at, sums - begin)
        return edges[at], src[at], dst[at]


def _degrees(ends: EdgeEndpoints, num_nodes: int) -> tuple[Array, Array]:
    dtype = np.int32 if len(ends) < 2**31 else np.int64
    out_degree, in_degree = np.zeros(num_nodes, dtype), np.zeros(num_nodes, dtype)
    for _, src, dst in edges_in_order(ends):
        _count(src, out_degree)
        _count(dst, in_degree)
    return out_degree, in_degree


@njit()
def _count(nodes: Any, counts: Any) -> None:
    for node in nodes:
        counts[node] += 1


@njit()
def _sum_weights(src: Any, dst: Any, in_degree: Any, out_degree: Any, width: int, sums: Any) -> None:
    for first in range(0, len(src), width):
        total = np.int64(0)
        for edge in range(first, min(first + width, len(src))):
            total += np.int64(in_degree[src[edge]]) + np.int64(out_degree[dst[edge]])
        sums[first // width] = total


@njit()
def _find(src: Any, dst: Any, in_degree: Any, out_degree: Any, width: int, at: Any, sums: Any) -> None:
    for i in range(len(at)):
        edge, total = at[i] * width, np.int64(0)
        while True:
            total += np.int64(in_degree[src[edge]]) + np.int64(out_degree[dst[edge]])
            if total > sums[i]:
                break
            edge += 1
        at[i] = edge


def visited_by_walks(graph: Graph, key: int, num_walks: int, walk_length: int) -> Ids:
    """Make random walks and return the distinct nodes on them: global ids int64, in the order of original ids.

    A step goes from a node to the source of a randomly drawn in-edge. Raises ``ServiceError``.
    """
    num_nodes = graph.manifest.nodes[HOMO_NODE].num_nodes
    at = graph.store.to_global(HOMO_NODE, uniform(key, num_walks, num_nodes))
    visited = [at]
    for step in range(walk_length):
        places = np.arange(step * num_walks, (step + 1) * num_walks)  # a different draw for each step of each walk
        request = HopRequest(HOMO_EDGE, at, 1, 0, key ^ edge_salt(HOMO_EDGE), trees=places)
        (sample,) = graph.access.sample_hops([request])
        at = at.copy()
        at[sample.counts > 0] = sample.src
        visited.append(at)
    distinct = np.unique(np.concatenate(visited))
    (rows,) = graph.access.gather([RowRequest(HOMO_NODE, distinct, ("orig_id",))])
    return distinct[np.argsort(rows["orig_id"])]


def uniform(key: int, count: int, bound: int) -> Ids:
    """Return ``count`` random integers, uniform in [0, bound): int64 [count]."""
    draws = fractions(hashed(np.arange(count, dtype=np.uint64) * GOLDEN + np.uint64(key)))
    return np.minimum(
        (draws * bound).astype(np.int64), bound - 1
    )  # with a huge bound the product may be rounded up to it
