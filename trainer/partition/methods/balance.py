"""Moves nodes between parts: first until each class of nodes is balanced, then to cut fewer edges.

Each node belongs to one class, by its type, by whether it is a train seed, or by both. Each class has bounds on the
number of its nodes in a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, id_dtype
from trainer.core.compiled import njit
from trainer.core.row_sort import Scratch
from trainer.core.schema import NodeType
from trainer.data.dataset import Dataset
from trainer.data.edges import joint_adjacency

Part = npt.NDArray[np.int32]


@dataclass(frozen=True)
class JoinedNodes:
    """Numbers the nodes of all types consecutively: those of the first type, then those of the second, and so on."""

    starts: Mapping[NodeType, int]  #: number of the first node of each type
    total: int  #: nodes of all types

    @classmethod
    def of(cls, dataset: Dataset) -> JoinedNodes:
        starts, total = {}, 0
        for node_type, nodes in dataset.nodes.items():
            starts[node_type] = total
            total += nodes.num_nodes
        return cls(starts, total)

    def split(self, values: Array) -> dict[NodeType, Array]:
        ends = [*list(self.starts.values())[1:], self.total]
        return {of: values[start:end] for (of, start), end in zip(self.starts.items(), ends, strict=True)}


def joined_adjacency(dataset: Dataset, joined: JoinedNodes, scratch: Scratch | None = None) -> tuple[Array, Array]:
    """Build a CSR of the edges of all types in both directions, without self loops and duplicates.

    Returns ``indptr`` int64 [total + 1] and ``neighbours`` int32|int64 [nnz]. With ``scratch``, ``neighbours`` is
    memory-mapped.
    """
    lists = [(edges.edge_index, joined.starts[of[0]], joined.starts[of[2]]) for of, edges in dataset.edges.items()]
    return joint_adjacency(lists, joined.total, id_dtype(joined.total), scratch)


SLACK = 0.03  #: allowed deviation from the mean part size; METIS's default for many parts

_ROUNDS = 4  #: overfull parts are emptied in this many steps, with the cheapest moves of a step first

_REFINE_PASSES = 3

TRAIN = "train"  #: the split whose nodes count as seeds


@dataclass(frozen=True)
class NodeClasses:
    """The class of every node, and the fewest and most nodes of each class that a part may have."""

    of: Array  #: int32 [total], the class of each node
    count: Array  #: int64 [classes], nodes of each class
    least: Array  #: int64 [classes], fewest nodes of the class in a part
    most: Array  #: int64 [classes], most nodes of the class in a part

    def sizes(self, part: Part, num_parts: int) -> Array:
        """Count the nodes of each class in each part, int64 [classes, num_parts].

        ``part``: the part of each node; a node that is not assigned yet has -1 and is not counted.
        """
        placed = part >= 0
        cells = self.of[placed].astype(np.int64) * num_parts + part[placed]
        return np.bincount(cells, minlength=len(self.count) * num_parts).reshape(-1, num_parts)


def node_classes(
    dataset: Dataset, joined: JoinedNodes, num_parts: int, balance: str, slack: float = SLACK
) -> NodeClasses:
    """Divide the nodes into classes, and compute the bounds of each class.

    ``balance``, such as ``types+seeds``, states what distinguishes classes: the node type, being a train seed, or both.
    The bounds are (1 - slack) and (1 + slack) times the mean number of nodes of the class in a part.
    """
    of = np.zeros(joined.total, np.int32)
    own = joined.split(of)
    for number, (node_type, nodes) in enumerate(dataset.nodes.items()):
        base = 2 * number if "types" in balance else 0
        own[node_type] += np.int32(base)
        if "seeds" in balance and TRAIN in nodes.splits:
            own[node_type][nodes.splits[TRAIN]] = 2 * number + 1
    _, classes, count = np.unique(of, return_inverse=True, return_counts=True)
    mean = count / num_parts
    least = np.minimum(np.floor(mean), np.ceil(mean * (1 - slack))).astype(np.int64)
    most = np.maximum(np.ceil(mean), np.floor(mean * (1 + slack))).astype(np.int64)
    return NodeClasses(classes.astype(np.int32), count, least, most)


def fill_up(part: Part, classes: NodeClasses, num_parts: int) -> None:
    """Assign the unassigned nodes (part -1), in place, to the parts with the fewest nodes of their class."""
    sizes = classes.sizes(part, num_parts)
    unplaced = np.flatnonzero(part < 0)
    for number in range(len(classes.count)):
        nodes = unplaced[classes.of[unplaced] == number]
        if len(nodes):
            part[nodes] = np.repeat(np.arange(num_parts, dtype=np.int32), _levelled(sizes[number], len(nodes)))


def _levelled(sizes: Array, extra: int) -> Array:
    """Divide ``extra`` nodes among parts of the given sizes so that the smallest parts grow first."""
    low, high = 0, int(sizes.max()) + extra
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.maximum(level - sizes, 0).sum() <= extra else (low, level - 1)
    shares: Array = np.maximum(low - sizes, 0)
    shares[np.flatnonzero(sizes + shares == low)[: extra - int(shares.sum())]] += 1
    return shares


def balance_parts(indptr: Array, neighbours: Array, part: Part, classes: NodeClasses, num_parts: int) -> None:
    """Move nodes between parts, in place: first until each class is within its bounds, then to cut fewer edges.

    ``indptr`` and ``neighbours`` are the CSR of a symmetric graph.
    """
    sizes = classes.sizes(part, num_parts)
    for step in range(_ROUNDS, 0, -1):
        keep = classes.most[:, None] + np.maximum(sizes - classes.most[:, None], 0) * (step - 1) // step
        _move(indptr, neighbours, part, classes.of, sizes, keep, classes.most)
    least, most = classes.least, classes.most
    _move(indptr, neighbours, part, classes.of, sizes, np.broadcast_to(least[:, None], sizes.shape), least)
    _refine(indptr, neighbours, part, classes.of, sizes, least, most, _REFINE_PASSES)


def _move(
    indptr: Array, neighbours: Array, part: Part, of: Array, sizes: Array, keep: Array, room: Array
) -> None:  # fmt: skip
    receivers = np.less(sizes, room[:, None])
    donors = np.greater(sizes, keep) & receivers.any(axis=1, keepdims=True)
    if not donors.any():
        return
    nodes = np.flatnonzero(donors[of, part])
    gains = _gains(indptr, neighbours, part, of, receivers, nodes)
    _move_in_order(indptr, neighbours, part, of, sizes, keep, room, nodes[np.argsort(-gains, kind="stable")])


@njit()
def _gains(indptr: Array, neighbours: Array, part: Array, of: Array, receivers: Array, nodes: Array) -> Array:
    """Return the gain of each of ``nodes``, int64 [nodes]: the decrease of the edge cut if this node alone moves.

    A node moves to the part with the highest gain. ``receivers``, bool [classes, num_parts]: the parts that may receive
    nodes of each class. ``part`` [N]: part of each node. ``of`` [N]: class of each node.
    """
    gains = np.zeros(len(nodes), np.int64)
    links = np.zeros(receivers.shape[1], np.int64)
    for position in range(len(nodes)):
        node = nodes[position]
        begin, end = indptr[node], indptr[node + 1]
        for slot in range(begin, end):
            links[part[neighbours[slot]]] += 1
        best = 0
        for slot in range(begin, end):
            other = part[neighbours[slot]]
            if receivers[of[node], other]:
                best = max(best, links[other])
        gains[position] = best - links[part[node]]
        for slot in range(begin, end):
            links[part[neighbours[slot]]] = 0
    return gains


@njit()
def _move_in_order(
    indptr: Array, neighbours: Array, part: Array, of: Array, sizes: Array, keep: Array, room: Array, nodes: Array
) -> None:
    num_parts = sizes.shape[1]
    links = np.zeros(num_parts, np.int64)
    for node in nodes:
        kind, own = of[node], part[node]
        if sizes[kind, own] <= keep[kind, own]:
            continue
        begin, end = indptr[node], indptr[node + 1]
        for slot in range(begin, end):
            links[part[neighbours[slot]]] += 1
        best = -1
        for other in range(num_parts):
            if other != own and sizes[kind, other] < room[kind]:
                better = best < 0 or links[other] > links[best]
                if better or (links[other] == links[best] and sizes[kind, other] < sizes[kind, best]):
                    best = other
        for slot in range(begin, end):
            links[part[neighbours[slot]]] = 0
        if best >= 0:
            part[node] = best
            sizes[kind, own] -= 1
            sizes[kind, best] += 1


@njit()
def _refine(
    indptr: Array, neighbours: Array, part: Array, of: Array, sizes: Array, least: Array, most: Array, passes: int
) -> None:
    links = np.zeros(sizes.shape[1], np.int64)
    for _ in range(passes):
        for node in range(len(part)):
            kind, own = of[node], part[node]
            if sizes[kind, own] <= least[kind]:
                continue
            begin, end = indptr[node], indptr[node + 1]
            for slot in range(begin, end):
                links[part[neighbours[slot]]] += 1
            best = own
            for slot in range(begin, end):
                other = part[neighbours[slot]]
                if links[other] > links[best] and sizes[kind, other] < most[kind]:
                    best = other
            for slot in range(begin, end):
                links[part[neighbours[slot]]] = 0
            part[node] = best
            sizes[kind, own] -= 1
            sizes[kind, best] += 1
