"""All nodes of all types in one row, so that one graph can be cut: type after type, original ids ascending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from trainer.arrays import Array
from trainer.data.dataset import Dataset
from trainer.schema import NodeType

Part = npt.NDArray[np.int32]


@dataclass(frozen=True)
class JoinedNodes:
    """Where the nodes of each type begin in the row."""

    starts: Mapping[NodeType, int]
    total: int

    @classmethod
    def of(cls, dataset: Dataset) -> JoinedNodes:
        starts, total = {}, 0
        for node_type, nodes in dataset.nodes.items():
            starts[node_type] = total
            total += nodes.num_nodes
        return cls(starts, total)

    def split(self, values: Array) -> dict[NodeType, Array]:
        """Views of an array over all nodes, type by type."""
        ends = [*list(self.starts.values())[1:], self.total]
        return {of: values[start:end] for (of, start), end in zip(self.starts.items(), ends, strict=True)}


def joined_adjacency(dataset: Dataset, joined: JoinedNodes) -> tuple[Array, Array]:
    """CSR over all nodes: every edge of every type in both directions, without self loops and duplicates.

    Returns ``indptr`` int64 [total + 1] and ``neighbours`` int32|int64 [nnz].
    """
    indptr = np.zeros(joined.total + 1, np.int64)
    lists = [
        (edges.edge_index[0], edges.edge_index[1], joined.starts[of[0]], joined.starts[of[2]])
        for of, edges in dataset.edges.items()
    ]
    for sources, targets, source_start, target_start in lists:
        _count(sources, targets, source_start, target_start, indptr)
    np.cumsum(indptr, out=indptr)
    slots = np.empty(int(indptr[-1]), np.int32 if joined.total < 2**31 else np.int64)
    cursor = indptr[:-1].copy()
    for sources, targets, source_start, target_start in lists:
        _fill(sources, targets, source_start, target_start, cursor, slots)
    unique = _drop_repeats(indptr, slots)
    return unique, slots[: int(unique[-1])]


@njit(nogil=True, cache=True)
def _count(sources: Array, targets: Array, source_start: int, target_start: int, indptr: Array) -> None:
    for edge in range(len(sources)):
        source, target = sources[edge] + source_start, targets[edge] + target_start
        if source != target:
            indptr[source + 1] += 1
            indptr[target + 1] += 1


@njit(nogil=True, cache=True)
def _fill(
    sources: Array, targets: Array, source_start: int, target_start: int, cursor: Array, slots: Array
) -> None:  # fmt: skip
    for edge in range(len(sources)):
        source, target = sources[edge] + source_start, targets[edge] + target_start
        if source != target:
            slots[cursor[source]] = target
            cursor[source] += 1
            slots[cursor[target]] = source
            cursor[target] += 1


@njit(nogil=True, cache=True)
def _drop_repeats(indptr: Array, slots: Array) -> Array:
    """Keep the first of equal neighbours in each row, closing the gaps in place; the new indptr."""
    kept = np.zeros(len(indptr), np.int64)
    seen_by = np.zeros(len(indptr) - 1, np.int64)
    end = 0
    for node in range(len(indptr) - 1):
        for slot in range(indptr[node], indptr[node + 1]):
            neighbour = slots[slot]
            if seen_by[neighbour] != node + 1:
                seen_by[neighbour] = node + 1
                slots[end] = neighbour
                end += 1
        kept[node + 1] = end
    return kept
