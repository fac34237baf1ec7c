"""Sorts records by row number with a counting sort: in memory or, if they do not fit, by way of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit

#: Row numbers [n] of some records, and for each column the values [n, …].
Records: TypeAlias = tuple[Array, Sequence[Array]]


@dataclass(frozen=True)
class Scratch:
    """A folder for intermediate arrays, and the bytes of memory that one operation may use for its arrays."""

    folder: Path
    memory: int  #: bytes


@dataclass(frozen=True)
class Column:
    """A column of the records: dtype and shape of its value in one record."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)

    @classmethod
    def of(cls, values: Array) -> Column:
        return cls(values.dtype, values.shape[1:])


@dataclass(frozen=True)
class SortedRows:
    """The records of consecutive rows, sorted by row; records of one row are in their original order."""

    first: int  #: number of the first row
    limits: Ids  #: int64 [rows + 1]; row ``first + k`` has the records limits[k] <= r < limits[k + 1]
    columns: Sequence[Callable[[], Array]]  #: each returns the values [records, …] of a column


def sorted_rows(
    indptr: Ids, columns: Sequence[Column], records: Callable[[], Iterable[Records]], scratch: Scratch | None = None
) -> Iterator[SortedRows]:
    """Sort records by row, and yield them for consecutive ranges of rows, in order.

    Without ``scratch``, or if all columns fit into ``scratch.memory``, a single range contains all rows. Otherwise the
    records are first written to one file. ``records`` is read once.

    Args:
        indptr: int64 [rows + 1]; row k has the sorted records ``indptr[k] <= r < indptr[k + 1]``.
        columns: dtype and shape of each column.
        records: returns an iterator over the records, in chunks and in their original order.
        scratch: folder for the file, and memory for sorting one range. A row that needs more is a range by itself.
    """
    bounds = [0, len(indptr) - 1] if scratch is None else _range_bounds(indptr, columns, scratch.memory)
    if len(bounds) == 2:
        yield _sorted_in_memory(indptr, columns, records())
        return
    assert scratch is not None
    with (
        TemporaryDirectory(prefix="sort-", dir=scratch.folder) as folder,
        closing(_Ranges(Path(folder) / "records", np.array(bounds), columns)) as ranges,
    ):
        ranges.write(records(), scratch.memory)
        for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            yield ranges.read(number, indptr[low : high + 1] - indptr[low])


def _range_bounds(indptr: Ids, columns: Sequence[Column], memory: int) -> list[int]:
    total = int(indptr[-1])
    if total * sum(column.row_bytes for column in columns) <= memory:
        return [0, len(indptr) - 1]
    # a row number, a slot, and the values of one column before and after sorting
    most = max(1, memory // (16 + 2 * max(column.row_bytes for column in columns)))
    bounds = [0]
    while bounds[-1] < len(indptr) - 1:
        end = int(np.searchsorted(indptr, indptr[bounds[-1]] + most, side="right")) - 1
        bounds.append(min(max(end, bounds[-1] + 1), len(indptr) - 1))
    return bounds


def _sorted_in_memory(indptr: Ids, columns: Sequence[Column], records: Iterable[Records]) -> SortedRows:
    cursor = indptr[:-1].copy()
    out = [np.empty((int(indptr[-1]), *column.shape), column.dtype) for column in columns]
    for rows, values in records:
        slots = _slots(rows, 0, cursor)
        for column, chunk in zip(out, values, strict=True):
            column[slots] = chunk
    return SortedRows(0, indptr, [lambda column=column: column for column in out])  # type: ignore[misc]


class _Ranges:
    """The records in one file. A batch of records is a block per column, in which the ranges follow each other."""

    def __init__(self, path: Path, bounds: Ids, columns: Sequence[Column]) -> None:
        """bounds: first row of each range, and the number of rows."""
        self._bounds = bounds
        self._columns = [Column(np.dtype(np.int32 if bounds[-1] < 2**31 else np.int64)), *columns]  # row numbers first
        self._file = path.open("w+b")
        #: per batch: for each column the offset of its block, and the number of records up to the end of each range
        self._batches: list[tuple[list[int], Ids]] = []

    def write(self, records: Iterable[Records], memory: int) -> None:
        """Write all records, with at most about ``memory`` bytes of buffers beside the chunks of ``records``."""
        # per record its place and range, and the values of one column before and after sorting
        most = max(1, memory // (16 + 2 * max(column.row_bytes for column in self._columns)))
        end = 0
        for chunk, columns in records:
            for start in range(0, len(chunk), most):
                rows, *values = (each[start : start + most] for each in (chunk, *columns))
                order, ends = _order_by_range(rows, self._bounds)
                offsets = []
                for column, unordered in zip(self._columns, [rows, *values], strict=True):
                    offsets.append(end)
                    ordered = np.ascontiguousarray(unordered[order], column.dtype)
                    end += self._file.write(ordered.reshape(-1).view(np.uint8).data)
                self._batches.append((offsets, ends))

    def read(self, number: int, limits: Ids) -> SortedRows:
        first = int(self._bounds[number])
        slots = _slots(self._values(number, 0), first, limits[:-1].copy())

        def column(which: int) -> Array:
            values = self._values(number, which)
            out = np.empty_like(values)
            out[slots] = values
            return out

        return SortedRows(first, limits, [lambda k=k: column(k) for k in range(1, len(self._columns))])  # type: ignore[misc]

    def close(self) -> None:
        self._file.close()

    def _values(self, number: int, which: int) -> Array:
        """Return the values of a column in a range, in the original order of the records."""
        column = self._columns[which]
        row_bytes = column.row_bytes
        spans = [
            (offsets[which], int(ends[number - 1]) if number else 0, int(ends[number]))
            for offsets, ends in self._batches
        ]
        values = np.empty((sum(end - begin for _, begin, end in spans), *column.shape), column.dtype)
        raw, at = values.reshape(-1).view(np.uint8).data, 0
        for offset, begin, end in spans:
            if end > begin:
                size = (end - begin) * row_bytes
                self._file.seek(offset + begin * row_bytes)
                if self._file.readinto(raw[at : at + size]) != size:
                    raise OSError(f"{self._file.name} has been cut")
                at += size
        return values


@njit()
def _slots(rows: Array, first: int, cursor: Ids) -> Ids:
    slots = np.empty(len(rows), np.int64)
    for record in range(len(rows)):
        row = rows[record] - first
        slots[record] = cursor[row]
        cursor[row] += 1
    return slots


@njit()
def _order_by_range(rows: Array, bounds: Ids) -> tuple[Array, Ids]:
    ends = np.zeros(len(bounds) - 1, np.int64)
    numbers = np.empty(len(rows), np.int32)
    for record in range(len(rows)):
        low, high = 0, len(bounds) - 1
        while low + 1 < high:
            middle = (low + high) // 2
            if rows[record] >= bounds[middle]:
                low = middle
            else:
                high = middle
        numbers[record] = low
        ends[low] += 1
    cursor = np.empty(len(ends), np.int64)
    total = 0
    for number in range(len(ends)):
        cursor[number] = total
        total += ends[number]
        ends[number] = total
    order = np.empty(len(rows), np.int64)
    for record in range(len(rows)):
        order[cursor[numbers[record]]] = record
        cursor[numbers[record]] += 1
    return order, ends
