"""Sorts the edges of a type into the rows of their targets, part by part."""

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
    """Global ids of one node type: part by part, ascending original id inside a part."""

    offsets: Ids  #: [num_parts + 1]
    orig_id: Array  #: int32|int64 [N]: original id of each global id
    global_id: Array  #: int32|int64 [N]: global id of each original id

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def owned(self, part_id: int) -> Array:
        """Original ids of a part's nodes, ascending."""
        return self.orig_id[self.offsets[part_id] : self.offsets[part_id + 1]]


def relabel(part: npt.NDArray[np.int32], num_parts: int) -> Relabelling:
    """Number the nodes part by part; ``part`` [N] is the part of each original id."""
    offsets = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part, minlength=num_parts), out=offsets[1:])
    orig_id = np.empty(len(part), id_dtype(len(part)))
    global_id = np.empty_like(orig_id)
    _number(part, offsets[:-1].copy(), orig_id, global_id)
    return Relabelling(offsets, orig_id, global_id)


def id_dtype(count: int) -> type[np.signedinteger[Any]]:
    """The smallest id type for ``count`` things."""
    return np.int32 if count <= 2**31 - 1 else np.int64


@njit()
def _number(part: Array, cursor: Array, orig_id: Array, global_id: Array) -> None:
    for node in range(len(part)):
        gid = cursor[part[node]]
        cursor[part[node]] += 1
        orig_id[gid] = node
        global_id[node] = gid


EDGE_BYTES_AT_ONCE = 256 << 20  #: cut edges of as many parts together as fit; each group reads the edge list once


@dataclass(frozen=True)
class EdgeRows:
    """In-edges of the nodes of one part, in original edge order inside a row."""

    part_id: int
    indptr: Ids  #: [n + 1]
    indices: Array  #: int32|int64 [e] global ids of sources
    orig_id: Array  #: int32|int64 [e] original edge ids


@dataclass(frozen=True)
class EdgeCut:
    """Where the edges of one type go."""

    edge_index: Array  #: [2, E] original ids
    source: Relabelling
    target: Relabelling
    indptr: Ids  #: [N of the target type + 1], rows of all parts one after the other

    @classmethod
    def of(cls, edge_index: Array, source: Relabelling, target: Relabelling) -> EdgeCut:
        return cls(edge_index, source, target, _row_limits(edge_index[1], target.global_id))

    @property
    def offsets(self) -> Ids:
        """Edges of part p are ``offsets[p]`` to ``offsets[p + 1]``, int64 [num_parts + 1]."""
        return self.indptr[self.target.offsets]

    def groups(self) -> Iterator[list[EdgeRows]]:
        """All parts in order, as many together as their ids fit ``EDGE_BYTES_AT_ONCE``."""
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
    """Consecutive parts whose edges together stay under ``limit`` bytes; always at least one part."""
    start, num_parts = 0, len(edge_offsets) - 1
    while start < num_parts:
        end = start + 1
        while end < num_parts and (edge_offsets[end + 1] - edge_offsets[start]) * edge_bytes <= limit:
            end += 1
        yield range(start, end)
        start = end


@njit()
def _row_limits(targets: Array, global_id: Array) -> Array:
    """Row limits of all parts one after the other, int64 [N + 1]; ``global_id`` [N] is the targets'."""
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
    """Fill the rows ``low <= gid < high`` in original edge order; ``cursor`` holds the rows' next free slots."""
    for edge in range(len(sources)):
        row = target_gid[targets[edge]]
        if low <= row < high:
            slot = cursor[row - low]
            cursor[row - low] += 1
            indices[slot] = source_gid[sources[edge]]
            orig_id[slot] = edge
