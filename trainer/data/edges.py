"""Compiled kernels for edge lists: range check, symmetric adjacency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.compiled import njit


@njit()
def first_outside(ids: Array, num_nodes: int) -> int:
    """Return the position of the first id outside ``0 <= id < num_nodes``, or -1."""
    for position in range(len(ids)):
        if ids[position] < 0 or ids[position] >= num_nodes:
            return position
    return -1


def symmetric_adjacency(edge_index: Array, num_nodes: int, dtype: Any = np.int32) -> tuple[Array, Array]:
    """Build the CSR of the graph with every edge in both directions, without self loops and duplicates.

    Returns ``indptr`` int64 [num_nodes + 1] and ``neighbours`` ``dtype`` [nnz]. The neighbours of a node are in the
    order of the edge list.
    """
    return joint_adjacency([(edge_index, 0, 0)], num_nodes, dtype)


def joint_adjacency(
    lists: Sequence[tuple[Array, int, int]], num_nodes: int, dtype: Any = np.int32
) -> tuple[Array, Array]:
    """Build the CSR of ``symmetric_adjacency`` for several edge lists together.

    Each list is (edges [2, E], source offset, target offset). The offsets are added to the sources (row 0) and targets
    (row 1).
    """
    indptr = np.zeros(num_nodes + 1, np.int64)
    for edges, source, target in lists:
        _count_both_ways(edges[0], edges[1], source, target, indptr)
    np.cumsum(indptr, out=indptr)
    slots = np.empty(int(indptr[-1]), np.int32 if num_nodes < 2**31 else np.int64)
    cursor = indptr[:-1].copy()
    for edges, source, target in lists:
        _fill_both_ways(edges[0], edges[1], source, target, cursor, slots)
    del cursor
    unique_indptr = _drop_repeats(indptr, slots)
    return unique_indptr, slots[: int(unique_indptr[-1])].astype(dtype)


def undirected(edge_index: Array, num_nodes: int) -> Array:
    """Return both directions of every edge, without duplicates, sorted by source then target: int32|int64 [2, E'].

    Each self loop is kept once.
    """
    loops = np.unique(edge_index[0][edge_index[0] == edge_index[1]])
    indptr, neighbours = symmetric_adjacency(edge_index, num_nodes, edge_index.dtype)
    sources = np.repeat(np.arange(num_nodes, dtype=edge_index.dtype), np.diff(indptr))
    both = np.empty((2, len(sources) + len(loops)), edge_index.dtype)
    both[:, : len(sources)] = sources, neighbours
    both[:, len(sources) :] = loops
    del sources, neighbours
    order = np.lexsort((both[1], both[0]))
    return both[:, order]


@njit()
def _count_both_ways(sources: Array, targets: Array, first_source: int, first_target: int, indptr: Array) -> None:
    for edge in range(len(sources)):
        source, target = sources[edge] + first_source, targets[edge] + first_target
        if source != target:
            indptr[source + 1] += 1
            indptr[target + 1] += 1


@njit()
def _fill_both_ways(
    sources: Array, targets: Array, first_source: int, first_target: int, cursor: Array, slots: Array
) -> None:  # fmt: skip
    for edge in range(len(sources)):
        source, target = sources[edge] + first_source, targets[edge] + first_target
        if source != target:
            slots[cursor[source]] = target
            cursor[source] += 1
            slots[cursor[target]] = source
            cursor[target] += 1


@njit()
def _drop_repeats(indptr: Array, slots: Array) -> Array:
    """Remove repeated neighbours from each row, in place, and return the new indptr."""
    num_nodes = len(indptr) - 1
    kept = np.zeros(num_nodes + 1, np.int64)
    seen_by = np.full(num_nodes, -1, np.int64)
    end = 0
    for node in range(num_nodes):
        for slot in range(indptr[node], indptr[node + 1]):
            neighbour = slots[slot]
            if seen_by[neighbour] != node:
                seen_by[neighbour] = node
                slots[end] = neighbour
                end += 1
        kept[node + 1] = end
    return kept
