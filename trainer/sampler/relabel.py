"""Batch positions of nodes, in the order in which sampling first meets them.

``DirectTable`` or ``HashTable`` by the number of nodes; for disjoint sampling a hash table of (node, tree) pairs.
Tables belong to one thread, which uses them again and again; between batches they are all zeros.
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
from trainer.sampler.neighbor_kernels import prefetch
from trainer.sampler.types import GraphSchema, NodeSet, Positions

#: Nodes up to which a table has an entry for each: 128 MiB a thread. A hash table takes as long around there, and with
#: more nodes up to a fifth longer on hosts with huge pages, up to a quarter shorter on others; its memory goes by the
#: batch (docs/LOG.md).
MOST_DIRECT = 1 << 25

MOST_HASHED = 1 << 32  #: nodes; an entry has 32 bits for the id

_IDS_AHEAD = 16  #: how far ahead of its use an id's entry is fetched

_CLOSE = 16  #: entries to a node; a line of 64 bytes holds as many

_FIRST_BITS = 12  #: of the number of slots that a hash table begins with

_S32, _LOW, _EMPTY = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)

_jit = njit(boundscheck=False)


class PositionTable(Protocol):
    """Positions of the nodes of one type."""

    def enter(self, seeds: Ids) -> None:
        """Give each seed its place as position; a repeated seed keeps its first."""

    def relabel(self, src: Array, first_new: int, local: Array, new: Array) -> int:
        """Map global ids to positions, giving unseen ones the next from ``first_new`` on; return how many were new.

        Fills ``local`` int32 [len(src)] with positions and the beginning of ``new`` int64 [len(src)] with unseen ids.
        """

    def clean(self, chunks: Sequence[Ids]) -> None:
        """All zeros again; ``chunks`` hold all ids entered since it was."""

    def holds_any(self) -> bool:
        """Whether it is not all zeros."""


def make_table(num_nodes: int, most_direct: int = MOST_DIRECT) -> PositionTable:
    """The kind of table for a type with so many nodes."""
    return HashTable() if most_direct < num_nodes <= MOST_HASHED else DirectTable(num_nodes)


class DirectTable:
    """An entry for every node. Memory: 4 bytes a node, all of it once batches have been large."""

    def __init__(self, num_nodes: int):
        self._table: npt.NDArray[np.int32] = np.zeros(num_nodes, np.int32)  #: position + 1, 0 for unseen

    def enter(self, seeds: Ids) -> None:
        neighbor_kernels.enter_seeds(read_only(seeds), self._table)

    def relabel(self, src: Array, first_new: int, local: Array, new: Array) -> int:
        found: int = neighbor_kernels.relabel(read_only(src), self._table, first_new, local, new)
        return found

    def clean(self, chunks: Sequence[Ids]) -> None:
        """All of it is wiped where the nodes lie so close that most of its lines hold one."""
        if sum(map(len, chunks)) * _CLOSE > len(self._table):
            self._table.fill(0)
            return
        for chunk in chunks:
            neighbor_kernels.forget(read_only(chunk), self._table)

    def holds_any(self) -> bool:
        return bool(self._table.any())


class HashTable:
    """Open addressing with linear probing, at most half full; grows and stays as large as the largest batch needed.

    An entry is ``id << 32 | position + 1``, 0 where the slot is free. Memory: 16 to 32 bytes a node of that batch.
    """

    def __init__(self) -> None:
        self._slots = free_slots(_FIRST_BITS)
        self._used = 0  #: ids in it, at most

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def enter(self, seeds: Ids) -> None:
        self._make_room(len(seeds))
        _enter(read_only(seeds), self._slots)
        self._used += len(seeds)  # or fewer

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
        """All of it is wiped, which costs a memory's width and no look at the ids."""
        self._slots.fill(0)
        self._used = 0

    def holds_any(self) -> bool:
        return bool(self._slots.any())

    def _make_room(self, more: int) -> None:
        """For so many ids besides those it has."""
        if len(self._slots) < 2 * (self._used + more):
            larger = free_slots((2 * (self._used + more) - 1).bit_length())
            _copy(self._slots, larger)
            self._slots = larger


def free_slots(bits: int) -> npt.NDArray[np.uint64]:
    """An empty hash table with ``2**bits`` slots."""
    return np.zeros(1 << bits, np.uint64)


@_jit
def _relabel(src: Any, begin: int, slots: Any, first_new: int, room: int, local: Any, new: Any) -> Any:
    """As ``PositionTable.relabel``, from ``src[begin]`` on until ``room`` were new: (where it stopped, how many)."""
    shift, last = shift_of(slots), len(src) - 1
    found, i = 0, begin
    while i <= last and found < room:
        prefetch(slots, _home(src[min(i + _IDS_AHEAD, last)], shift))
        slot = slot_of(src[i], slots, shift)
        entry = slots[slot]
        unseen = entry == _EMPTY  # written either way: whether a node is new cannot be foretold
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
    """Where the node is, or would go."""
    slot, mask = _home(node, shift), len(slots) - 1
    while (slots[slot] != _EMPTY) & (slots[slot] >> _S32 != np.uint64(node)):
        slot = (slot + 1) & mask
    return slot


@_jit
def _home(node: Any, shift: Any) -> Any:
    """Where the search for a node begins: the highest bits of its product with the golden ratio."""
    return np.int64((np.uint64(node) * GOLDEN) >> shift)


