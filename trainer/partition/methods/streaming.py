"""Method `streaming`: partitions a graph whose edges do not fit into memory.

Clusters of nodes are merged until METIS can partition the graph within the given memory. The nodes of a cluster get the
part of the cluster, and the parts are balanced and refined with all edges. The edges are read sequentially from disk, a
few dozen times.

Clusters are found by size-constrained label propagation (Meyerhenke, Sanders, Schulz, "Partitioning Complex Networks
via Size-Constrained Clustering", SEA 2014), with edges on disk as in Akhremtsev, Sanders, Schulz, "(Semi-)External
Algorithms for Graph Partitioning and Clustering", ALENEX 2015.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.progress import progress
from trainer.core.rng import GOLDEN, mix
from trainer.core.row_sort import Column, Records, Scratch, sorted_rows
from trainer.data.dataset import Dataset
from trainer.data.work_arrays import mapped_values
from trainer.partition.methods.balance import (
    SLACK,
    JoinedNodes,
    Part,
    balance_parts,
    fill_up,
    joined_adjacency,
    node_classes,
)
from trainer.partition.methods.metis import bytes_needed, weighted_parts, without_empty_parts

_FIRST_CLUSTERS = 256  #: at the first contraction, a part has room for this many clusters of the largest size

_LAST_CLUSTERS = 16  #: at the last one; with fewer clusters, METIS could not balance the parts

_GROWTH = 4  #: of the largest size of a cluster from one contraction to the next

_LEAST_SHRINKAGE = 0.9  #: a contraction that leaves more of the edges is the last one, if clusters cannot grow

_PASSES = 10

_SLOTS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class _WeightedGraph:
    """A symmetric graph without self loops, as CSR. ``neighbours`` and ``edge_weight`` may be memory-mapped."""

    indptr: Ids  #: [nodes + 1]
    neighbours: Array  #: int32|int64 [slots]; an edge has two slots, one per direction
    edge_weight: Array | None  #: int64 [slots]; None: 1
    node_weight: Array  #: int32|int64 [nodes]

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def weights(self) -> Array:
        return np.empty(0, np.int64) if self.edge_weight is None else self.edge_weight


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
        _WeightedGraph(indptr, neighbours, None, connected.astype(np.int32)), num_parts, seed, scratch
    )
    part[~connected] = -1  # nodes without edges go where there is room
    classes = node_classes(dataset, joined, num_parts, balance, SLACK)
    fill_up(part, classes, num_parts)
    balance_parts(indptr, neighbours, part, classes, num_parts)
    return without_empty_parts(part, num_parts)


def _contracted_parts(graph: _WeightedGraph, num_parts: int, seed: int, scratch: Scratch) -> Part:
    of = np.arange(graph.num_nodes, dtype=graph.neighbours.dtype)
    clusters, level, mean = _FIRST_CLUSTERS, 0, graph.node_weight.sum() / num_parts
    while True:
        cluster = _clusters_of(graph, max(1, int(mean / clusters)), seed + level)
        smaller = _contracted(graph, cluster, scratch, f"level{level}")
        of, level = cluster[of], level + 1
        shrunk = len(smaller.neighbours) < _LEAST_SHRINKAGE * len(graph.neighbours)
        graph = smaller
        if bytes_needed(len(graph.neighbours)) <= scratch.memory or (not shrunk and clusters == _LAST_CLUSTERS):
            break
        clusters = max(_LAST_CLUSTERS, clusters // _GROWTH)
    return weighted_parts(*_heaviest(graph, scratch.memory), num_parts, seed)[of]


def _heaviest(graph: _WeightedGraph, memory: int) -> tuple[Array, Array, Array, Array]:
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


def _clusters_of(graph: _WeightedGraph, limit: int, seed: int) -> Array:
    """Divide the nodes into clusters; return the number of each node's cluster, counted from 0: int32|int64 [N].

    The node weights in a cluster add up to at most ``limit``. ``seed``: random seed. Takes 24 bytes of memory per node.
    """
    cluster = np.arange(graph.num_nodes, dtype=graph.neighbours.dtype)
    alone = np.flatnonzero(np.diff(graph.indptr) == 0)
    cluster[alone] = alone[:1]  # nodes without edges weigh nothing, and are one cluster
    size = np.bincount(cluster, graph.node_weight, graph.num_nodes).astype(np.int64)
    links = np.zeros(graph.num_nodes, np.int32 if graph.edge_weight is None else np.int64)
    active = np.ones(graph.num_nodes, np.uint8)  # whether a neighbour has moved since the node was last looked at
    for number in range(_PASSES):
        progress("find clusters", number, _PASSES)
        key = np.uint64((seed * _PASSES + number + 1) % 2**64)
        moved = _propagate(graph.indptr, graph.neighbours, graph.weights, graph.node_weight, cluster, size, links,
                           active, limit, key)  # fmt: skip
        if moved * 50 <= graph.num_nodes:
            break
    used = np.zeros(graph.num_nodes, bool)
    used[cluster] = True
    return (np.cumsum(used, dtype=cluster.dtype) - 1)[cluster]


@njit()
def _propagate(
    indptr: Array, neighbours: Array, weights: Array, node_weight: Array, cluster: Array, size: Array, links: Array,
    active: Array, limit: int, key: int,
) -> int:  # fmt: skip
    moved = 0
    for node in range(len(indptr) - 1):
        if not active[node]:
            continue
        active[node] = 0
        begin, end = indptr[node], indptr[node + 1]
        for slot in range(begin, end):
            links[cluster[neighbours[slot]]] += weights[slot] if len(weights) else 1
        own, weight = cluster[node], node_weight[node]
        best, most = own, links[own]
        for slot in range(begin, end):
            other = cluster[neighbours[slot]]
            if other == best or links[other] < most or size[other] + weight > limit:
                continue
            if links[other] > most or (
                other != own and best != own and _rank(key, node, other) > _rank(key, node, best)
            ):
                best, most = other, links[other]
        for slot in range(begin, end):
            links[cluster[neighbours[slot]]] = 0
        if best != own:
            cluster[node] = best
            for slot in range(begin, end):
                active[neighbours[slot]] = 1
            size[own] -= weight
            size[best] += weight
            moved += 1
    return moved


@njit()
def _rank(key: int, node: int, cluster: int) -> int:
    return mix(mix(np.uint64(node) + np.uint64(key) * GOLDEN) ^ np.uint64(cluster))


def _contracted(graph: _WeightedGraph, cluster: Array, scratch: Scratch, name: str) -> _WeightedGraph:
    """Return a graph with one node per cluster. ``cluster``: the cluster of each node.

    The weight of an edge is the total weight of the edges between its two clusters. Neighbours and weights are
    memory-mapped files ``<name>.*`` in the folder of ``scratch``. Memory: 32 bytes per cluster, plus
    ``scratch.memory``.
    """
    count = int(cluster.max()) + 1
    node_weight = np.bincount(cluster, graph.node_weight, count).astype(np.int64)
    rows = np.zeros(count + 1, np.int64)
    _count_links(graph.indptr, graph.neighbours, cluster, rows)
    np.cumsum(rows, out=rows)
    columns = [Column(cluster.dtype)] + ([] if graph.edge_weight is None else [Column(np.dtype(np.int64))])
    part_of_memory = replace(scratch, memory=scratch.memory // 3)  # neighbours get a weight of 8 bytes after sorting
    place = np.full(count, -1, np.int64)
    paths = [scratch.folder / f"{name}.{what}" for what in ("neighbours", "weights")]
    indptr = np.zeros(count + 1, np.int64)
    with paths[0].open("wb") as neighbours, paths[1].open("wb") as weights:
        for group in sorted_rows(rows, columns, lambda: _links(graph, cluster), part_of_memory):
            to, *weight = (column() for column in group.columns)
            added = weight[0] if weight else np.ones(len(to), np.int64)
            ends = _merge(group.limits, to, added, place)
            neighbours.write(to[: int(ends[-1])].data)
            weights.write(added[: int(ends[-1])].data)
            indptr[group.first : group.first + len(ends)] = ends + indptr[group.first]
    merged, weight_of = mapped_values(paths[0], cluster.dtype), mapped_values(paths[1], np.dtype(np.int64))
    return _WeightedGraph(indptr, merged, weight_of, node_weight)


@njit()
def _count_links(indptr: Array, neighbours: Array, cluster: Array, rows: Array) -> None:
    for node in range(len(indptr) - 1):
        own = cluster[node]
        for slot in range(indptr[node], indptr[node + 1]):
            rows[own + 1] += cluster[neighbours[slot]] != own


def _links(graph: _WeightedGraph, cluster: Array) -> Iterator[Records]:
    node = 0
    while node < graph.num_nodes:
        progress("contract", node, graph.num_nodes)
        end = int(np.searchsorted(graph.indptr, graph.indptr[node] + _SLOTS_AT_ONCE, side="right")) - 1
        end = min(max(end, node + 1), graph.num_nodes)
        first, last = int(graph.indptr[node]), int(graph.indptr[end])
        own = np.repeat(cluster[node:end], np.diff(graph.indptr[node : end + 1]))
        other = cluster[graph.neighbours[first:last]]
        kept = own != other
        weights = [] if graph.edge_weight is None else [graph.edge_weight[first:last][kept]]
        yield own[kept], [other[kept], *weights]
        node = end


@njit()
def _merge(limits: Array, to: Array, weights: Array, place: Array) -> Array:
    """Merge edges to the same neighbour in each CSR row, adding up their weights. Returns the new row offsets.

    ``limits``: the row offsets. ``to`` and ``weights``: neighbour and weight of each edge, overwritten. ``place``
    [clusters]: a work array, initially -1.
    """
    ends = np.zeros(len(limits), np.int64)
    end = 0
    for row in range(len(limits) - 1):
        start = end
        for slot in range(limits[row], limits[row + 1]):
            other = to[slot]
            if start <= place[other] < end and to[place[other]] == other:
                weights[place[other]] += weights[slot]
            else:
                place[other] = end
                to[end] = other
                weights[end] = weights[slot]
                end += 1
        ends[row + 1] = end
    return ends
