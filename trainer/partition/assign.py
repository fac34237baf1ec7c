"""Which part owns each node: METIS, or balanced random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from trainer.arrays import Array
from trainer.data.dataset import Dataset
from trainer.data.edges import symmetric_adjacency
from trainer.errors import PartitionError
from trainer.partition.metis import metis_parts
from trainer.rng import GOLDEN, hashed
from trainer.schema import EdgeType, NodeType

METHODS = ("metis", "random")


@dataclass(frozen=True)
class PartitionAssignment:
    """The part of every node, and how good the division is."""

    algorithm: str
    seed: int
    num_parts: int
    parts: Mapping[NodeType, npt.NDArray[np.int32]]  #: type -> [num_nodes] part of each node
    edge_cuts: Mapping[EdgeType, float]  #: fraction of these edges whose ends lie in different parts
    edge_cut: float  #: the same over all edges
    balance: float  #: most nodes of a part / mean nodes of a part, over all types
    options: Mapping[str, Any] = field(default_factory=dict)  #: what the method was told beyond the above


def assign_parts(dataset: Dataset, num_parts: int, method: str = "metis", seed: int = 0) -> PartitionAssignment:
    """Divide the nodes into ``num_parts`` non-empty parts of about equal size, the same for equal arguments.

    `metis` cuts few edges (directed input is symmetrised for it); `random` balances exactly and depends
    on node ids and seed alone. Raises ``PartitionError`` for arguments that cannot be met.
    """
    if method not in METHODS:
        raise PartitionError(f"unknown partition method {method!r}; there are {', '.join(METHODS)}")
    if not 1 <= num_parts <= dataset.num_nodes:
        raise PartitionError(
            f"dataset {dataset.name}: {dataset.num_nodes} nodes cannot be divided into {num_parts} non-empty parts; "
            f"num_parts must be from 1 to the number of nodes"
        )
    if num_parts == 1:
        part = np.zeros(dataset.num_nodes, np.int32)
    elif method == "metis":
        part = _metis(dataset, num_parts, seed)
    else:
        part = _random(dataset.num_nodes, num_parts, seed)
    return PartitionAssignment(method, seed, num_parts, part, _edge_cut(dataset, part), _balance(part, num_parts))


def _metis(dataset: Dataset, num_parts: int, seed: int) -> Array:
    """METIS on the nodes that have edges; the others fill up the smaller parts."""
    indptr, neighbours = symmetric_adjacency(dataset.edge_index, dataset.num_nodes)
    connected = np.flatnonzero(np.diff(indptr))
    part = np.full(dataset.num_nodes, -1, np.int32)
    if len(connected) == dataset.num_nodes:
        part[:] = metis_parts(indptr, neighbours, num_parts, seed)
    elif len(connected):
        compact = np.cumsum(np.diff(indptr) > 0, dtype=np.int32) - np.int32(1)
        indptr = np.concatenate((indptr[connected], indptr[-1:]))
        part[connected] = metis_parts(indptr, compact[neighbours], num_parts, seed)
    isolated = np.flatnonzero(part < 0)
    sizes = np.bincount(part[connected], minlength=num_parts)
    part[isolated] = np.repeat(np.arange(num_parts, dtype=np.int32), _fill_up(sizes, len(isolated)))
    return _without_empty_parts(part, num_parts)


def _fill_up(sizes: Array, extra: int) -> Array:
    """How many of ``extra`` nodes each part gets so that the smallest parts grow to one level first."""
    low, high = 0, int(sizes.max()) + extra
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(level - sizes, 0).sum() <= extra else (low, level - 1)
    shares: Array = np.maximum(low - sizes, 0)
    shares[np.flatnonzero(sizes + shares == low)[: extra - int(shares.sum())]] += 1
    return shares


def _without_empty_parts(part: Array, num_parts: int) -> Array:
    """METIS may leave parts empty on tiny or odd graphs: halve the largest part for each."""
    sizes = np.bincount(part, minlength=num_parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        moved = np.flatnonzero(part == largest)[: sizes[largest] // 2]
        part[moved] = empty
        sizes[largest] -= len(moved)
        sizes[empty] += len(moved)
    return part


def _random(num_nodes: int, num_parts: int, seed: int) -> Array:
    key = np.uint64((seed + 1) * int(GOLDEN) % 2**64)
    order = np.argsort(hashed(np.arange(num_nodes, dtype=np.uint64) + key), kind="stable")
    part = np.empty(num_nodes, np.int32)
    part[order] = np.arange(num_nodes, dtype=np.int64) * num_parts // num_nodes
    return part


def _edge_cut(dataset: Dataset, part: Array) -> float:
    return _count_cut(dataset.edge_index[0], dataset.edge_index[1], part) / max(dataset.num_edges, 1)


@njit(nogil=True, cache=True)
def _count_cut(sources: Array, targets: Array, part: Array) -> int:
    cut = 0
    for edge in range(len(sources)):
        cut += part[sources[edge]] != part[targets[edge]]
    return cut


def _balance(part: Array, num_parts: int) -> float:
    return float(np.bincount(part, minlength=num_parts).max()) * num_parts / len(part)
