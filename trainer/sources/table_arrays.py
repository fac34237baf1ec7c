"""Copies columns of a DuckDB table to memory-mapped arrays, a few megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.graph_attrs import encode_texts
from trainer.data.raw_arrays import RawArray
from trainer.sources.table_columns import NumberColumn
from trainer.sources.table_database import Database

_CHUNK = 32 << 20  #: bytes of an array that are read from the database at once


@dataclass(frozen=True)
class ArrayColumn:
    """An attribute, and the SQL expressions over the rows of a table from which its array is made."""

    name: str
    columns: Sequence[str]
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
    sql = [f"CAST({one.sql} AS FLOAT)" if narrow and not one.width else one.sql for one in columns]
    return ArrayColumn(name, sql, np.dtype(dtype), [column.width for column in columns], matrix)


def row_ranges(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` rows into ranges that are read at once, and yield (begin, end) of each range.

    ``row_bytes``: size of a row.
    """
    step = max(1024, _CHUNK // max(1, row_bytes))
    for begin in range(0, count, step):
        yield begin, min(count, begin + step)


class TableArrays:
    def __init__(self, database: Database, folder: Path) -> None:
        self._database, self.folder, self._serial = database, folder, 0

    def export(self, column: ArrayColumn, table: str, where: str, count: int) -> RawArray:
        """Return the array of an attribute, for the ``count`` rows of a database table.

        ``where``: name of the table in messages.
        """
        if column.dtype is None:
            (sql,) = column.columns
            ((longest,),) = self._database.rows(f"SELECT max(strlen({sql})) FROM {table}", where)
            out = self.empty(column.name, np.dtype(np.uint8), (count, max(1, longest)))
            for begin, end in row_ranges(count, max(1, longest) + 50):
                texts = self.rows(table, f"{sql} AS v", begin, end, where)["v"]
                out[begin:end] = encode_texts([str(value) for value in texts], out.shape[1])
            return RawArray(out, where)
        width = sum(max(1, each) for each in column.widths) if column.is_matrix else 0
        out = self.empty(column.name, column.dtype, (count, width) if width else (count,))
        lists, done = any(column.widths), 0
        for begin, end in row_ranges(count, max(1, width) * 8):
            if lists:
                blocks = [
                    self.rows(table, f"{f'unnest({sql})' if listed else sql} AS v", begin, end, where)["v"]
                    for sql, listed in zip(column.columns, column.widths, strict=True)
                ]
            else:
                blocks = []
                for first in range(0, len(column.columns), 200):  # more columns would make a query slow to plan
                    some = column.columns[first : first + 200]
                    selected = ", ".join(f"{sql} AS v{k}" for k, sql in enumerate(some))
                    blocks += self.rows(table, selected, begin, end, where).values()
            plain = [
                np.asarray(np.ma.getdata(block)).astype(column.dtype, copy=False).reshape(-1, max(1, listed))
                for block, listed in zip(blocks, column.widths, strict=True)
            ]
            values = np.concatenate(plain, 1)
            out[done : done + len(values)] = values if column.is_matrix else values[:, 0]
            done += len(values)
        return RawArray(out, where)

    def rows(self, name: str, selected: str, begin: int, end: int, where: str) -> dict[str, Any]:
        """Return columns of the rows of table ``name`` in the database, from ``begin`` to before ``end``."""
        rows = f"SELECT rowid, * FROM {name} WHERE rowid >= {begin} AND rowid < {end} ORDER BY rowid"
        return self._database.arrays(f"SELECT {selected} FROM ({rows})", where)

    def empty(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        self._serial += 1
        path = self.folder / f"{self._serial:04d}-{name[:100]}.npy"
        if 0 in shape:
            return np.empty(shape, dtype)
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:  # else a full disk would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array
