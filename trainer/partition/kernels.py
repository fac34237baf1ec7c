"""Kernels that look at a partition's arrays piece by piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.compiled import njit


def new_bitset(size: int) -> npt.NDArray[np.uint64]:
    """One bit for each of ``size`` ids, all clear."""
    return np.zeros((size + 63) // 64, np.uint64)


@njit()
def mark(ids: Array, seen: Array) -> int:
    """Set the bit of each id; position of the first whose bit was set already, -1 if none. Stops there."""
    for position in range(len(ids)):
        word, bit = ids[position] >> 6, np.uint64(1) << np.uint64(ids[position] & 63)
        if seen[word] & bit:
            return position
        seen[word] |= bit
    return -1


@njit()
def mark_outside(ids: Array, low: int, high: int, seen: Array) -> tuple[int, int]:
    """How many ids lie outside ``low <= id < high``, and how many of those bits were new."""
    outside = fresh = 0
    for position in range(len(ids)):
        if ids[position] < low or ids[position] >= high:
            outside += 1
            word, bit = ids[position] >> 6, np.uint64(1) << np.uint64(ids[position] & 63)
            fresh += not seen[word] & bit
            seen[word] |= bit
    return outside, fresh


@njit()
def first_descent(values: Array, strict: bool) -> int:
    """First position whose value is below (``strict``: not above) the one before it; -1 if none."""
    for position in range(1, len(values)):
        if values[position] < values[position - 1] or (strict and values[position] == values[position - 1]):
            return position
    return -1


@njit()
def first_unordered_row(indptr: Array, orig_id: Array) -> int:
    """First slot where edge ids do not ascend inside their row; -1 if none."""
    for row in range(len(indptr) - 1):
        for slot in range(indptr[row] + 1, indptr[row + 1]):
            if orig_id[slot] <= orig_id[slot - 1]:
                return slot
    return -1


@njit()
def first_other_gid(orig_id: Array, global_id: Array, start: int) -> int:
    """First row of a part whose original id has another global id than ``start`` plus the row; -1 if none."""
    for row in range(len(orig_id)):
        if global_id[orig_id[row]] != start + row:
            return row
    return -1


@njit()
def first_other_time(indices: Array, times: Array, start: int, values: Array) -> int:
    """First slot with another time than its source has; -1 if none.

    Sources are looked up where they are among the global ids from ``start`` on that ``values`` belongs to.
    """
    for slot in range(len(indices)):
        row = indices[slot] - start
        if 0 <= row < len(values) and values[row] != times[slot]:
            return slot
    return -1
