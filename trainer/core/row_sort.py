"""Sorts records by row number with a counting sort: in memory or, if they do not fit, with temporary files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit

#: Row numbers [n] of some records, and for each column the values [n, …].
Records: TypeAlias = tuple[Array, Sequence[Array]]

_MOST_RANGES = 256  #: files that are written at the same time per column


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
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

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
    records are first written to files. ``records`` is read once.

    Args:
        indptr: int64 [rows + 1]; row k has the sorted records ``indptr[k] <= r < indptr[k + 1]``.
        columns: dtype and shape of each column.
        records: returns an iterator over the records, in chunks and in their original order.
        scratch: folder for the files, and memory for sorting one range. A row that needs more is a range by itself.
    """
    bounds = [0, len(indptr) - 1] if scratch is None else _range_bounds(indptr, columns, scratch.memory)
    if len(bounds) == 2:
        yield _sorted_in_memory(indptr, columns, records())
        return
    assert scratch is not None
    with TemporaryDirectory(prefix="sort-", dir=scratch.folder) as folder:
        ranges = _Ranges(Path(folder), np.array(bounds), columns)
        ranges.write(records())
        for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            yield ranges.read(number, low, indptr[low : high + 1] - indptr[low])


def _range_bounds(indptr: Ids, columns: Sequence[Column], memory: int) -> list[int]:
    total = int(indptr[-1])
    if total * sum(column.row_bytes for column in columns) <= memory:
        return [0, len(indptr) - 1]
    # a row number, a slot, and the values of one column before and after sorting
    most = max(1, memory // (16 + 2 * max(column.row_bytes for column in columns)), -(-total // _MOST_RANGES))
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


@dataclass(frozen=True)
class _Ranges:
    folder: Path
    bounds: Ids  #: first row of each range, and the number of rows
    columns: Sequence[Column]

    @property
    def row_dtype(self) -> Any:
        return np.int32 if self.bounds[-1] < 2**31 else np.int64

    def write(self, records: Iterable[Records]) -> None:
        count = len(self.bounds) - 1
        names = ["rows", *map(str, range(len(self.columns)))]
        with ExitStack() as stack:
            files = {
                name: [stack.enter_context(self._path(number, name).open("wb", 1 << 18)) for number in range(count)]
                for name in names
            }
            for rows, values in records:
                order, ends = _order_by_range(rows, self.bounds)
                _append(files["rows"], rows.astype(self.row_dtype, copy=False), order, ends)
                for name, column, chunk in zip(names[1:], self.columns, values, strict=True):
                    _append(files[name], chunk.astype(column.dtype, copy=False), order, ends)

    def read(self, number: int, first: int, limits: Ids) -> SortedRows:
        rows = np.fromfile(self._path(number, "rows"), self.row_dtype)
        self._path(number, "rows").unlink()
        slots = _slots(rows, first, limits[:-1].copy())
        del rows

        def column(which: int) -> Array:
            path, kind = self._path(number, str(which)), self.columns[which]
            values = np.fromfile(path, kind.dtype).reshape(-1, *kind.shape)
            path.unlink()
            out = np.empty_like(values)
            out[slots] = values
            return out

        return SortedRows(first, limits, [lambda k=k: column(k) for k in range(len(self.columns))])  # type: ignore[misc]

    def _path(self, number: int, name: str) -> Path:
        return self.folder / f"{number:03d}.{name}"


def _append(files: Sequence[BinaryIO], values: Array, order: Array, ends: Ids) -> None:
    ordered, begin = np.ascontiguousarray(values[order]), 0
    for file, end in zip(files, ends.tolist(), strict=True):
        if end > begin:
            file.write(ordered[begin:end].reshape(-1).view(np.uint8).data)
        begin = end


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
