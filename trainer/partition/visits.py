"""How likely sampling from some seeds is to visit each node.

The vertex-inclusion probabilities of SALIENT++ (Kaler et al., "Communication-Efficient Graph Neural
Networks with Probabilistic Neighborhood Expansion Analysis and Caching", MLSys 2023), per node type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids, read_only
from trainer.core.compiled import njit
from trainer.core.schema import EdgeType, NodeType
from trainer.data.dataset import Dataset
from trainer.partition.methods import Fanouts

Chances = dict[NodeType, npt.NDArray[np.float32]]  #: type -> [num_nodes]

_ALL = np.inf  #: fanout -1


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
) -> Chances:
    """The chance of each node to be in a batch, type -> float32 [num_nodes], when each seed is with ``chance``.

    A target newly visited draws min(1, fanout / in-degree) of its in-edges; visits are taken as independent, so a
    node's chance to be visited in a hop is 1 - prod(1 - p min(1, fanout / in-degree)) over its out-edges. Exact on
    trees; nodes that cycles lead back to come out somewhat too likely. Edge types without fanouts are not followed;
    weights and times are not looked at. Memory: 16 bytes per node, and 8 per target of each edge type.
    """
    graph = InEdges.of(graph) if isinstance(graph, Dataset) else graph
    hops = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(graph.edges, tuple(fanouts))
    visited = {of: np.zeros(count, np.float32) for of, count in graph.num_nodes.items()}
    for node_type, ids in seeds.items():
        visited[node_type][ids] = chance
    fresh = {of: values.copy() for of, values in visited.items()}
    drawn = {of: np.zeros(len(indptr) - 1, np.float32) for of, (indptr, _) in graph.edges.items()}
    for hop in range(max((len(values) for values in hops.values()), default=0)):
        followed = {of: values[hop] for of, values in hops.items() if of in graph.edges and hop < len(values)}
        log_missed = {of: np.zeros(len(visited[of])) for of in {edge_type[0] for edge_type in followed}}
        for of, fanout in followed.items():
            indptr, sources = graph.edges[of]
            _draw(
                read_only(indptr), read_only(sources), read_only(fresh[of[2]]), float(fanout) if fanout >= 0 else _ALL,
                of[0] == of[2], drawn[of], log_missed[of[0]],
            )  # fmt: skip
        for node_type, values in visited.items():
            if node_type in log_missed:
                _arrive(log_missed[node_type], values, fresh[node_type])
            else:
                fresh[node_type][:] = 0
    return visited


def _in_edges(edge_index: Array, num_targets: int) -> tuple[Array, Array]:
    sources, targets = edge_index
    indptr = np.zeros(num_targets + 1, np.int64)
    np.cumsum(np.bincount(targets, minlength=num_targets), out=indptr[1:])
    by_target = np.empty_like(sources)
    _fill(sources, targets, indptr[:-1].copy(), by_target)
    return indptr, by_target


@njit()
def _fill(sources: Array, targets: Array, cursor: Array, by_target: Array) -> None:
    for edge in range(len(sources)):
        by_target[cursor[targets[edge]]] = sources[edge]
        cursor[targets[edge]] += 1


@njit()
def _draw(
    indptr: Array, sources: Array, fresh: Array, fanout: float, same_type: bool, drawn: Array, log_missed: Array
) -> None:
    """Add to ``drawn``, float32 [rows], the chance of each of a row's in-edges to be drawn in this hop.

    Adds to ``log_missed`` of their sources the logarithm of the chance that the row draws none of them in this hop
    either. A node that draws itself (where sources are of the targets' type) has been visited already.
    """
    for row in range(len(drawn)):
        degree = indptr[row + 1] - indptr[row]
        before = drawn[row]
        if fresh[row] > 0 and fanout > 0 and degree > 0:
            drawn[row] += fresh[row] * min(1.0, fanout / degree)
        if drawn[row] > before and before < 1:
            factor = -np.inf
            if drawn[row] < 1:
                factor = np.log1p(-np.float64(drawn[row])) - np.log1p(-np.float64(before))
            for slot in range(indptr[row], indptr[row + 1]):
                if not same_type or sources[slot] != row:
                    log_missed[sources[slot]] += factor


@njit()
def _arrive(log_missed: Array, visited: Array, fresh: Array) -> None:
    for node in range(len(visited)):
        fresh[node] = (1.0 - visited[node]) * -np.expm1(log_missed[node])
        visited[node] += fresh[node]
