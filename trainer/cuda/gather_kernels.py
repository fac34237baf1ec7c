"""CUDA kernels that gather rows: from tables of cached rows on GPUs, or from a table in pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from trainer.cuda.elements import from_bits, split
from trainer.cuda.launch import Kernel, cuda, device_function, kernel
from trainer.cuda.peer_links import MOST_DEVICES

ELSEWHERE = -1  #: source of a row that kernels cannot read

_TABLE_BITS = 4  #: bits of a source for its table; ``MOST_DEVICES`` tables and the host's fit in them
_TABLE_MASK = (1 << _TABLE_BITS) - 1


def source_of(row: int, table: int) -> int:
    """Return the source of a row of the ``table``-th table of cached rows."""
    return (row << _TABLE_BITS) + 1 + table


@kernel
def locate_rows(ids: Any, slots: Any, num_tables: int, offsets: Any, bases: Any, sources: Any) -> None:
    """Fill ``sources``, int64 [n], with the place where the row of each id is.

    The place is ``16 * row`` for a row of the host's table, ``16 * row + 1 + t`` for a row of the t-th table of cached
    rows, or ``ELSEWHERE``.

    ``ids``: global ids [n]. ``slots``: int32 [N], slot of each global id in the cache, -1 for none; empty without a
    cache. Slot s is row ``s // num_tables`` of table ``s % num_tables``. ``offsets``: int64 [P + 1], first global id of
    each part. ``bases``: int64 [P], first row of each part in the host's table, -1 for a part that is not in it.
    """
    for i in range(cuda.grid(1), len(ids), cuda.gridsize(1)):
        slot = np.int64(-1)
        if len(slots) > 0:
            slot = np.int64(slots[ids[i]])
        if slot >= 0:
            row, table = split(slot, num_tables)
            sources[i] = (row << _TABLE_BITS) + 1 + table
        else:
            low, high = 0, len(bases)
            while high - low > 1:
                middle = (low + high) // 2
                if offsets[middle] <= ids[i]:
                    low = middle
                else:
                    high = middle
            near = bases[low] >= 0
            sources[i] = (bases[low] + ids[i] - offsets[low]) << _TABLE_BITS if near else ELSEWHERE


@dataclass(frozen=True)
class TakeRows:
    """Kernels that gather rows, for one type of the rows in host memory."""

    from_one: Kernel  #: with one table of cached rows
    from_several: Kernel  #: with ``MOST_DEVICES`` tables

    def __call__(self, sources: Tensor, host: Any, scales: Any, tables: Sequence[Any], out: Tensor) -> None:
        """Gather n rows into ``out``, float32 [n, width]. Where the place is negative, ``out`` is not changed.

        ``sources``: int64 [n], places from ``locate_rows``. ``host``: [rows, width] in the stored dtype, for bfloat16
        the bits as uint16. ``scales``: float32 [rows, 1] for rows stored as int8, else [0, 1]. ``tables``: float32
        [k, width] each, 1 to ``MOST_DEVICES``.
        """
        if len(tables) == 1:
            self.from_one(out.numel(), sources, host, scales, *tables, out)
        else:
            none = [out[:0]] * (MOST_DEVICES - len(tables))
            self.from_several(out.numel(), sources, host, scales, *tables, *none, out)


def _make_take_rows(load: Any) -> TakeRows:
    def take_rows(sources, host, scales, cached, out):  # type: ignore[no-untyped-def]  # Numba infers the types
        # one thread per element, so that neighbouring threads read neighbouring addresses
        width = out.shape[1]
        for item in range(cuda.grid(1), len(sources) * width, cuda.gridsize(1)):
            i, column = split(item, width)
            source = sources[i]
            if source >= 0:
                row = source >> _TABLE_BITS
                if source & _TABLE_MASK:
                    out[i, column] = cached[row, column]
                else:
                    out[i, column] = load(host[row, column], scales, row)

    def take_shared_rows(sources, host, scales, t1, t2, t3, t4, t5, t6, t7, t8, out):  # type: ignore[no-untyped-def]
        width = out.shape[1]
        for item in range(cuda.grid(1), len(sources) * width, cuda.gridsize(1)):
            i, column = split(item, width)
            source = sources[i]
            if source >= 0:
                row, table = source >> _TABLE_BITS, source & _TABLE_MASK
                if table == 0:
                    out[i, column] = load(host[row, column], scales, row)
                elif table == 1:
                    out[i, column] = t1[row, column]
                elif table == 2:
                    out[i, column] = t2[row, column]
                elif table == 3:
                    out[i, column] = t3[row, column]
                elif table == 4:
                    out[i, column] = t4[row, column]
                elif table == 5:
                    out[i, column] = t5[row, column]
                elif table == 6:
                    out[i, column] = t6[row, column]
                elif table == 7:
                    out[i, column] = t7[row, column]
                else:
                    out[i, column] = t8[row, column]

    return TakeRows(kernel(take_rows), kernel(take_shared_rows))


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
