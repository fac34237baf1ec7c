"""CUDA kernels that gather rows: from a cache on the device, or from a table, which may be in pinned host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.cuda.launch import cuda, kernel

ELSEWHERE = -1  #: source of a row that kernels cannot read


@kernel
def locate_rows(ids: Any, slots: Any, offsets: Any, bases: Any, sources: Any) -> None:
    """Fill ``sources``, int64 [n], with the place where the row of each id is.

    The place is ``2 * row`` for a row of the table, ``2 * slot + 1`` for a slot of the cache, or ``ELSEWHERE``.

    ``ids``: global ids [n]. ``slots``: int32 [N], slot of each global id in the cache, -1 for none; empty without a
    cache. ``offsets``: int64 [P + 1], first global id of each part. ``bases``: int64 [P], first row of each part in the
    table, -1 for a part that is not in the table.
    """
    for i in range(cuda.grid(1), len(ids), cuda.gridsize(1)):
        slot = np.int64(-1)
        if len(slots) > 0:
            slot = np.int64(slots[ids[i]])
        if slot >= 0:
            sources[i] = 2 * slot + 1
        else:
            low, high = 0, len(bases)
            while high - low > 1:
                middle = (low + high) // 2
                if offsets[middle] <= ids[i]:
                    low = middle
                else:
                    high = middle
            sources[i] = 2 * (bases[low] + ids[i] - offsets[low]) if bases[low] >= 0 else ELSEWHERE


@kernel
def take_rows(sources: Any, table: Any, cached: Any, out: Any) -> None:
    """Gather n rows into ``out``, float32 [n, width], from the places ``sources``.

    ``sources``: int64 [n], from ``locate_rows``. An even place s is row ``s // 2`` of ``table`` [rows, width]. An odd
    place s is row ``s // 2`` of ``cached``, float32 [k, width]. Where the place is negative, ``out`` is not changed.
    The values of ``table`` are converted to float32.
    """
    # one thread per element, so that neighbouring threads read neighbouring addresses
    width = out.shape[1]
    for k in range(cuda.grid(1), len(sources) * width, cuda.gridsize(1)):
        i, column = k // width, k % width
        source = sources[i]
        if source >= 0:
            row = source // 2
            if source % 2 == 1:
                out[i, column] = cached[row, column]
            else:
                out[i, column] = np.float32(table[row, column])


@kernel
def take_bfloat16_rows(sources: Any, table: Any, cached: Any, out: Any) -> None:
    """As ``take_rows`` for a bfloat16 table: ``table`` has its bits as uint16.

    ``cached`` and ``out`` have the bits of their float32 values as uint32.
    """
    width = out.shape[1]
    for k in range(cuda.grid(1), len(sources) * width, cuda.gridsize(1)):
        i, column = k // width, k % width
        source = sources[i]
        if source >= 0:
            row = source // 2
            if source % 2 == 1:
                out[i, column] = cached[row, column]
            else:
                out[i, column] = np.uint32(table[row, column]) << np.uint32(16)


@kernel
def take_scaled_rows(sources: Any, table: Any, scales: Any, cached: Any, out: Any) -> None:
    """As ``take_rows`` for an int8 ``table``. Each row is multiplied by its scale. ``scales``: float32 [rows, 1]."""
    width = out.shape[1]
    for k in range(cuda.grid(1), len(sources) * width, cuda.gridsize(1)):
        i, column = k // width, k % width
        source = sources[i]
        if source >= 0:
            row = source // 2
            if source % 2 == 1:
                out[i, column] = cached[row, column]
            else:
                out[i, column] = np.float32(table[row, column]) * scales[row, 0]


@kernel
def take_numbers(source: Any, ids: Any, out: Any) -> None:
    """Set ``out[i] = source[ids[i]]`` for arrays of one dimension."""
    for i in range(cuda.grid(1), len(ids), cuda.gridsize(1)):
        out[i] = source[ids[i]]
