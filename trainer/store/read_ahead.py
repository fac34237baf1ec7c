"""Reads the pages of memory-mapped rows in parallel, for parts that are larger than the memory.

The kernel is told to expect random access. Before rows are copied, several threads read a byte of each of their pages,
so that the disk gets many requests at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids, read_only
from trainer.core.compiled import njit
from trainer.core.memory import available_memory

_SHARE = 0.8  #: share of the available memory up to which mapped files are taken to fit; batches and models need memory

_THREADS = 16  #: pages read at the same time

_LEAST = 64  #: rows from which on a thread is worth its start

_PAGE = 4096

_MOST_PAGES = 4  #: neighbour lists of more pages are not touched: a few draws from a long list do not need all of it


def fits_in_memory(nbytes: int) -> bool:
    """Return whether files of ``nbytes`` bytes in total can stay in the page cache."""
    available = available_memory()
    return available is None or nbytes <= _SHARE * available


def read_at_random(arrays: Iterable[Array]) -> None:
    """Disable the kernel's read-ahead for memory-mapped arrays: it reads only the pages that are used."""
    for array in arrays:
        mapped = _map_of(array)
        if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)


def touch_rows(wanted: Sequence[tuple[Array, Array]]) -> None:
    """Read the pages of rows of memory-mapped arrays, and return when they are in memory.

    ``wanted``: pairs of an array [n, …] in C order and row numbers int32|int64 [m]. Arrays that are not memory-mapped
    are skipped.
    """
    started = [
        _readers().submit(_touch, _bytes_of(array), read_only(some), array.nbytes // len(array))
        for array, rows in wanted
        if len(rows) and array.nbytes and _map_of(array) is not None
        for some in _pieces(rows)
    ]
    _wait(started)


def touch_neighbours(indptr: Ids, of_edges: Sequence[Array], rows: Array) -> None:
    """Read the pages of a CSC that sampling the neighbours of nodes ``rows`` needs. Return when they are in memory.

    ``indptr``: memory-mapped offsets. ``of_edges``: memory-mapped arrays [e], one value per edge. The edges of a node
    are skipped if they take more than ``_MOST_PAGES`` pages.
    """
    if len(rows) == 0 or _map_of(indptr) is None:
        return
    touch_rows([(indptr, rows)])
    arrays = [array for array in of_edges if array.nbytes and _map_of(array) is not None]
    _wait(
        [
            _readers().submit(_touch_ranges, read_only(indptr), _bytes_of(array), array.itemsize, read_only(some))
            for array in arrays
            for some in _pieces(rows)
        ]
    )


def _pieces(rows: Array) -> list[Array]:
    return np.array_split(rows, min(_THREADS, max(1, len(rows) // _LEAST)))


def _wait(started: Sequence[Future[Any]]) -> None:
    for future in started:
        future.result()


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="read-ahead")


def _map_of(array: Any) -> mmap.mmap | None:
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array


def _bytes_of(array: Array) -> Array:
    return read_only(array.reshape(-1).view(np.uint8))


@njit(boundscheck=False)
def _touch(data: Any, rows: Any, width: int) -> int:
    """Read a byte of each page of the rows. Returns a sum, so that the reads are not optimized away."""
    total = 0
    for row in rows:
        at, last = row * width, row * width + width - 1
        while at < last:
            total += data[at]
            at += _PAGE
        total += data[last]
    return total


@njit(boundscheck=False)
def _touch_ranges(indptr: Any, data: Any, width: int, rows: Any) -> int:
    total = 0
    for row in rows:
        at, end = indptr[row] * width, indptr[row + 1] * width
        if at < end and end - at <= _MOST_PAGES * _PAGE:
            last = end - 1
            while at < last:
                total += data[at]
                at += _PAGE
            total += data[last]
    return total
