"""Method `streaming`: partitions a graph whose edges do not fit into memory.

Clusters of nodes are merged until METIS can partition the graph within the given memory. The nodes of a cluster get the
part of the cluster, and the parts are balanced and refined with all edges. The edges are read sequentially from disk, a
few dozen times.
"""

from __future__ import annotations

import numpy as np

from trainer.core.arrays import Array
from trainer.core.row_sort import Scratch
from trainer.data.dataset import Dataset
from trainer.partition.methods.balance import (
    SLACK,
    JoinedNodes,
    Part,
    balance_parts,
    fill_up,
    joined_adjacency,
    node_classes,
)
from trainer.partition.methods.clustering import WeightedGraph, clusters_of, contracted
from trainer.partition.methods.metis import bytes_needed, weighted_parts, without_empty_parts

_FIRST_CLUSTERS = 256  #: at the first contraction, a part has room for this many clusters of the largest size

_LAST_CLUSTERS = 16  #: at the last one; with fewer clusters, METIS could not balance the parts

_GROWTH = 4  #: of the largest size of a cluster from one contraction to the next

_LEAST_SHRINKAGE = 0.9  #: a contraction that leaves more of the edges is the last one, if clusters cannot grow


def streaming_assignment(
    dataset: Dataset, joined: JoinedNodes, num_parts: int, seed: int, balance: str, scratch: Scratch
) -> Part:
    """Assign nodes to parts, and return the part of each node, int32 [total].

    ``joined``: numbers the nodes of all types consecutively. ``balance``: how nodes are divided into classes, by node
    type (``types``), into train seeds and others (``seeds``), or by both (``types+seeds``). All parts get about the
    same number of nodes of each class. Memory: about 60 bytes per node, and ``scratch.memory``. Disk space in
    ``scratch.folder``: up to 24 bytes per edge while the edges are sorted, then 8 bytes per edge.
    """
    indptr, neighbours = joined_adjacency(dataset, joined, scratch)
    connected = np.diff(indptr) > 0
    part = _contracted_parts(
        WeightedGraph(indptr, neighbours, None, connected.astype(np.int32)), num_parts, seed, scratch
    )
    part[~connected] = -1  # nodes without edges go where there is room
    classes = node_classes(dataset, joined, num_parts, balance, SLACK)
    fill_up(part, classes, num_parts)
    balance_parts(indptr, neighbours, part, classes, num_parts)
    return without_empty_parts(part, num_parts)


def _contracted_parts(graph: WeightedGraph, num_parts: int, seed: int, scratch: Scratch) -> Part:
    of = np.arange(graph.num_nodes, dtype=graph.neighbours.dtype)
    clusters, level, mean = _FIRST_CLUSTERS, 0, graph.node_weight.sum() / num_parts
    while True:
        cluster = clusters_of(graph, max(1, int(mean / clusters)), seed + level)
        smaller = contracted(graph, cluster, scratch, f"level{level}")
        of, level = cluster[of], level + 1
        shrunk = len(smaller.neighbours) < _LEAST_SHRINKAGE * len(graph.neighbours)
        graph = smaller
        if bytes_needed(len(graph.neighbours)) <= scratch.memory or (not shrunk and clusters == _LAST_CLUSTERS):
            break
        clusters = max(_LAST_CLUSTERS, clusters // _GROWTH)
    return weighted_parts(*_heaviest(graph, scratch.memory), num_parts, seed)[of]


def _heaviest(graph: WeightedGraph, memory: int) -> tuple[Array, Array, Array, Array]:
    """Return indptr, neighbours, edge weights and node weights of a graph for METIS.

    The edges with the smallest weights are left out if METIS would need more than ``memory`` bytes for all edges.
    """
    weights = graph.weights
    if bytes_needed(len(weights)) <= memory:
        return graph.indptr, np.asarray(graph.neighbours), np.asarray(weights), graph.node_weight
    most = max(1, memory // bytes_needed(1))
    least = int(np.partition(weights, len(weights) - most)[len(weights) - most])
    kept = weights > least if (weights > least).any() else weights >= least
    counts = np.add.reduceat(np.append(kept, False).astype(np.int64), graph.indptr[:-1])
    counts[np.diff(graph.indptr) == 0] = 0
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return indptr, graph.neighbours[kept], weights[kept], graph.node_weight
