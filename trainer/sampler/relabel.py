"""Maps global ids to batch positions, numbered in the order in which sampling first meets the nodes.

Tables are reused by the batches of a thread and are all zeros between batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.compiled import njit
from trainer.core.rng import GOLDEN, mix
from trainer.core.schema import NodeType
from trainer.sampler import neighbor_kernels
from trainer.sampler.array_ops import NUMPY, ArrayOps
from trainer.sampler.neighbor_kernels import prefetch
from trainer.sampler.types import GraphSchema, NodeSet, Positions

#: Largest number of nodes for a DirectTable: 128 MiB per thread. A HashTable is as fast at this size. With more nodes
#: it is up to a fifth slower on hosts with huge pages and up to a quarter faster on others; its memory depends on the
#: batch (docs/LOG.md).
MOST_DIRECT = 1 << 25

MOST_HASHED = 1 << 32  #: largest number of nodes for a HashTable, whose entries have 32 bits for the id

_IDS_AHEAD = 16  #: number of ids by which entries are prefetched

_CLOSE = 16  #: entries per 64-byte cache line

_FIRST_BITS = 12  #: log2 of the initial number of slots of a hash table

_S32, _LOW, _EMPTY = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)

_jit = njit(boundscheck=False)


class PositionTable(Protocol):
    """A mapping of global ids of one node type to batch positions."""

    def enter(self, seeds: Ids) -> None:
        """Enter each seed with its index as position. A repeated seed keeps its first position."""

    def relabel(self, src: Array, first_new: int, local: Array, new: Array) -> int:
        """Map global ids to positions, numbering new ids from ``first_new`` on, and return the number of new ids.

        Fills ``local`` int32 [len(src)] with positions, and the beginning of ``new`` int64 [len(src)] with the new ids.
        """

    def clean(self, chunks: Sequence[Ids]) -> None:
        """Reset the table to zeros. ``chunks``: arrays that contain all ids entered since the last reset."""


def make_table(num_nodes: int, most_direct: int = MOST_DIRECT) -> PositionTable:
    return HashTable() if most_direct < num_nodes <= MOST_HASHED else DirectTable(num_nodes)


class DirectTable:
    """A table with an entry for every node of the type. Memory: up to 4 bytes per node."""

    def __init__(self, num_nodes: int):
        self._table: npt.NDArray[np.int32] = np.zeros(num_nodes, np.int32)  #: position + 1, 0 for unseen

    def enter(self, seeds: Ids) -> None:
        neighbor_kernels.enter_seeds(read_only(seeds), self._table)

    def relabel(self, src: Array, first_new: int, local: Array, new: Array) -> int:
        found: int = neighbor_kernels.relabel(read_only(src), self._table, first_new, local, new)
        return found

    def clean(self, chunks: Sequence[Ids]) -> None:
        if sum(map(len, chunks)) * _CLOSE > len(self._table):
            self._table.fill(0)
            return
        for chunk in chunks:
            neighbor_kernels.forget(read_only(chunk), self._table)


class HashTable:
    """A hash table with open addressing and linear probing, at most half full. Grows when needed, never shrinks.

    An entry is ``id << 32 | position + 1``, 0 in a free slot. Memory: 16 to 32 bytes per node of the largest batch so
    far.
    """

    def __init__(self) -> None:
        self._slots = free_slots(_FIRST_BITS)
        self._used = 0  #: upper bound of the number of ids in the table

    def enter(self, seeds: Ids) -> None:
        self._make_room(len(seeds))
        _enter(read_only(seeds), self._slots)
        self._used += len(seeds)  # fewer if seeds repeat

    def relabel(self, src: Array, first_new: int, local: Array, new: Array) -> int:
        ids = read_only(src)
        done = found = 0
        while True:
            room = len(self._slots) // 2 - self._used
            done, met = _relabel(ids, done, self._slots, first_new + found, room, local, new[found:])
            found += met
            self._used += met
            if done == len(src):
                return found
            self._make_room(1)

    def clean(self, chunks: Sequence[Ids]) -> None:
        self._slots.fill(0)
        self._used = 0

    def _make_room(self, more: int) -> None:
        if len(self._slots) < 2 * (self._used + more):
            larger = free_slots((2 * (self._used + more) - 1).bit_length())
            _copy(self._slots, larger)
            self._slots = larger


def free_slots(bits: int) -> npt.NDArray[np.uint64]:
    return np.zeros(1 << bits, np.uint64)


@_jit
def _relabel(src: Any, begin: int, slots: Any, first_new: int, room: int, local: Any, new: Any) -> Any:
    """Map ``src[begin:]`` to batch positions as ``PositionTable.relabel`` does, but stop after ``room`` new ids.

    Returns the index in ``src`` at which it stopped, and the number of new ids.
    """
    shift, last = shift_of(slots), len(src) - 1
    found, i = 0, begin
    while i <= last and found < room:
        prefetch(slots, _home(src[min(i + _IDS_AHEAD, last)], shift))
        slot = slot_of(src[i], slots, shift)
        entry = slots[slot]
        unseen = entry == _EMPTY  # always written: a branch would be unpredictable
        position = np.int64(entry & _LOW) + np.int64(unseen) * (first_new + found + 1)
        slots[slot] = np.uint64(src[i]) << _S32 | np.uint64(position)
        new[found] = src[i]
        found += int(unseen)
        local[i] = position - 1
        i += 1
    return i, found


@_jit
def _enter(seeds: Any, slots: Any) -> None:
    shift = shift_of(slots)
    for i in range(len(seeds)):
        slot = slot_of(seeds[i], slots, shift)
        if slots[slot] == _EMPTY:
            slots[slot] = np.uint64(seeds[i]) << _S32 | np.uint64(i + 1)


@_jit
def _copy(slots: Any, larger: Any) -> None:
    shift = shift_of(larger)
    for k in range(len(slots)):
        if slots[k] != _EMPTY:
            larger[slot_of(slots[k] >> _S32, larger, shift)] = slots[k]


@_jit
def slot_of(node: Any, slots: Any, shift: Any) -> Any:
    slot, mask = _home(node, shift), len(slots) - 1
    while (slots[slot] != _EMPTY) & (slots[slot] >> _S32 != np.uint64(node)):
        slot = (slot + 1) & mask
    return slot


@_jit
def _home(node: Any, shift: Any) -> Any:
    return np.int64((np.uint64(node) * GOLDEN) >> shift)


@_jit
def shift_of(slots: Any) -> Any:
    bits = 0
    while (1 << bits) < len(slots):
        bits += 1
    return np.uint64(64 - bits)


#: int64 [2 * capacity]: slot k holds the node at 2k and ``tree << 32 | position + 1`` at 2k + 1, or zeros.
_TreePairs = npt.NDArray[np.int64]


def _empty_pairs(room: int) -> _TreePairs:
    return np.zeros(2 << max(2 * room, 1).bit_length(), np.int64)


@_jit
def _relabel_pairs(
    src: Any, counts: Any, trees: Any, pairs: Any, first_new: int, local: Any, new: Any, new_trees: Any
) -> int:  # fmt: skip
    """Map (node, tree) pairs to batch positions, numbering new pairs from ``first_new`` on. Returns how many are new.

    ``src`` holds global ids: ``counts[0]`` nodes of tree ``trees[0]``, then ``counts[1]`` nodes of ``trees[1]``, and so
    on. ``pairs``: hash table of the known pairs, with room for the new ones. Fills ``local`` int32 [len(src)] with
    positions, and the beginning of ``new`` and ``new_trees`` with the new pairs.
    """
    found = 0
    cursor = 0
    for i in range(len(counts)):
        for _ in range(counts[i]):
            node = np.int64(src[cursor])
            slot = _pair_slot_of(pairs, node, np.int64(trees[i]))
            entry = pairs[2 * slot + 1]
            if entry == 0:
                pairs[2 * slot] = node
                entry = (np.int64(trees[i]) << 32) | (first_new + found + 1)
                pairs[2 * slot + 1] = entry
                new[found] = node
                new_trees[found] = trees[i]
                found += 1
            local[cursor] = (entry & 0xFFFFFFFF) - 1
            cursor += 1
    return found


@_jit
def _copy_pairs(pairs: Any, larger: Any) -> None:
    for k in range(len(pairs) // 2):
        node, entry = pairs[2 * k], pairs[2 * k + 1]
        if entry != 0:
            slot = _pair_slot_of(larger, node, entry >> 32)
            larger[2 * slot] = node
            larger[2 * slot + 1] = entry


@_jit
def _pair_slot_of(pairs: Any, node: Any, tree: Any) -> Any:
    mask = (len(pairs) >> 1) - 1
    slot = np.int64(mix(np.uint64(node) ^ (np.uint64(tree) << np.uint64(40))) & np.uint64(mask))
    while True:
        entry = pairs[2 * slot + 1]
        if entry == 0 or (pairs[2 * slot] == node and entry >> 32 == tree):
            return slot
        slot = (slot + 1) & mask


class RelabelTables:
    ops: ArrayOps = NUMPY

    def __init__(self, schema: GraphSchema, most_direct: int = MOST_DIRECT):
        """``most_direct``: a type with more nodes than this uses a ``HashTable``, others a ``DirectTable``."""
        self._sizes: Mapping[NodeType, int] = {of: spec.num_nodes for of, spec in schema.nodes.items()}
        self._tables: dict[NodeType, PositionTable] = {}
        self._most_direct = most_direct

    def table(self, of: NodeType) -> PositionTable:
        if of not in self._tables:
            self._tables[of] = make_table(self._sizes[of], self._most_direct)
        return self._tables[of]

    def growth(self, of: NodeType, disjoint: bool) -> NodeGrowth:
        return (TreeGrowth if disjoint else NodeGrowth)(of, self)


class NodeGrowth:
    """The nodes of one type in a subgraph that grows hop by hop. Each node occurs once."""

    def __init__(self, of: NodeType, tables: RelabelTables):
        self._of, self._tables = of, tables
        self._ids: list[Ids] = []
        self._count = 0
        self._ops = tables.ops
        self.level_starts = [0]  #: position of the first node of each hop, seeds first; the last hop is still growing

    def enter(self, seeds: Ids, _first_tree: int) -> None:
        """Add the seeds. A repeated seed keeps the position of its first occurrence."""
        self._add_chunk(seeds)
        self._tables.table(self._of).enter(seeds)

    def meet(self, src: Array, _counts: Positions, _trees: Positions | None) -> Positions:
        """Return the batch position of each node in ``src``, int32. New nodes are appended to the subgraph."""
        local = np.empty(len(src), np.int32)
        new = slabs.empty(len(src), np.int64)
        found = self._tables.table(self._of).relabel(src, self._count, local, new)
        self._add_chunk(new[:found])
        return local

    def close_level(self) -> None:
        """End the current hop (or the seeds). Nodes added from now on belong to the next hop."""
        self.level_starts.append(self._count)

    def since(self, first: int) -> Ids:
        """Return the global ids of the nodes from position ``first`` on.

        The node at ``first`` must be the first node of a hop.
        """
        return _from(self._ids, first, np.int64, self._ops)

    def trees_since(self, _first: int) -> Positions | None:
        """Return the trees of the nodes from position ``first`` on, or None if sampling is not disjoint."""
        return None

    def clean(self) -> None:
        self._tables.table(self._of).clean(self._ids)

    def finish(self) -> NodeSet:
        per_hop = tuple(int(count) for count in np.diff(self.level_starts))
        return NodeSet(self.since(0), per_hop, self.trees_since(0))

    def _add_chunk(self, ids: Ids) -> None:
        self._ids.append(ids)
        self._count += len(ids)


class TreeGrowth(NodeGrowth):
    """``NodeGrowth`` for disjoint sampling: each node occurs once per tree."""

    def __init__(self, of: NodeType, tables: RelabelTables):
        super().__init__(of, tables)
        self._trees: list[Positions] = []
        self._pairs = _empty_pairs(0)

    def enter(self, seeds: Ids, first_tree: int) -> None:
        self.meet(seeds, np.ones(len(seeds), np.int32), np.arange(first_tree, first_tree + len(seeds), dtype=np.int32))

    def meet(self, src: Array, counts: Positions, trees: Positions | None) -> Positions:
        if len(self._pairs) < 4 * (self._count + len(src)):
            larger = _empty_pairs(self._count + len(src))
            _copy_pairs(self._pairs, larger)
            self._pairs = larger
        local = np.empty(len(src), np.int32)
        new, new_trees = np.empty(len(src), np.int64), np.empty(len(src), np.int32)
        assert trees is not None
        found = _relabel_pairs(
            read_only(src), read_only(counts), read_only(trees), self._pairs, self._count, local, new, new_trees
        )
        self._add_chunk(new[:found])
        self._trees.append(new_trees[:found])
        return local

    def trees_since(self, first: int) -> Positions | None:
        return _from(self._trees, first, np.int32, self._ops)

    def clean(self) -> None: ...


def _from(chunks: list[Array], first: int, dtype: type, ops: ArrayOps) -> Array:
    # A chunk must begin at ``first``.
    begins = np.cumsum([0, *map(len, chunks)])
    rest = [chunk for chunk, begin in zip(chunks, begins, strict=False) if begin >= first]
    return rest[0] if len(rest) == 1 else ops.concatenate(rest, dtype)
