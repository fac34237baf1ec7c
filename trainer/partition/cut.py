"""Divides the edges of a type among the parts, and sorts them by target node (CSC)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids, id_dtype
from trainer.core.compiled import njit
from trainer.core.progress import progress
from trainer.core.row_sort import Column, Records, Scratch, SortedRows, sorted_rows

_EDGES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Relabelling:
    """The global ids of one node type. Those of a part are consecutive, in ascending order of original ids."""

    offsets: Ids  #: [num_parts + 1]; part p owns offsets[p] <= gid < offsets[p + 1]
    orig_id: Array  #: int32|int64 [N], original id of each global id
    global_id: Array  #: int32|int64 [N], global id of each original id

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def owned(self, part_id: int) -> Array:
        return self.orig_id[self.offsets[part_id] : self.offsets[part_id + 1]]


def relabel(part: npt.NDArray[np.int32], num_parts: int) -> Relabelling:
    """Assign global ids to the nodes of a type. ``part`` [N] is the part of each node, by original id."""
    offsets = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part, minlength=num_parts), out=offsets[1:])
    orig_id = np.empty(len(part), id_dtype(len(part)))
    global_id = np.empty_like(orig_id)
    _number(part, offsets[:-1].copy(), orig_id, global_id)
    return Relabelling(offsets, orig_id, global_id)


@njit()
def _number(part: Array, cursor: Array, orig_id: Array, global_id: Array) -> None:
    for node in range(len(part)):
        gid = cursor[part[node]]
        cursor[part[node]] += 1
        orig_id[gid] = node
        global_id[node] = gid


Span = tuple[int, int, int]  #: part p, begin, end: the records begin <= r < end belong to p


@dataclass(frozen=True)
class EdgeCut:
    """The edges of one type, divided among the parts. An edge belongs to the part of its target."""

    edge_index: Array  #: [2, E], original ids
    source: Relabelling  #: global ids of the source type
    target: Relabelling  #: global ids of the target type
    indptr: Ids  #: [N of the target type + 1], row offsets over all parts, in order of global ids

    @classmethod
    def of(cls, edge_index: Array, source: Relabelling, target: Relabelling) -> EdgeCut:
        return cls(edge_index, source, target, _row_limits(edge_index[1], target.global_id))

    @property
    def offsets(self) -> Ids:
        """Global edge ids of the parts, int64 [num_parts + 1]: part p owns offsets[p] <= id < offsets[p + 1]."""
        return self.indptr[self.target.offsets]

    @property
    def index_dtype(self) -> np.dtype[Any]:
        return np.dtype(id_dtype(len(self.source.orig_id)))

    @property
    def edge_dtype(self) -> np.dtype[Any]:
        return np.dtype(id_dtype(self.edge_index.shape[1]))

    def sorted_edges(self, attrs: Sequence[Array] = (), scratch: Scratch | None = None) -> Iterator[SortedRows]:
        """Yield all edges in groups of consecutive targets, sorted by global id of the target, then original edge id.

        The columns are: global ids of the sources, original edge ids, and each of ``attrs`` [E, …].
        """
        columns = [Column(self.index_dtype), Column(self.edge_dtype), *map(Column.of, attrs)]
        return sorted_rows(self.indptr, columns, lambda: self._records(attrs), scratch)

    def _records(self, attrs: Sequence[Array]) -> Iterator[Records]:
        for start in range(0, self.edge_index.shape[1], _EDGES_AT_ONCE):
            progress("read edges", start, self.edge_index.shape[1])
            sources, targets = self.edge_index[:, start : start + _EDGES_AT_ONCE]
            orig_id = np.arange(start, start + len(sources), dtype=self.edge_dtype)
            values = [each[start : start + len(sources)] for each in attrs]
            yield self.target.global_id[targets], [self.source.global_id[sources], orig_id, *values]

    def part_indptr(self, part_id: int) -> Ids:
        """Return the CSC row offsets of a part, int64 [nodes of the part + 1], first 0."""
        low, high = self.target.offsets[part_id], self.target.offsets[part_id + 1]
        return self.indptr[low : high + 1] - self.indptr[low]

    def part_spans(self, group: SortedRows) -> Iterator[Span]:
        """Yield (part, begin, end) for each part that owns edges of ``group``.

        The part owns the edges at positions begin to end - 1 of the group.
        """
        start = int(self.indptr[group.first])
        limits = np.clip(self.offsets - start, 0, int(group.limits[-1])).tolist()
        for part_id, (begin, end) in enumerate(zip(limits, limits[1:], strict=False)):
            if end > begin:
                yield part_id, begin, end


@njit()
def _row_limits(targets: Array, global_id: Array) -> Array:
    """Return the CSC row offsets over all parts, int64 [N + 1], a row per target node in order of global id.

    ``global_id`` [N] is the global id of each original id of the target type.
    """
    indptr = np.zeros(len(global_id) + 1, np.int64)
    for target in targets:
        indptr[global_id[target] + 1] += 1
    for row in range(len(global_id)):
        indptr[row + 1] += indptr[row]
    return indptr
