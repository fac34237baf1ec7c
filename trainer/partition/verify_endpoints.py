"""Checks that the endpoints files, which list source and target by original edge id, match the edges of all parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.compiled import njit
from trainer.core.rng import mix


class EndpointSums:
    """Two sums of hashes of (original edge id, source, target): over the edges of the parts, and over endpoints files.

    The sums are equal if both contain the same edges, in any order.
    """

    def __init__(self) -> None:
        self._of_edges = self._of_endpoints = np.uint64(0)

    @property
    def equal(self) -> bool:
        return bool(self._of_edges == self._of_endpoints)

    def add_edges(self, indptr: Array, indices: Array, orig_id: Array, first_target: int) -> None:
        """Add the edges of a part, whose first target node has the global id ``first_target``."""
        with np.errstate(over="ignore"):
            self._of_edges += _sum_of_edges(indptr, indices, orig_id, first_target)

    def add_endpoints(self, ends: Array, first: int, src_gid: Array, dst_gid: Array) -> None:
        """Add ``ends`` [m, 2]: source and target of the edges with the original ids ``first`` to ``first + m - 1``.

        ``src_gid`` and ``dst_gid``: the global id of each original node id; empty if global and original ids are equal.
        """
        with np.errstate(over="ignore"):
            self._of_endpoints += _sum_of_endpoints(ends, first, src_gid, dst_gid)


@njit()
def _sum_of_edges(indptr: Any, indices: Any, orig_id: Any, first_target: int) -> Any:
    total = np.uint64(0)
    for row in range(len(indptr) - 1):
        for slot in range(indptr[row], indptr[row + 1]):
            total += _hash(orig_id[slot], indices[slot], first_target + row)
    return total


@njit()
def _sum_of_endpoints(ends: Any, first: int, src_gid: Any, dst_gid: Any) -> Any:
    total = np.uint64(0)
    for row in range(len(ends)):
        src, dst = np.int64(ends[row, 0]), np.int64(ends[row, 1])
        total += _hash(
            first + row,
            np.int64(src_gid[src]) if len(src_gid) else src,
            np.int64(dst_gid[dst]) if len(dst_gid) else dst,
        )
    return total


@njit()
def _hash(edge: Any, src: Any, dst: Any) -> Any:
    return mix(mix(mix(np.uint64(edge)) ^ np.uint64(src)) + np.uint64(dst))
