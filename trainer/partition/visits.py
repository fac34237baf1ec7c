"""How likely sampling from some seeds is to visit each node.

The vertex-inclusion probabilities of SALIENT++ (Kaler et al., "Communication-Efficient Graph Neural
Networks with Probabilistic Neighborhood Expansion Analysis and Caching", MLSys 2023), per node type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from trainer.arrays import Array, Ids
from trainer.data.dataset import Dataset
from trainer.partition.methods import Fanouts
from trainer.schema import EdgeType, NodeType


@dataclass(frozen=True)
class InEdges:
    """The sources of each node's in-edges (CSC), per edge type."""

    num_nodes: Mapping[NodeType, int]
    edges: Mapping[EdgeType, tuple[Array, Array]]  #: indptr int64 [targets + 1], sources int32|int64 [E]

    @classmethod
    def of(cls, dataset: Dataset) -> InEdges:
        """Memory: an id per edge and 8 bytes per target of each edge type."""
        counts = {of: nodes.num_nodes for of, nodes in dataset.nodes.items()}
        edges = {of: _in_edges(edges.edge_index, counts[of[2]]) for of, edges in dataset.edges.items()}
        return cls(counts, edges)


def visit_probabilities(
    graph: Dataset | InEdges, seeds: Mapping[NodeType, Ids], fanouts: Fanouts, chance: float = 1.0
) -> dict[NodeType, npt.NDArray[np.float32]]:
    """The chance of each node to be in a batch, type -> float32 [num_nodes], when each seed is with ``chance``.

    A target newly visited with probability p asks min(1, fanout / in-degree) of its in-edges; visits are
    taken as independent, so 1 - prod(1 - p min(1, fanout / in-degree)) over out-edges is a node's chance to
    be visited in a hop. Exact on trees; hubs that cycles lead back to come out somewhat too likely. Edge
    types without fanouts are not followed.
    """
    graph = InEdges.of(graph) if isinstance(graph, Dataset) else graph
    hops = dict(fanouts) if isinstance(fanouts, Mapping) else dict.fromkeys(graph.edges, fanouts)
    visited = {of: np.zeros(count, np.float32) for of, count in graph.num_nodes.items()}
    for of, ids in seeds.items():
        visited[of][ids] = chance
    fresh = {of: values.copy() for of, values in visited.items()}
    for hop in range(max(map(len, hops.values()), default=0)):
        missed = {of: np.ones(count) for of, count in graph.num_nodes.items()}
        for edge_type, (indptr, sources) in graph.edges.items():
            if hop < len(hops.get(edge_type, ())):
                loops = edge_type[0] == edge_type[2]
                _spread(indptr, sources, fresh[edge_type[2]], hops[edge_type][hop], loops, missed[edge_type[0]])
        for of, values in visited.items():
            _arrive(missed[of], values, fresh[of])
    return visited


def _in_edges(edge_index: Array, num_targets: int) -> tuple[Array, Array]:
    sources, targets = edge_index
    indptr = np.zeros(num_targets + 1, np.int64)
    np.cumsum(np.bincount(targets, minlength=num_targets), out=indptr[1:])
    by_target = np.empty_like(sources)
    _fill(sources, targets, indptr[:-1].copy(), by_target)
    return indptr, by_target


@njit(nogil=True, cache=True)
def _fill(sources: Array, targets: Array, cursor: Array, by_target: Array) -> None:
    for edge in range(len(sources)):
        by_target[cursor[targets[edge]]] = sources[edge]
        cursor[targets[edge]] += 1


@njit(nogil=True, cache=True)
def _spread(indptr: Array, sources: Array, fresh: Array, fanout: int, loops: bool, missed: Array) -> None:
    """Multiply into ``missed`` the chance that none of a source's targets asks for it.

    With ``loops`` sources and targets are the same nodes: what asks for itself has been visited already.
    """
    for target in range(len(fresh)):
        degree = indptr[target + 1] - indptr[target]
        if fresh[target] > 0 and degree > 0:
            share = 1.0 if fanout < 0 else min(1.0, fanout / degree)
            factor = 1.0 - fresh[target] * share
            for slot in range(indptr[target], indptr[target + 1]):
                if not loops or sources[slot] != target:
                    missed[sources[slot]] *= factor


@njit(nogil=True, cache=True)
def _arrive(missed: Array, visited: Array, fresh: Array) -> None:
    for node in range(len(visited)):
        fresh[node] = (1.0 - visited[node]) * (1.0 - missed[node])
        visited[node] += fresh[node]
