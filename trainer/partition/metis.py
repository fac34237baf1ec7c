"""METIS, on a thinned graph where the graph is dense, with a refinement on the whole graph."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pymetis
from numba import njit

from trainer.arrays import Array
from trainer.errors import PartitionError
from trainer.rng import GOLDEN, fraction, mix

#: METIS's memory and time go with its edges (about 90 bytes each, all levels together). Above this mean
#: degree it sees a sample of them; the refinement afterwards makes up for what the sample hides.
_MEAN_DEGREE = 28
_REFINE_PASSES = 3
_SLACK = 1.01  #: refinement lets no part grow beyond this share of the mean, or beyond METIS's largest


def metis_parts(indptr: Array, neighbours: Array, num_parts: int, seed: int) -> npt.NDArray[np.int32]:
    """Part of each node, int32 [N], for a symmetric graph without self loops and duplicates (CSR).

    Raises ``PartitionError`` when METIS fails or leaves nodes without a part.
    """
    num_nodes = len(indptr) - 1
    thinned, kept = _thin(indptr, neighbours) if len(neighbours) > _MEAN_DEGREE * num_nodes else (indptr, neighbours)
    part = _call_metis(thinned, kept, num_parts, seed)
    del thinned, kept
    sizes = np.bincount(part, minlength=num_parts)
    limit = max(int(_SLACK * num_nodes / num_parts), int(sizes.max()))
    _refine(indptr, neighbours, part, sizes, limit)
    return part


def _call_metis(indptr: Array, neighbours: Array, num_parts: int, seed: int) -> npt.NDArray[np.int32]:
    width = _metis_dtype()
    graph = pymetis.CSRAdjacency(indptr.astype(width, copy=False), neighbours.astype(width, copy=False))
    options = pymetis.Options(seed=seed % 2**31)
    try:
        with _interruptible():
            result = pymetis.part_graph(num_parts, graph, options=options)
    except (RuntimeError, MemoryError) as error:
        raise PartitionError(f"METIS failed ({error}); try method random, or more memory") from error
    part = np.asarray(result.vertex_part, dtype=np.int32)
    if len(part) != len(indptr) - 1 or (len(part) and not 0 <= part.min() <= part.max() < num_parts):
        raise PartitionError("METIS gave an incomplete partition; try another seed, fewer parts, or method random")
    return part


def _metis_dtype() -> Any:
    """The integer type METIS was built with: arrays of it are not copied."""
    return np.dtype(pymetis.zero_copy_dtype())


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once: METIS runs for minutes without looking at Python's handlers.

    Nothing has been written at this stage, so there is nothing to clean up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _thin(indptr: Array, neighbours: Array) -> tuple[Array, Array]:
    """A sample of the edges, the same for both directions, that leaves sparse nodes alone.

    Edge (u, v) is kept with probability ``keep`` (1/deg u + 1/deg v): hubs lose most, and nodes of
    degree up to ``keep`` lose nothing.
    """
    keep = _MEAN_DEGREE / 2
    thinned = _thin_count(indptr, neighbours, keep)
    return thinned, _thin_fill(indptr, neighbours, keep, np.empty(int(thinned[-1]), _metis_dtype()))


@njit(nogil=True, cache=True)
def _is_kept(low: int, high: int, chance: float) -> bool:
    return fraction(mix(np.uint64(low) * GOLDEN + np.uint64(high) * np.uint64(0xC2B2AE3D27D4EB4F))) < chance


@njit(nogil=True, cache=True)
def _thin_count(indptr: Array, neighbours: Array, keep: float) -> Array:
    inverse = 1.0 / np.maximum(np.diff(indptr), 1)
    thinned = np.zeros(len(indptr), np.int64)
    for node in range(len(indptr) - 1):
        count = 0
        for slot in range(indptr[node], indptr[node + 1]):
            other = neighbours[slot]
            count += _is_kept(min(node, other), max(node, other), keep * (inverse[node] + inverse[other]))
        thinned[node + 1] = thinned[node] + count
    return thinned


@njit(nogil=True, cache=True)
def _thin_fill(indptr: Array, neighbours: Array, keep: float, kept: Array) -> Array:
    inverse = 1.0 / np.maximum(np.diff(indptr), 1)
    end = 0
    for node in range(len(indptr) - 1):
        for slot in range(indptr[node], indptr[node + 1]):
            other = neighbours[slot]
            if _is_kept(min(node, other), max(node, other), keep * (inverse[node] + inverse[other])):
                kept[end] = other
                end += 1
    return kept


@njit(nogil=True, cache=True)
def _refine(indptr: Array, neighbours: Array, part: Array, sizes: Array, limit: int) -> None:
    """Move single nodes to the part most of their neighbours are in, where the part has room; in place."""
    links = np.zeros(len(sizes), np.int64)
    for _ in range(_REFINE_PASSES):
        for node in range(len(part)):
            row = neighbours[indptr[node] : indptr[node + 1]]
            for other in row:
                links[part[other]] += 1
            own = part[node]
            best = own
            for other in row:
                candidate = part[other]
                if links[candidate] > links[best] and sizes[candidate] < limit and sizes[own] > 1:
                    best = candidate
            for other in row:
                links[part[other]] = 0
            part[node] = best
            sizes[own] -= 1
            sizes[best] += 1
