"""Copies columns of a DuckDB table to memory-mapped arrays, a few megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.texts import encode_texts
from trainer.data.raw_arrays import RawArray
from trainer.sources.table_columns import NumberColumn
from trainer.sources.table_database import Database, Scan, quoted

_CHUNK = 32 << 20  #: bytes of an array that are read from the database at once

_LONGEST_ID = 1024  #: bytes


@dataclass(frozen=True)
class ArrayColumn:
    """An attribute, and the columns of a DuckDB table from which its array is made."""

    name: str
    columns: Sequence[tuple[str, str]]  #: (name in the database, SQL over the files)
    dtype: np.dtype[Any] | None  #: None: texts
    widths: Sequence[int] = (0,)  #: of each column: length of its lists; 0: not a list
    is_matrix: bool = False  #: [rows, width] instead of [rows]


def number_array(name: str, columns: Sequence[NumberColumn], dtype: Any) -> ArrayColumn:
    """Return attribute ``name``, made from one or more columns.

    Its array is a matrix if ``name`` is x or edge_attr, if there are several columns, or if a column contains lists.
    Otherwise it is 1-d.
    """
    matrix = name in ("x", "edge_attr") or len(columns) > 1 or any(column.width for column in columns)
    narrow = np.dtype(dtype) == np.float32
    named = [
        (f"{name}.{k}", f"CAST({column.sql} AS FLOAT)" if narrow and not column.width else column.sql)
        for k, column in enumerate(columns)
    ]
    return ArrayColumn(name, named, np.dtype(dtype), [column.width for column in columns], matrix)


def select_list(columns: Iterable[ArrayColumn]) -> Iterator[str]:
    for each in columns:
        for column, sql in each.columns:
            yield f"{sql} AS {quoted(column)}"


def _plain(values: Any, dtype: np.dtype[Any]) -> Array:
    return np.asarray(np.ma.getdata(values)).astype(dtype, copy=False)


def row_ranges(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` rows into ranges that are read at once, and yield (begin, end) of each range.

    ``row_bytes``: size of a row.
    """
    step = max(1024, _CHUNK // max(1, row_bytes))
    for begin in range(0, count, step):
        yield begin, min(count, begin + step)


class TableArrays:
    def __init__(self, database: Database, folder: Path) -> None:
        self._database, self._folder, self._serial = database, folder, 0

    def export(self, column: ArrayColumn, name: str, count: int, scan: Scan) -> RawArray:
        if column.dtype is None:
            return RawArray(self._texts(column, name, count, scan), scan.where)
        width = sum(max(1, each) for each in column.widths) if column.is_matrix else 0
        shape = (count, width) if width else (count,)
        out = self.empty(column.name, column.dtype, shape)
        selected = ", ".join(quoted(each) for each, _ in column.columns)
        for begin, end in row_ranges(count, max(1, width) * 8):
            if not any(column.widths):
                rows = self.rows(name, selected, begin, end, scan)
                values = [_plain(rows[each], column.dtype) for each, _ in column.columns]
                out[begin:end] = np.stack(values, 1) if column.is_matrix else values[0]
                continue
            at = 0
            for (each, _), listed in zip(column.columns, column.widths, strict=True):
                wanted = f"unnest({quoted(each)}) AS v" if listed else f"{quoted(each)} AS v"
                values_ = _plain(self.rows(name, wanted, begin, end, scan)["v"], column.dtype)
                out[begin:end, at : at + max(1, listed)] = values_.reshape(end - begin, -1)
                at += max(1, listed)
        return RawArray(out, scan.where)

    def _texts(self, column: ArrayColumn, name: str, count: int, scan: Scan) -> Array:
        ((longest,),) = self._database.rows(f"SELECT max(strlen({quoted(column.name)})) FROM {name}", scan.where)
        if longest > _LONGEST_ID:
            raise DataError(f"{scan.where}: an id has {longest:,} bytes; at most {_LONGEST_ID:,} are possible")
        out = self.empty(column.name, np.dtype(np.uint8), (count, max(1, longest)))
        for begin, end in row_ranges(count, max(1, longest) + 50):
            rows = self.rows(name, quoted(column.name), begin, end, scan)[column.name]
            out[begin:end] = encode_texts([str(value) for value in rows], out.shape[1])
        return out

    def rows(self, name: str, selected: str, begin: int, end: int, scan: Scan) -> dict[str, Any]:
        rows = f"SELECT * FROM {name} WHERE rowid >= {begin} AND rowid < {end} ORDER BY rowid"
        return self._database.arrays(f"SELECT {selected} FROM ({rows})", scan.where)

    def empty(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        self._serial += 1
        path = self._folder / f"{self._serial:04d}-{name}.npy"
        if 0 in shape:
            return np.empty(shape, dtype)
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:  # else a full disk would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array
