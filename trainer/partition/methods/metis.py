"""Partitions with METIS, on a sample of the edges if the graph is dense, then balances and refines parts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pymetis

from trainer.core.arrays import Array
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.rng import GOLDEN, fraction, mix
from trainer.data.dataset import Dataset
from trainer.partition.methods.balance import (
    SLACK,
    JoinedNodes,
    Part,
    balance_parts,
    fill_up,
    joined_adjacency,
    node_classes,
)

#: METIS's memory and time grow with the edges (about 90 bytes each over all levels). Above this mean degree it gets a
#: sample of the edges; the refinement afterwards uses all of them.
_MEAN_DEGREE = 28


def metis_assignment(
    dataset: Dataset, joined: JoinedNodes, num_parts: int, seed: int, balance: str, slack: float = SLACK
) -> Part:
    """Assign nodes to parts by METIS, then balance the parts, and return the part of each node, int32 [total].

    ``joined``: numbers the nodes of all types consecutively. Edges of all types count as undirected. All parts get
    about the same number of nodes of each class. ``balance``, such as ``types+seeds``, defines the classes: with
    ``types``, each node type is a class; with ``seeds``, the train seeds of each type are a separate class. ``slack``:
    allowed deviation from equal numbers, as a fraction. Raises ``PartitionError`` when METIS fails or returns an
    incomplete partition.
    """
    indptr, neighbours = joined_adjacency(dataset, joined)
    part = _connected_parts(indptr, neighbours, num_parts, seed)
    classes = node_classes(dataset, joined, num_parts, balance, slack)
    fill_up(part, classes, num_parts)
    balance_parts(indptr, neighbours, part, classes, num_parts)
    return without_empty_parts(part, num_parts)


def _connected_parts(indptr: Array, neighbours: Array, num_parts: int, seed: int) -> Part:
    if len(neighbours) > _MEAN_DEGREE * (len(indptr) - 1):
        # Edge (u, v) is kept, in both directions, with probability (1/deg u + 1/deg v) * _MEAN_DEGREE / 2.
        keep = _MEAN_DEGREE / 2
        every, indptr = indptr, _thin_count(indptr, neighbours, keep)
        neighbours = _thin_fill(every, neighbours, keep, np.empty(int(indptr[-1]), _metis_dtype()))
    connected = np.flatnonzero(np.diff(indptr))
    part = np.full(len(indptr) - 1, -1, np.int32)
    if len(connected) <= num_parts:  # METIS needs more nodes than parts; ``fill_up`` distributes these nodes
        return part
    if len(connected) < len(part):
        compact = np.cumsum(np.diff(indptr) > 0, dtype=_metis_dtype()) - 1
        indptr, neighbours = np.concatenate((indptr[connected], indptr[-1:])), compact[neighbours]
    part[connected] = _call_metis(indptr, neighbours, num_parts, seed)
    return part


def without_empty_parts(part: Part, num_parts: int) -> Part:
    """Move half of the largest part to each empty part, in place."""
    # Balanced parts of tiny graphs can be empty.
    sizes = np.bincount(part, minlength=num_parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        moved = np.flatnonzero(part == largest)[: sizes[largest] // 2]
        part[moved] = empty
        sizes[largest] -= len(moved)
        sizes[empty] += len(moved)
    return part


def bytes_needed(slots: int) -> int:
    """Estimate how many bytes METIS needs. ``slots``: entries of the adjacency lists, two per edge."""
    return 100 * slots  # measured: 46 (R-MAT, 16M edges) to 146 (planted classes, 20M edges)


def metis_memory(num_nodes: int, num_edges: int) -> int:
    return bytes_needed(min(2 * num_edges, _MEAN_DEGREE * num_nodes)) + 24 * num_edges


def weighted_parts(
    indptr: Array, neighbours: Array, edge_weight: Array, node_weight: Array, num_parts: int, seed: int
) -> Part:
    """Partition a symmetric graph with weights, and return the part of each node, int32 [N].

    The sums of node weights are about equal in all parts. Raises ``PartitionError`` when METIS fails.
    """
    if len(node_weight) <= num_parts:
        return np.arange(len(node_weight), dtype=np.int32)
    return _call_metis(indptr, neighbours, num_parts, seed, node_weight, edge_weight)


def _call_metis(
    indptr: Array, neighbours: Array, num_parts: int, seed: int,
    node_weight: Array | None = None, edge_weight: Array | None = None,
) -> npt.NDArray[np.int32]:  # fmt: skip
    width = _metis_dtype()
    graph = pymetis.CSRAdjacency(indptr.astype(width, copy=False), neighbours.astype(width, copy=False))
    nodes, edges = (w if w is None else w.astype(width, copy=False) for w in (node_weight, edge_weight))
    options = pymetis.Options(seed=seed % 2**31)
    try:
        with _interruptible():
            result = pymetis.part_graph(num_parts, graph, vweights=nodes, eweights=edges, options=options)
    except (RuntimeError, MemoryError) as error:
        raise PartitionError(f"METIS failed ({error}); try method streaming, or more memory") from error
    part = np.asarray(result.vertex_part, dtype=np.int32)
    if len(part) != len(indptr) - 1 or (len(part) and not 0 <= part.min() <= part.max() < num_parts):
        raise PartitionError("METIS returned an incomplete partition; try another seed, fewer parts, or method random")
    return part


def _metis_dtype() -> Any:
    return np.dtype(pymetis.zero_copy_dtype())


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once within the ``with`` block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # While METIS runs, which takes minutes, Python's signal handlers are not called.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@njit()
def _is_kept(low: int, high: int, chance: float) -> bool:
    return fraction(mix(np.uint64(low) * GOLDEN + np.uint64(high) * np.uint64(0xC2B2AE3D27D4EB4F))) < chance


@njit()
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


@njit()
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
