"""Writes arrays whose rows are divided among the parts of a partition: one .npy file per part, written in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.core.progress import progress
from trainer.core.remote_settings import WireRows
from trainer.core.rounding import Unroundable, rounds, to_float16, to_int8
from trainer.core.row_sort import Column
from trainer.store.manifest import AttrSpec, FileEntry
from trainer.store.npy import NpyWriter, rows_in_chunks

#: Rows of one part, and their row numbers in the dataset.
Piece = tuple[int, Array, Array]


class PartArray:
    """One .npy file per part, ``part<p>/<path>``."""

    def __init__(self, root: Path, path: str, column: Column, counts: Sequence[int]) -> None:
        """Create the files. ``column``: dtype and shape of a row. ``counts``: number of rows of each part."""
        self._writers = [
            NpyWriter(root, f"part{part_id}/{path}", column.dtype, (count, *column.shape))
            for part_id, count in enumerate(counts)
        ]

    def append(self, part_id: int, rows: Array, numbers: Array | None = None) -> None:
        """Write the next rows of a part. Different threads may write different parts."""
        for chunk in rows_in_chunks(rows):
            self._writers[part_id].append(chunk)

    def finish(self) -> Iterator[FileEntry]:
        return (writer.finish() for writer in self._writers)


class PartAttr:
    """The files of an attribute, whose rows may be rounded to float16 or int8 when written."""

    def __init__(self, root: Path, top: str, name: str, column: Column, counts: Sequence[int], form: WireRows) -> None:
        """Create the files in ``part<p>/<top>/attrs`` and, if rows are rounded to int8, in ``part<p>/<top>/scales``."""
        self._what = f"{top}/attrs/{name}.npy"
        self._convert, stored = _conversion(_stored_form(name, column.dtype, (0, *column.shape), form), column)
        paths = [self._what, f"{top}/scales/{name}.npy"]
        self._arrays = [PartArray(root, path, each, counts) for path, each in zip(paths, stored, strict=False)]

    def append(self, part_id: int, rows: Array, numbers: Array) -> None:
        """Write the next rows of a part. ``numbers`` [rows]: their row numbers in the dataset.

        Raises ``DataError`` for a row that cannot be rounded.
        """
        at = 0
        for chunk in rows_in_chunks(rows):
            try:
                converted = self._convert(chunk)
            except Unroundable as error:
                row = numbers[at + error.row]
                raise DataError(f"{self._what}: row {row} of the dataset {error.why}; use --rows stored") from None
            for array, values in zip(self._arrays, converted, strict=True):
                array.append(part_id, values)
            at += len(chunk)

    def write(self, pieces: Iterable[Sequence[Piece]], pool: Executor) -> list[FileEntry]:
        """Write all rows, and return the entries of the files for the manifest.

        Pieces of one sequence are written in parallel, so they must belong to different parts.
        """
        for several in pieces:
            list(pool.map(lambda piece: self.append(*piece), several))
        return self.finish()

    def finish(self) -> list[FileEntry]:
        return [entry for array in self._arrays for entry in array.finish()]


def _conversion(form: WireRows, column: Column) -> tuple[Callable[[Array], Sequence[Array]], Sequence[Column]]:
    if form == "int8":
        return to_int8, [Column(np.dtype(np.int8), column.shape), Column(np.dtype(np.float32), (1,))]
    if form == "float16":
        return lambda rows: [to_float16(rows)], [Column(np.dtype(np.float16), column.shape)]
    return lambda rows: [rows], [column]


def _stored_form(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], rows: WireRows) -> WireRows:
    """Return the type that the attribute is rounded to in the files: ``rows``, or ``stored`` if it is not rounded.

    ``rows``: the value of option ``--rows``.
    """
    return rows if rounds(name, dtype, shape, rows) else "stored"


def attr_spec(name: str, values: Array, bfloat16: bool, rows: WireRows) -> AttrSpec:
    form = _stored_form(name, values.dtype, values.shape, rows)
    if form == "int8":
        return AttrSpec("float32", values.shape, "int8")
    return AttrSpec("bfloat16" if bfloat16 else "float16" if form == "float16" else values.dtype.name, values.shape)


def pieces_by_part(values: Array, part: Array, num_parts: int, at_once: int) -> Iterator[list[Piece]]:
    """Cut ``values`` into chunks of ``at_once`` rows, and yield each chunk as a list of one piece per part.

    ``part`` [rows]: the part of each row.
    """
    for start in range(0, len(values), at_once):
        progress("write nodes", start, len(values))
        rows, own = values[start : start + at_once], part[start : start + at_once]
        order = np.argsort(own, kind="stable")
        limits: Ids = np.zeros(num_parts + 1, np.int64)
        np.cumsum(np.bincount(own, minlength=num_parts), out=limits[1:])
        chosen = [order[limits[part_id] : limits[part_id + 1]] for part_id in range(num_parts)]
        yield [(part_id, rows[which], which + start) for part_id, which in enumerate(chosen) if len(which)]
