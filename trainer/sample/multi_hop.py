"""Many hops: from seeds to the ids and edges of one batch.

A node is asked for its neighbours once, at the hop where it first appears; because a smaller
fanout is a prefix of a larger one, the blocks of later hops are cut from that answer. Only when
a later hop has a larger fanout are earlier nodes asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ids
from trainer.errors import DataError, SettingsError
from trainer.sample import kernels
from trainer.sample.types import GraphAccess, HopRequest, HopSample

Positions = npt.NDArray[np.int32]

_FANOUT_LIMIT = 2**31  # counts are int32


@dataclass(frozen=True)
class HopEdges:
    """Edges first seen at one hop; ids are batch positions."""

    src: Positions  #: int32 [e]
    dst: Positions  #: int32 [e]
    edge_id: Ids | None  #: int64 [e] original edge ids


@dataclass(frozen=True)
class SampledSubgraph:
    """One batch as ids only. Nodes are ordered by first appearance, seeds first."""

    nodes: Ids  #: int64 [n] global ids
    num_seeds: int
    num_sampled_nodes: tuple[int, ...]  #: new nodes per hop, seeds first: [hops + 1]
    fanouts: tuple[int, ...]
    hops: tuple[HopEdges, ...]  #: empty unless edges were asked for
    row_begin: npt.NDArray[np.int64]  #: int64 [targets] where each target's edges begin in ``edges``
    row_count: Positions  #: int32 [targets]
    edges: Positions  #: int32: sources as batch positions

    def block(self, hop: int) -> tuple[Positions, Positions, int]:
        """CSR (indptr, indices, num_src) of one hop: all nodes known before it, their first ``fanout`` edges."""
        num_dst = sum(self.num_sampled_nodes[: hop + 1])
        indptr = np.empty(num_dst + 1, np.int32)
        indices = kernels.block_rows(
            self.row_begin[:num_dst], self.row_count[:num_dst], self.fanouts[hop], self.edges, indptr
        )
        return indptr, indices, num_dst + self.num_sampled_nodes[hop + 1]


class RelabelTable:
    """Direct-address table from global id to batch position; one per thread, reused between batches."""

    def __init__(self, num_nodes: int):
        self.positions = np.full(num_nodes, -1, np.int32)


def sample_multi_hop(
    graph: GraphAccess, seeds: Ids, fanouts: Sequence[int], key: int, table: RelabelTable,
    *, replace: bool = False, edges: bool = False,
) -> SampledSubgraph:  # fmt: skip
    """Sample ``fanouts`` (seeds outward) around ``seeds`` (int64 global ids).

    ``edges`` also lists the edges hop by hop with their ids, as PyG's batches do. Raises
    ``ServiceError`` when an owner does not answer and ``DataError`` for a seed that is no
    node. ``table`` is clean again afterwards.
    """
    check_fanouts(fanouts, replace)
    _check_seeds(seeds, len(table.positions))
    growth = _Growth(seeds, table, edges)
    try:
        for hop, fanout in enumerate(fanouts):
            first = 0 if _needs_more(fanouts, hop) else growth.first_unasked
            nodes = growth.nodes_from(first)
            request = HopRequest(nodes, fanout, _shuffle_of(fanouts, hop), key, replace, edges)
            growth.add(first, graph.sample_hop(request))
    finally:
        growth.clean()
    return growth.finish(tuple(fanouts))


def _needs_more(fanouts: Sequence[int], hop: int) -> bool:
    """Whether nodes asked before this hop may lack neighbours that it wants."""
    before = fanouts[:hop]
    return hop > 0 and -1 not in before and (fanouts[hop] == -1 or fanouts[hop] > max(before))


def _shuffle_of(fanouts: Sequence[int], hop: int) -> int:
    """The largest fanout that may cut a prefix of this hop's picks: a later one's, or an asked-again node's."""
    others = fanouts if _needs_more(fanouts, hop) else fanouts[hop + 1 :]
    return max((fanout for fanout in others if fanout >= 0), default=0)


