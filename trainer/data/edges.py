"""Functions on edge lists, with compiled kernels: check of the ids, symmetric adjacency, both directions of edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from trainer.core.arrays import Array, id_dtype
from trainer.core.compiled import njit
from trainer.core.progress import progress
from trainer.core.row_sort import Column, Records, Scratch, sorted_rows

#: Edges [2, E], and the numbers that are added to the sources (row 0) and to the targets (row 1).
_EdgeList: TypeAlias = tuple[Array, int, int]

_EDGES_AT_ONCE = 1 << 20


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
    order in which the edge list first names them.
    """
    return joint_adjacency([(edge_index, 0, 0)], num_nodes, dtype)


def joint_adjacency(
    lists: Sequence[_EdgeList], num_nodes: int, dtype: Any = np.int32, scratch: Scratch | None = None
) -> tuple[Array, Array]:
    """Build one CSR from several edge lists, as ``symmetric_adjacency`` does from one.

    ``lists``: for each list, its edges [2, E], a number to add to the sources, and a number to add to the targets.
    ``dtype``: dtype of the neighbours. With ``scratch``, the neighbours are a memory-mapped file, and the memory needed
    is 24 bytes per node plus ``scratch.memory``.
    """
    indptr = np.zeros(num_nodes + 1, np.int64)
    for edges, source, target in lists:
        _count_both_ways(edges[0], edges[1], source, target, indptr)
    np.cumsum(indptr, out=indptr)
    seen_by = np.full(num_nodes, -1, id_dtype(num_nodes))
    if scratch is not None:
        path, size = scratch.folder / "neighbours", 0
        columns = [Column(seen_by.dtype)]
        with path.open("wb") as file:
            for group in sorted_rows(indptr.copy(), columns, lambda: _both_ways(lists, seen_by.dtype), scratch):
                slots = group.columns[0]()
                seen_by.fill(-1)
                limits = _drop_repeats(group.limits, slots, seen_by)
                file.write(slots[: int(limits[-1])].astype(dtype, copy=False).data)
                indptr[group.first : group.first + len(limits)] = limits + size
                size += int(limits[-1])
        return indptr, np.memmap(path, dtype, "r", shape=(size,)) if size else np.empty(0, dtype)
    slots = np.empty(int(indptr[-1]), seen_by.dtype)
    cursor = indptr[:-1].copy()
    for edges, source, target in lists:
        _fill_both_ways(edges[0], edges[1], source, target, cursor, slots)
    del cursor
    unique_indptr = _drop_repeats(indptr, slots, seen_by)
    return unique_indptr, slots[: int(unique_indptr[-1])].astype(dtype)


def _both_ways(lists: Sequence[_EdgeList], dtype: np.dtype[Any]) -> Iterator[Records]:
    for edges, source, target in lists:
        for start in range(0, edges.shape[1], _EDGES_AT_ONCE):
            progress("sort edges", start, edges.shape[1])
            sources, targets = edges[:, start : start + _EDGES_AT_ONCE]
            sources, targets = sources.astype(dtype) + source, targets.astype(dtype) + target
            kept = sources != targets
            sources, targets = sources[kept], targets[kept]
            yield np.stack([sources, targets], 1).reshape(-1), [np.stack([targets, sources], 1).reshape(-1)]


def undirected(edge_index: Array, num_nodes: int) -> Array:
    """Return both directions of every edge, sorted by source, then by target: int32|int64 [2, E'].

    Duplicates are left out, and each self loop is kept once.
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
def _drop_repeats(indptr: Array, slots: Array, seen_by: Array) -> Array:
    """Remove repeated neighbours from each row, in place, and return the new indptr.

    ``seen_by``: work array with an entry for every node id, filled with -1.
    """
    num_rows = len(indptr) - 1
    kept = np.zeros(num_rows + 1, np.int64)
    end = 0
    for row in range(num_rows):
        for slot in range(indptr[row], indptr[row + 1]):
            neighbour = slots[slot]
            if seen_by[neighbour] != row:
                seen_by[neighbour] = row
                slots[end] = neighbour
                end += 1
        kept[row + 1] = end
    return kept
