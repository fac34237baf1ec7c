"""GraphSAINT's draws: by original ids and key alone, so that parts do not matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.load.induced import Ends
from trainer.load.open import Graph
from trainer.rng import GOLDEN, fraction, hashed, mix
from trainer.sample.types import HopRequest, RowRequest
from trainer.schema import HOMO_EDGE, HOMO_NODE, edge_salt

#: Draws per wanted edge before the rest are found by looking at all edges.
_PATIENCE = 8
_LEAST_WEIGHT = 1e-10  #: as in torch_geometric: what edges of weight 0 have when there are no others


@dataclass(frozen=True)
class NodeDraw:
    """Draws nodes by out-degree, with replacement."""

    running: Ids  #: int64 [N] out-edges of all nodes up to this one

    @classmethod
    def of(cls, ends: Ends, num_nodes: int) -> NodeDraw:
        return cls(np.cumsum(np.bincount(ends.src, minlength=num_nodes)))

    def __call__(self, key: int, count: int) -> Ids:
        """The distinct nodes among ``count`` draws, ascending original ids."""
        return np.unique(np.searchsorted(self.running, uniform(key, count, int(self.running[-1])), "right"))


@dataclass(frozen=True)
class EdgeDraw:
    """Draws edges without replacement, an edge's chance going with its weight."""

    ends: Ends
    running: Ids  #: int64 [E] weights of all edges up to this one

    @classmethod
    def of(cls, ends: Ends, num_nodes: int) -> EdgeDraw:
        in_degree, out_degree = (np.bincount(side, minlength=num_nodes) for side in (ends.dst, ends.src))
        return cls(ends, np.cumsum(in_degree[ends.src] + out_degree[ends.dst]))

    def __call__(self, key: int, count: int) -> Ids:
        """The ends of ``count`` distinct edges: distinct nodes, ascending original ids."""
        edges = self.edges(key, count)
        return np.unique(np.concatenate([self.ends.src[edges], self.ends.dst[edges]])).astype(np.int64)

    def edges(self, key: int, count: int) -> Ids:
        """Original ids of ``count`` distinct edges, int64, in drawn order.

        Draws with replacement whose repeats are passed over choose as draws without replacement do; when too
        many are repeats, the rest is chosen among the edges left by an exponential race.
        """
        edges, taken = np.empty(count, np.int64), np.zeros(len(self.running) // 8 + 1, np.uint8)
        found = _draw_distinct(self.running, np.uint64(key), taken, edges)
        if found < count:
            edges[found:] = self._race(int(hashed(np.uint64(key))), count - found, edges[:found])
        return edges

    def _race(self, key: int, count: int, taken: Ids) -> Ids:
        weights = np.diff(self.running, prepend=0) + _LEAST_WEIGHT
        times = -np.log1p(-fractions(key, len(weights))) / weights
        times[taken] = np.inf
        return np.argsort(times, kind="stable")[:count]


def visited_by_walks(graph: Graph, key: int, num_walks: int, walk_length: int) -> Ids:
    """Global ids of all nodes on the walks, start included: int64, distinct, by original id.

    Raises ``ServiceError``. A step goes from a node to the source of one of its in-edges; it is one request to
    each owner.
    """
    num_nodes = graph.manifest.nodes[HOMO_NODE].num_nodes
    at = graph.store.to_global(HOMO_NODE, uniform(key, num_walks, num_nodes))
    visited = [at]
    for step in range(walk_length):
        places = np.arange(step * num_walks, (step + 1) * num_walks)  # each step of each walk draws anew
        request = HopRequest(HOMO_EDGE, at, 1, 0, key ^ edge_salt(HOMO_EDGE), trees=places)
        (sample,) = graph.access.sample_hops([request])
        at = at.copy()
        at[sample.counts > 0] = sample.src
        visited.append(at)
    distinct = np.unique(np.concatenate(visited))
    (rows,) = graph.access.gather([RowRequest(HOMO_NODE, distinct, ("orig_id",))])
    return distinct[np.argsort(rows["orig_id"])]


def uniform(key: int, count: int, bound: int) -> Ids:
    """Numbers in [0, bound), bound below 2^53: int64 [count]."""
    return (fractions(key, count) * bound).astype(np.int64)


def fractions(key: int, count: int) -> npt.NDArray[np.float64]:
    """``rng.fraction`` of the first draws under a key: float64 [count] in [0, 1)."""
    numbers: Array = hashed(np.arange(count, dtype=np.uint64) * GOLDEN + np.uint64(key))
    found: npt.NDArray[np.float64] = (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


@numba.njit(nogil=True, cache=True)
def _draw_distinct(running: Any, key: Any, taken: Any, edges: Any) -> int:
    """Fill ``edges`` with distinct draws as far as patience goes; ``taken`` has a bit per edge. Returns how many."""
    total, found = running[len(running) - 1], 0
    if total == 0:
        return 0
    for i in range(_PATIENCE * len(edges)):
        wanted = min(np.int64(fraction(mix(key + np.uint64(i) * GOLDEN)) * total), total - 1)
        low, high = 0, len(running) - 1
        while low < high:
            middle = (low + high) >> 1
            if running[middle] <= wanted:
                low = middle + 1
            else:
                high = middle
        if (taken[low >> 3] >> (low & 7)) & 1:
            continue
        taken[low >> 3] |= np.uint8(1 << (low & 7))
        edges[found] = low
        found += 1
        if found == len(edges):
            break
    return found