def check_fanouts(fanouts: Sequence[int], replace: bool) -> None:
    """Raise ``SettingsError`` for fanouts that cannot be sampled.

    Draws with replacement are no prefix of a whole row, so blocks could not share one answer.
    """
    if bad := [fanout for fanout in fanouts if not -1 <= fanout < _FANOUT_LIMIT]:
        raise SettingsError(f"fanout {bad[0]}; it must be below {_FANOUT_LIMIT}, or -1 for all neighbours")
    if replace and -1 in fanouts and any(fanout >= 0 for fanout in fanouts):
        raise SettingsError(
            f"fanouts {list(fanouts)} with replacement: -1 takes whole rows, the others draw from them;"
            " use -1 for every hop, or for none"
        )


def _check_seeds(seeds: Ids, num_nodes: int) -> None:
    bad = np.flatnonzero((seeds < 0) | (seeds >= num_nodes))
    if len(bad):
        raise DataError(f"seed {seeds[bad[0]]} at position {bad[0]} is no node; ids go from 0 to {num_nodes - 1}")


class _Growth:
    """The subgraph while it grows hop by hop."""

    def __init__(self, seeds: Ids, table: RelabelTable, list_edges: bool):
        self._table, self._list_edges = table.positions, list_edges
        self._levels: list[Ids] = [np.asarray(seeds, np.int64)]
        self._hops: list[HopEdges] = []
        self._edges: list[Positions] = []
        self._num_edges = 0
        self._row_begin = np.empty(0, np.int64)
        self._row_count = np.empty(0, np.int32)
        kernels.enter_seeds(self._levels[0], self._table)

    @property
    def first_unasked(self) -> int:
        return len(self._row_count)

    def nodes_from(self, first: int) -> Ids:
        """Global ids of the nodes from position ``first`` on."""
        return np.concatenate(self._levels)[first:] if first == 0 else self._levels[-1]

    def add(self, first: int, sample: HopSample) -> None:
        """Take in the neighbours of the nodes from position ``first`` on."""
        num_nodes = sum(map(len, self._levels))
        local = np.empty(len(sample.src), np.int32)
        new = np.empty(len(sample.src), np.int64)
        found = kernels.relabel(sample.src, self._table, num_nodes, local, new)
        self._levels.append(new[:found])
        if self._list_edges:
            self._hops.append(self._new_edges(first, num_nodes, sample, local))
        self._set_rows(first, sample.counts)
        self._edges.append(local)
        self._num_edges += len(local)

    def _new_edges(self, first: int, num_nodes: int, sample: HopSample, local: Positions) -> HopEdges:
        """Edges not seen at an earlier hop: all of a new node, what exceeds the known prefix of an old one."""
        dst = np.repeat(np.arange(first, num_nodes, dtype=np.int32), sample.counts)
        if first == self.first_unasked:
            return HopEdges(local, dst, sample.edge_id)
        known = np.zeros(num_nodes, np.int32)
        known[: self.first_unasked] = self._row_count
        begins = np.cumsum(sample.counts) - sample.counts
        place = np.arange(len(local)) - np.repeat(begins, sample.counts)
        fresh = place >= known[dst]
        return HopEdges(local[fresh], dst[fresh], None if sample.edge_id is None else sample.edge_id[fresh])

    def _set_rows(self, first: int, counts: Positions) -> None:
        begins = self._num_edges + np.cumsum(counts, dtype=np.int64) - counts
        self._row_begin = np.concatenate([self._row_begin[:first], begins])
        self._row_count = np.concatenate([self._row_count[:first], counts])

    def clean(self) -> None:
        for level in self._levels:
            kernels.forget(level, self._table)

    def finish(self, fanouts: tuple[int, ...]) -> SampledSubgraph:
        return SampledSubgraph(
            nodes=np.concatenate(self._levels),
            num_seeds=len(self._levels[0]),
            num_sampled_nodes=tuple(map(len, self._levels)),
            fanouts=fanouts,
            hops=tuple(self._hops),
            row_begin=self._row_begin,
            row_count=self._row_count,
            edges=np.concatenate([np.empty(0, np.int32), *self._edges]),
        )