@_jit
def shift_of(slots: Any) -> Any:
    """What leaves as many bits of 64 as number the slots."""
    bits = 0
    while (1 << bits) < len(slots):
        bits += 1
    return np.uint64(64 - bits)


#: int64 [2 * capacity]: slot k holds the node at 2k and ``tree << 32 | position + 1`` at 2k + 1, or zeros.
TreePairs = npt.NDArray[np.int64]


def _empty_pairs(room: int) -> TreePairs:
    """A set for ``room`` pairs; it is at most half full."""
    return np.zeros(2 << max(2 * room, 1).bit_length(), np.int64)


def _pairs_with_room(pairs: TreePairs, used: int, more: int) -> TreePairs:
    """The set itself, or a larger one that has room for ``more`` pairs besides the ``used``."""
    if len(pairs) >= 4 * (used + more):
        return pairs
    larger = _empty_pairs(used + more)
    _copy_pairs(pairs, larger)
    return larger


@_jit
def _relabel_pairs(
    src: Any, counts: Any, trees: Any, pairs: Any, first_new: int, local: Any, new: Any, new_trees: Any
) -> int:  # fmt: skip
    """Map (tree of the row, global id) to batch positions, giving unseen ones the next; return how many were new.

    Row i has ``counts[i]`` of the ``src`` and is in ``trees[i]``. Fills ``local`` int32 [len(src)], ``new``
    and ``new_trees``.
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
    """Where the pair is, or would go."""
    mask = (len(pairs) >> 1) - 1
    slot = np.int64(mix(np.uint64(node) ^ (np.uint64(tree) << np.uint64(40))) & np.uint64(mask))
    while True:
        entry = pairs[2 * slot + 1]
        if entry == 0 or (pairs[2 * slot] == node and entry >> 32 == tree):
            return slot
        slot = (slot + 1) & mask


class RelabelTables:
    """Tables from global id to batch position, one per node type met. For one thread; clean between batches."""

    def __init__(self, schema: GraphSchema, most_direct: int = MOST_DIRECT):
        """``most_direct``: nodes of a type up to which its table has an entry for each."""
        self._sizes: Mapping[NodeType, int] = {of: spec.num_nodes for of, spec in schema.nodes.items()}
        self._tables: dict[NodeType, PositionTable] = {}
        self._most_direct = most_direct

    def table(self, of: NodeType) -> PositionTable:
        """Of one type, made when it is first asked for."""
        if of not in self._tables:
            self._tables[of] = make_table(self._sizes[of], self._most_direct)
        return self._tables[of]


class NodeGrowth:
    """The nodes of one type while a subgraph grows; a node is itself."""

    def __init__(self, of: NodeType, tables: RelabelTables):
        self._of, self._tables = of, tables
        self._ids: list[Ids] = []
        self._count = 0
        self.level_starts = [0]  #: where the nodes of each hop begin, seeds first; the last hop is open

    def enter(self, seeds: Ids, _first_tree: int) -> None:
        """Take in the seeds; a repeated one is met at its first place."""
        self._add_chunk(seeds)
        self._tables.table(self._of).enter(seeds)

    def meet(self, src: Array, _counts: Positions, _trees: Positions | None) -> Positions:
        """Positions of ``src`` (int32), new nodes being appended."""
        local = np.empty(len(src), np.int32)
        new = slabs.empty(len(src), np.int64)
        found = self._tables.table(self._of).relabel(src, self._count, local, new)
        self._add_chunk(new[:found])
        return local

    def close_level(self) -> None:
        """What comes from here on belongs to the next hop."""
        self.level_starts.append(self._count)

    def since(self, first: int) -> Ids:
        """Global ids of the nodes from position ``first`` on; a position where a hop begins."""
        return _from(self._ids, first, np.int64)

    def trees_since(self, _first: int) -> Positions | None:
        """Their trees, when disjoint."""
        return None

    def clean(self) -> None:
        """Make the table all zeros again."""
        self._tables.table(self._of).clean(self._ids)

    def finish(self) -> NodeSet:
        per_hop = tuple(int(count) for count in np.diff(self.level_starts))
        return NodeSet(self.since(0), per_hop, self.trees_since(0))

    def _add_chunk(self, ids: Ids) -> None:
        self._ids.append(ids)
        self._count += len(ids)


class TreeGrowth(NodeGrowth):
    """The same for disjoint sampling: a node is itself in one tree."""

    def __init__(self, of: NodeType, tables: RelabelTables):
        super().__init__(of, tables)
        self._trees: list[Positions] = []
        self._pairs = _empty_pairs(0)

    def enter(self, seeds: Ids, first_tree: int) -> None:
        """Take in the seeds, each the root of a tree."""
        self.meet(seeds, np.ones(len(seeds), np.int32), np.arange(first_tree, first_tree + len(seeds), dtype=np.int32))

    def meet(self, src: Array, counts: Positions, trees: Positions | None) -> Positions:
        self._pairs = _pairs_with_room(self._pairs, self._count, len(src))
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
        return _from(self._trees, first, np.int32)

    def clean(self) -> None:
        """The pairs are not kept."""


def _from(chunks: list[Array], first: int, dtype: type) -> Array:
    """The chunks from position ``first`` on, which is where one begins."""
    begins = np.cumsum([0, *map(len, chunks)])
    rest = [chunk for chunk, begin in zip(chunks, begins, strict=False) if begin >= first]
    return rest[0] if len(rest) == 1 else np.concatenate([np.empty(0, dtype), *rest])
