"""CUDA kernels that gather rows: from cached rows on the device, or from a table in pinned host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.cuda.elements import from_bits, split
from trainer.cuda.launch import Kernel, cuda, device_function, kernel

ELSEWHERE = -1  #: source of a row that kernels cannot read


@kernel
def locate_rows(ids: Any, slots: Any, offsets: Any, bases: Any, sources: Any) -> None:
    """Fill ``sources``, int64 [n], with the place where the row of each id is.

    The place is ``2 * row`` for a row of the host's table, ``2 * row + 1`` for a cached row, or ``ELSEWHERE``.

    ``ids``: global ids [n]. ``slots``: int32 [N], cached row of each global id, -1 for none; empty without a cache.
    ``offsets``: int64 [P + 1], first global id of each part. ``bases``: int64 [P], first row of each part in the host's
    table, -1 for a part that is not in it.
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
            near = bases[low] >= 0
            sources[i] = 2 * (bases[low] + ids[i] - offsets[low]) if near else ELSEWHERE


def _make_take_rows(load: Any) -> Kernel:
    def take_rows(sources, host, scales, cached, out):  # type: ignore[no-untyped-def]  # Numba infers the types
        """Gather n rows into ``out``, float32 [n, width]. Where the place is negative, ``out`` is not changed.

        ``sources``: int64 [n], places from ``locate_rows``. ``host``: [rows, width] in the stored dtype, for bfloat16
        the bits as uint16. ``scales``: float32 [rows, 1] for rows stored as int8, else [0, 1]. ``cached``: float32
        [k, width].
        """
        # one thread per element, so that neighbouring threads read neighbouring addresses
        width = out.shape[1]
        for item in range(cuda.grid(1), len(sources) * width, cuda.gridsize(1)):
            i, column = split(item, width)
            source = sources[i]
            if source >= 0:
                row = source >> 1
                if source & 1:
                    out[i, column] = cached[row, column]
                else:
                    out[i, column] = load(host[row, column], scales, row)

    return kernel(take_rows)


@device_function
def _converted(value, scales, row):  # type: ignore[no-untyped-def]
    return np.float32(value)


@device_function
def _scaled(value, scales, row):  # type: ignore[no-untyped-def]
    return np.float32(value) * scales[row, 0]


@device_function
def _from_bits(value, scales, row):  # type: ignore[no-untyped-def]
    return from_bits(value)


#: ``take_scaled_rows`` multiplies each row of the host by its scale.
take_rows, take_scaled_rows, take_bfloat16_rows = map(_make_take_rows, (_converted, _scaled, _from_bits))


@kernel
def take_numbers(source: Any, ids: Any, out: Any) -> None:
    """Set ``out[i] = source[ids[i]]`` for arrays of one dimension."""
    for i in range(cuda.grid(1), len(ids), cuda.gridsize(1)):
        out[i] = source[ids[i]]
