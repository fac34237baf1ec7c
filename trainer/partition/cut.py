"""Sorts the edges of a type into rows by target node (CSC), part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit


@dataclass(frozen=True)
class Relabelling:
    """The global ids of one node type: consecutive within a part, in order of original ids."""

    offsets: Ids  #: [num_parts + 1]; part p owns offsets[p] <= gid < offsets[p + 1]
    orig_id: Array  #: int32|int64 [N], original id of each global id
    global_id: Array  #: int32|int64 [N], global id of each original id

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def owned(self, part_id: int) -> Array:
        """Return the original ids of a part's nodes, ascending."""
        return self.orig_id[self.offsets[part_id] : self.offsets[part_id + 1]]


def relabel(part: npt.NDArray[np.int32], num_parts: int) -> Relabelling:
    """Assign global ids to nodes, part by part. ``part`` [N] is the part of each original id."""
    offsets = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part, minlength=num_parts), out=offsets[1:])
    orig_id = np.empty(len(part), id_dtype(len(part)))
    global_id = np.empty_like(orig_id)
    _number(part, offsets[:-1].copy(), orig_id, global_id)
    return Relabelling(offsets, orig_id, global_id)


def id_dtype(count: int) -> type[np.signedinteger[Any]]:
    """Return int32 if it can hold ``count`` ids, else int64."""
    return np.int32 if count <= 2**31 - 1 else np.int64


@njit()
def _number(part: Array, cursor: Array, orig_id: Array, global_id: Array) -> None:
    for node in range(len(part)):
        gid = cursor[part[node]]
        cursor[part[node]] += 1
        orig_id[gid] = node
        global_id[node] = gid


EDGE_BYTES_AT_ONCE = (
    256 << 20
)  #: bytes of the edges that are sorted at a time; the edge list is read once for each such group


@dataclass(frozen=True)
class EdgeRows:
    """The in-edges of one part's nodes (CSC), in original edge order within a row."""

    part_id: int
    indptr: Ids  #: [n + 1], n = nodes of the part
    indices: Array  #: int32|int64 [e], global ids of sources
    orig_id: Array  #: int32|int64 [e], original edge ids


@dataclass(frozen=True)
class EdgeCut:
    """Cuts the edges of one type into parts. An edge belongs to the part of its target."""

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

    def groups(self) -> Iterator[list[EdgeRows]]:
        """Yield the edges of all parts in order, several parts at a time.

        The edges yielded together have at most ``EDGE_BYTES_AT_ONCE`` bytes. A larger part is yielded alone.
        """
        edge_bytes = np.dtype(id_dtype(len(self.source.orig_id))).itemsize
        edge_bytes += np.dtype(id_dtype(self.edge_index.shape[1])).itemsize
        for parts in edge_groups(self.offsets, edge_bytes, EDGE_BYTES_AT_ONCE):
            yield self._rows(parts)

    def _rows(self, parts: range) -> list[EdgeRows]:
        low, high = (int(self.target.offsets[part_id]) for part_id in (parts.start, parts.stop))
        limits = self.indptr[low : high + 1] - self.indptr[low]
        indices = np.empty(int(limits[-1]), id_dtype(len(self.source.orig_id)))
        orig_id = np.empty(int(limits[-1]), id_dtype(self.edge_index.shape[1]))
        sources, targets = self.edge_index
        source_gid, target_gid = self.source.global_id, self.target.global_id
        _cut_rows(sources, targets, source_gid, target_gid, low, high, limits[:-1].copy(), indices, orig_id)
        rows = []
        for part_id in parts:
            own = limits[self.target.offsets[part_id] - low : self.target.offsets[part_id + 1] - low + 1]
            rows.append(EdgeRows(part_id, own - own[0], indices[own[0] : own[-1]], orig_id[own[0] : own[-1]]))
        return rows


def edge_groups(edge_offsets: Ids, edge_bytes: int, limit: int) -> Iterator[range]:
    """Yield ranges of parts whose edges have at most ``limit`` bytes in total. A larger part is a range of its own."""
    start, num_parts = 0, len(edge_offsets) - 1
    while start < num_parts:
        end = start + 1
        while end < num_parts and (edge_offsets[end + 1] - edge_offsets[start]) * edge_bytes <= limit:
            end += 1
        yield range(start, end)
        start = end


@njit()
def _row_limits(targets: Array, global_id: Array) -> Array:
    """Return the CSC row offsets over all parts, int64 [N + 1], with one row per target node in order of global id.

    ``global_id`` [N] is the global id of each original id of the target type.
    """
    indptr = np.zeros(len(global_id) + 1, np.int64)
    for target in targets:
        indptr[global_id[target] + 1] += 1
    for row in range(len(global_id)):
        indptr[row + 1] += indptr[row]
    return indptr


@njit()
def _cut_rows(
    sources: Array, targets: Array, source_gid: Array, target_gid: Array, low: int, high: int, cursor: Array,
    indices: Array, orig_id: Array,
) -> None:  # fmt: skip
    """Fill the rows of the targets with ``low <= global id < high``. Edges within a row are in original order.

    ``cursor``: the next free slot of each row.
    """
    for edge in range(len(sources)):
        row = target_gid[targets[edge]]
        if low <= row < high:
            slot = cursor[row - low]
            cursor[row - low] += 1
            indices[slot] = source_gid[sources[edge]]
            orig_id[slot] = edge
