"""Arrays that are made in pieces, from the files of parts or by choosing rows: in memory, or memory-mapped if large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError, PartitionError
from trainer.core.row_sort import Scratch
from trainer.data.dataset import EdgeData

_IN_MEMORY = 64 << 20  #: bytes of an array from which on it is memory-mapped

_ROWS_AT_ONCE = 1 << 20

_BYTES_AT_ONCE = 16 << 20  #: of rows that are copied at once


def slices(count: int, row_bytes: int = 1) -> Iterator[slice]:
    """Divide ``count`` rows of ``row_bytes`` bytes into pieces of about a million rows, and at most 16 MiB."""
    step = max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // max(1, row_bytes)))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def kept_rows(values: Array, keep: Callable[[slice], Array], count: int, path: Path | None) -> Array:
    """Copy the ``count`` rows of ``values`` for which ``keep`` is true, in pieces.

    ``keep`` returns bool [rows of the slice]. The result is a memory-mapped file ``path``, or an array in memory.
    """
    shape = (count, *values.shape[1:])
    out = np.empty(shape, values.dtype) if path is None else mapped_file(path, shape, values.dtype)
    at = 0
    for piece in slices(len(values), values.strides[0] if values.ndim and len(values) else 1):
        rows = values[piece][keep(piece)]
        out[at : at + len(rows)] = rows
        at += len(rows)
    return out


def kept_edges(data: EdgeData, keep: Callable[[slice], Array], scratch: Scratch | None, name: str) -> EdgeData:
    """Return the edges for which ``keep`` is true, in their order.

    ``keep`` is called for consecutive slices of the edges, several times for each, and returns bool [edges of the
    slice]. With ``scratch``, the new arrays are memory-mapped files in its folder, with names that begin with ``name``.
    """

    def path(of: str) -> Path | None:
        return None if scratch is None else scratch.folder / f"{name}-{of}.npy"

    count = sum(int(np.count_nonzero(keep(piece))) for piece in slices(data.num_edges))
    index, shape = data.edge_index, (2, count)
    place = path("edge_index")
    edge_index = np.empty(shape, index.dtype) if place is None else mapped_file(place, shape, index.dtype)
    at = 0
    for piece in slices(data.num_edges):
        part = index[:, piece][:, keep(piece)]
        edge_index[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    attrs = {of: kept_rows(values, keep, count, path(of)) for of, values in data.attrs.items()}
    return EdgeData(edge_index, attrs, data.bfloat16)


def mapped_file(path: Path, shape: tuple[int, ...], dtype: Any) -> Array:
    """Create a .npy file, and return its writable memory map. An empty array is in memory instead."""
    if not np.prod(shape):
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)


def mapped_values(path: Path, dtype: np.dtype[Any]) -> Array:
    """Return the memory map of a file of plain values, read-only, [n]. An empty array is in memory instead."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


@dataclass
class WorkArrays:
    """Allocates arrays. Arrays of 64 MiB or more are files in ``folder``; the caller deletes the folder."""

    folder: Path | None = None  #: None: all arrays are in memory
    _count: int = field(default=0, init=False)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a writable array whose content is undefined. Raises ``PartitionError`` when the disk is full."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if self.folder is None or size < _IN_MEMORY:
            return np.empty(shape, dtype)
        self._count += 1
        path = self.folder / f"{self._count}.npy"
        try:
            return np.lib.format.open_memmap(path, "w+", dtype=np.dtype(dtype), shape=shape).view(np.ndarray)
        except OSError as error:
            raise PartitionError(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class Piece:
    """Some rows of an array."""

    ids: Array  #: int [n], position of each row in the whole array
    values: Array  #: [n, …]
    place: str  #: file, for messages


def assembled(pieces: Iterable[Piece], count: int, of: str, arrays: WorkArrays) -> Array:
    """Assemble an array of ``count`` rows from pieces, which together must contain each row exactly once.

    Args:
        pieces: at least one; all with the same dtype and shape of a row.
        count: number of rows of the result.
        of: what a row describes, for error messages, such as ``node`` or ``edge of type a__r__b``.
        arrays: allocates the result.

    Raises:
        DataError: when ids and rows differ in number, an id is out of range, or a row is missing or appears twice.
    """
    whole: Array | None = None
    seen = np.zeros(count, bool)
    for piece in pieces:
        if whole is None:
            whole = arrays.empty((count, *piece.values.shape[1:]), piece.values.dtype)
        if piece.values.ndim == 0 or len(piece.values) != len(piece.ids):
            rows = len(piece.values) if piece.values.ndim else 0
            raise DataError(f"{piece.place}: {rows} rows, but {len(piece.ids)} ids ({of}); the file is damaged")
        if piece.values.dtype != whole.dtype or piece.values.shape[1:] != whole.shape[1:]:
            raise DataError(
                f"{piece.place}: rows are {piece.values.dtype} {list(piece.values.shape[1:])}, but {whole.dtype} "
                f"{list(whole.shape[1:])} in an earlier part ({of})"
            )
        for start in range(0, len(piece.ids), _ROWS_AT_ONCE):
            ids = np.asarray(piece.ids[start : start + _ROWS_AT_ONCE], np.int64)
            if int(ids.min()) < 0 or int(ids.max()) >= count:
                wrong = ids[(ids < 0) | (ids >= count)][0]
                raise DataError(f"{piece.place}: found {of} {wrong}, but ids go from 0 to {count - 1}")
            again = seen[ids]
            if again.any():
                raise DataError(f"{piece.place}: {of} {ids[int(np.argmax(again))]} is also in an earlier part")
            ordered = np.sort(ids)
            if (twice := np.diff(ordered) == 0).any():
                raise DataError(f"{piece.place}: {of} {ordered[1:][twice][0]} appears twice")
            seen[ids] = True
            whole[ids] = piece.values[start : start + _ROWS_AT_ONCE]
    if whole is None:
        raise ValueError("no pieces")
    if not seen.all():
        missing = int(np.argmin(seen))
        raise DataError(
            f"{piece.place}: {of} {missing} has no row in any part ({int(np.count_nonzero(~seen)):,} of {count:,} are "
            "missing); copy the folders of all parts"
        )
    return whole
