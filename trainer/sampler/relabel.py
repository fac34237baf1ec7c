"""Batch positions: the nodes of each type in the order in which sampling first meets them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.schema import NodeType
from trainer.sampler import pairs
from trainer.sampler.position_tables import MOST_DIRECT, PositionTable, make_table
from trainer.sampler.subgraph import NodeSet, Positions
from trainer.sampler.types import GraphSchema


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
        self._pairs = pairs.empty(0)

    def enter(self, seeds: Ids, first_tree: int) -> None:
        """Take in the seeds, each the root of a tree."""
        self.meet(seeds, np.ones(len(seeds), np.int32), np.arange(first_tree, first_tree + len(seeds), dtype=np.int32))

    def meet(self, src: Array, counts: Positions, trees: Positions | None) -> Positions:
        self._pairs = pairs.with_room(self._pairs, self._count, len(src))
        local = np.empty(len(src), np.int32)
        new, new_trees = np.empty(len(src), np.int64), np.empty(len(src), np.int32)
        assert trees is not None
        found = pairs.relabel(
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
