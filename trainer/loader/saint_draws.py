"""GraphSAINT's draws: by original ids and key alone, so that parts do not matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.rng import GOLDEN, hashed
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, edge_salt
from trainer.loader.induced import Ends
from trainer.loader.open import Graph
from trainer.sampler.types import HopRequest, RowRequest


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
    """Draws edges with replacement, by in-degree of the source plus out-degree of the target."""

    ends: Ends
    running: Ids  #: int64 [E] weights of all edges up to this one

    @classmethod
    def of(cls, ends: Ends, num_nodes: int) -> EdgeDraw:
        in_degree, out_degree = (np.bincount(side, minlength=num_nodes) for side in (ends.dst, ends.src))
        weights = in_degree[ends.src] + out_degree[ends.dst]
        return cls(ends, np.cumsum(weights if weights.any() else np.ones_like(weights)))

    def __call__(self, key: int, count: int) -> Ids:
        """The distinct ends of ``count`` draws, ascending original ids."""
        edges = self.edges(key, count)
        return np.unique(np.concatenate([self.ends.src[edges], self.ends.dst[edges]])).astype(np.int64)

    def edges(self, key: int, count: int) -> Ids:
        """Original ids of the edges drawn: int64 [count]."""
        return np.searchsorted(self.running, uniform(key, count, int(self.running[-1])), "right")


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
    """Numbers in [0, bound): int64 [count]."""
    return np.minimum((fractions(key, count) * bound).astype(np.int64), bound - 1)  # rounded up, where bound is huge


def fractions(key: int, count: int) -> npt.NDArray[np.float64]:
    """``rng.fraction`` of the first draws under a key: float64 [count] in [0, 1)."""
    numbers: Array = hashed(np.arange(count, dtype=np.uint64) * GOLDEN + np.uint64(key))
    found: npt.NDArray[np.float64] = (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
