"""Samples all hops of a batch: the node ids and edges of a subgraph around the seeds.

The neighbours of a node are requested once per edge type, in the hop after the node was added, and again only if a
later hop has a larger fanout. A later hop with a smaller fanout f needs no request: its neighbours are the first f
neighbours of the earlier answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import EdgeType, NodeType, edge_salt
from trainer.sampler.array_ops import ArrayOps
from trainer.sampler.relabel import NodeGrowth
from trainer.sampler.rules import rule_schema
from trainer.sampler.settings import bound_here, check_settings
from trainer.sampler.types import (
    EdgeRanges,
    EdgeSet,
    GraphSchema,
    HopRequest,
    HopSample,
    Positions,
    SampledSubgraph,
    SampleSettings,
    SeedSet,
    TimeBound,
)


class _NodeTables(Protocol):
    """Maps global ids to batch positions: ``RelabelTables``, or tables on a device."""

    ops: ArrayOps  #: for the arrays of requests, answers and subgraphs

    def growth(self, of: NodeType, disjoint: bool) -> NodeGrowth:
        """Return an empty set of sampled nodes of one type.

        ``disjoint``: whether the set may contain a node several times, once per tree.
        """


class HopSource(Protocol):
    """The part of ``GraphAccess`` that ``sample_multi_hop`` uses."""

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]: ...


def sample_multi_hop(
    graph: HopSource, schema: GraphSchema, seeds: SeedSet, settings: SampleSettings, key: int, tables: _NodeTables,
    orig_edges: Collection[EdgeType] = (),
) -> SampledSubgraph:  # fmt: skip
    """Sample a subgraph around ``seeds``, which has numpy arrays.

    ``tables``: maps global ids to batch positions, and can be reused. Tables on the CPU must be all zeros before the
    call, and are reset to zeros after it. ``tables.ops`` decides whether requests, answers and the result have numpy
    arrays or tensors. ``orig_edges``: edge types whose edge ids, if requested, are returned as original ids. Not
    possible on a device.

    Raises:
        ServiceError: A host that is needed does not answer.
        DataError: A seed is not a node, or a weight is negative or not finite.
        SettingsError: The settings do not fit the graph (``check_settings``), or temporal seeds have no times.
    """
    check_settings(schema, settings)
    for of, ids in seeds.nodes.items():
        if of not in schema.nodes:
            raise DataError(f"seeds: the graph has no node type {of!r}; it has {list(schema.nodes)}")
        num_nodes = schema.nodes[of].num_nodes
        bad = np.flatnonzero((ids < 0) | (ids >= num_nodes))
        if len(bad):
            raise DataError(f"seed {ids[bad[0]]} at position {bad[0]} is not a node; ids go from 0 to {num_nodes - 1}")
        if settings.time is not None and of not in seeds.times:
            raise SettingsError(f"temporal sampling needs a time for each seed of {of!r}; pass times with the seeds")
    for edge_type, ends in seeds.exclude.items():  # of clients, too; a rule numbers these nodes
        for of, ids in zip(edge_type[::-2], ends, strict=True):
            if of in schema.nodes and len(ids) and not 0 <= ids.min() <= ids.max() < schema.nodes[of].num_nodes:
                raise DataError(f"excluded edges of {edge_type} have ends that are no {of!r} nodes")
    if settings.rule is not None:
        schema = rule_schema(schema, settings.fanouts)
    growth = _SubgraphGrowth(schema, seeds, settings, key, tables, orig_edges)
    try:
        for hop in range(settings.num_hops):
            growth.grow(graph, hop)
        return growth.induce(graph) if settings.induced else growth.finish()
    finally:
        growth.clean()


def cut_block(subgraph: SampledSubgraph, edge_type: EdgeType, hop: int) -> tuple[Positions, Positions, int]:
    """Return the block of one edge type and hop as CSR: indptr, indices and the number of sources.

    Each row is a target, each index a source, as int32 batch positions. Targets are all nodes that the subgraph had
    before the hop. Each target has up to ``fanouts[hop]`` edges. Sources are all nodes that the subgraph had after the
    hop. In an induced subgraph, the block of every hop has all nodes and edges.
    """
    src_per_hop = subgraph.nodes[edge_type[0]].per_hop
    num_src = sum(src_per_hop) if subgraph.induced else sum(src_per_hop[: hop + 2])
    return *_block_rows(subgraph, edge_type, hop, subgraph.edges[edge_type].src), num_src


def block_edges(subgraph: SampledSubgraph, edge_type: EdgeType, hop: int) -> Positions:
    """Return for each edge of a block its position in the subgraph's edge arrays, int32."""
    return _block_rows(subgraph, edge_type, hop, subgraph.ops.arange(len(subgraph.edges[edge_type].src)))[1]


def _block_rows(
    subgraph: SampledSubgraph, edge_type: EdgeType, hop: int, values: Positions
) -> tuple[Positions, Positions]:  # fmt: skip
    edges, dst_per_hop = subgraph.edges[edge_type], subgraph.nodes[edge_type[2]].per_hop
    if subgraph.induced:
        num_dst, fanout = sum(dst_per_hop), -1
    else:
        num_dst, fanout = sum(dst_per_hop[: hop + 1]), edges.fanouts[hop]
    begin, count = edges.row_begin, edges.row_count
    if edges.whole is not None and fanout < 0:
        begin, count = edges.whole.begin, edges.whole.count
    return subgraph.ops.block_rows(begin[:num_dst], count[:num_dst], fanout, values)


@dataclass(frozen=True)
class _HopQuery:
    edge_type: EdgeType
    fanout: int
    first: int  #: position of the first target; all later known targets follow
    shuffle: int
    whole: bool  #: whether the answer is stored in the table of whole rows


class _SubgraphGrowth:
    def __init__(
        self, schema: GraphSchema, seeds: SeedSet, settings: SampleSettings, key: int, tables: _NodeTables,
        orig_edges: Collection[EdgeType],
    ):  # fmt: skip
        self._orig_edges, self._schema, self._settings, self._seeds, self._key = (
            orig_edges,
            schema,
            settings,
            seeds,
            key,
        )
        self._ops, ops = tables.ops, tables.ops
        disjoint = settings.disjoint or settings.time is not None
        self._nodes = {of: tables.growth(of, disjoint) for of in schema.nodes}
        none = (0,) * settings.num_hops
        self._edges = {of: _EdgeGrowth(settings.fanouts.get(of, none), ops) for of in schema.edges}
        self._tree_keys = ops.own(_tree_keys(seeds)) if disjoint else None
        self._tree_times = None if settings.time is None else ops.own(_tree_times(seeds))
        num_trees = 0
        for of, ids in seeds.nodes.items():
            self._nodes[of].enter(ops.own(np.asarray(ids, np.int64)), num_trees)
            num_trees += len(ids)
        self._close_level()

    def grow(self, graph: HopSource, hop: int) -> None:
        queries = [query for of in self._edges if (query := self._query(of, hop))]
        trees = [self._nodes[q.edge_type[2]].trees_since(q.first) for q in queries]
        samples = graph.sample_hops([self._request(q, t) for q, t in zip(queries, trees, strict=True)])
        for query, rows, sample in zip(queries, trees, samples, strict=True):
            local = self._nodes[query.edge_type[0]].meet(sample.src, sample.counts, rows)
            self._edges[query.edge_type].add(query, hop, sample, local)
        self._close_level()

    def induce(self, graph: HopSource) -> SampledSubgraph:
        ids = {of: nodes.since(0) for of, nodes in self._nodes.items()}
        distinct = {of: np.unique(values) for of, values in ids.items()}
        asked = [of for of in self._edges if len(ids[of[0]]) and len(ids[of[2]])]
        requests = [
            HopRequest(
                of, ids[of[2]], -1, 0, self._key_of(of), with_edge=self._settings.edge_ids,
                orig_edge=of in self._orig_edges, exclude=self._seeds.exclude.get(of), sources=distinct[of[0]],
            )
            for of in asked
        ]  # fmt: skip
        fanouts = (-1,) * max(1, self._settings.num_hops)
        self._edges = {of: _EdgeGrowth(fanouts, self._ops) for of in self._edges}
        for of, sample in zip(asked, graph.sample_hops(requests), strict=True):
            local = self._nodes[of[0]].meet(sample.src, sample.counts, None)
            self._edges[of].add(_HopQuery(of, -1, 0, 0, False), 0, sample, local)
        return SampledSubgraph(
            self._settings.num_hops,
            {of: nodes.finish() for of, nodes in self._nodes.items()},
            {of: edges.finish(len(ids[of[2]]), self._settings.edge_ids, ()) for of, edges in self._edges.items()},
            induced=True,
            ops=self._ops,
        )

    def finish(self) -> SampledSubgraph:
        last = self._settings.num_hops
        targets = {of: nodes.level_starts[last] for of, nodes in self._nodes.items()}
        return SampledSubgraph(
            last,
            {of: nodes.finish() for of, nodes in self._nodes.items()},
            {
                of: edges.finish(
                    targets[of[2]], self._settings.edge_ids, edges.per_hop(), self._settings.rule is not None
                )
                for of, edges in self._edges.items()
            },
            ops=self._ops,
        )

    def clean(self) -> None:
        for nodes in self._nodes.values():
            nodes.clean()

    def _close_level(self) -> None:
        for nodes in self._nodes.values():
            nodes.close_level()

    def _query(self, of: EdgeType, hop: int) -> _HopQuery | None:
        fanouts = self._edges[of].fanouts
        fanout = fanouts[hop]
        starts = self._nodes[of[2]].level_starts
        if fanout == 0:
            return None
        if not self._settings.ask_again:
            first, shuffle, whole_rows = starts[hop], _shuffle_of(fanouts, hop, hop), False
        else:
            whole_rows, same_kind = False, fanouts
            if self._settings.replace:  # draws with replacement are no prefix of all neighbours
                whole_rows = fanout < 0 and any(other > 0 for other in fanouts)
                same_kind = tuple(other if (other < 0) == (fanout < 0) else 0 for other in fanouts)
            level = _first_lacking(same_kind, hop)
            first, shuffle = starts[level], _shuffle_of(same_kind, hop, level)
        return _HopQuery(of, fanout, first, shuffle, whole_rows) if first < starts[hop + 1] else None

    def _request(self, query: _HopQuery, trees: Positions | None) -> HopRequest:
        of, settings, time, bound = query.edge_type, self._settings, self._settings.time, None
        weighted = settings.weight in self._schema.edges[of].attrs
        if trees is not None and self._tree_times is not None:
            if time is not None and (settings.rule is not None or bound_here(time, self._schema.edges[of])):
                bound = TimeBound(self._tree_times[trees], time.attr, time.on, time.last)
        return HopRequest(
            edge_type=of,
            nodes=self._nodes[of[2]].since(query.first),
            fanout=query.fanout,
            shuffle=query.shuffle,
            key=self._key_of(of),
            replace=settings.replace,
            with_edge=settings.edge_ids,
            orig_edge=of in self._orig_edges,
            trees=None if trees is None or self._tree_keys is None else self._tree_keys[trees],
            bound=bound,
            weight=settings.weight if weighted else None,
            top=settings.top and weighted,
            exclude=self._seeds.exclude.get(of),
        )

    def _key_of(self, of: EdgeType) -> int:
        return self._key ^ edge_salt(of)


class _EdgeGrowth:
    def __init__(self, fanouts: tuple[int, ...], ops: ArrayOps):
        self.fanouts, self._ops = fanouts, ops
        self._src: list[Positions] = []
        self._edge: list[Array] = []
        self._scores: list[Array] = []
        self._hops: list[Array] = []
        self._num_edges = 0
        self._drawn = self._whole = EdgeRanges(ops.zeros(0, np.int64), ops.zeros(0, np.int32))
        self._requested_again = False
        self._per_hop = [0] * len(fanouts)

    def add(self, query: _HopQuery, hop: int, sample: HopSample, local: Positions) -> None:
        known, ops = self._whole if query.whole else self._drawn, self._ops
        self._requested_again |= query.whole or query.first < len(known.count)
        begins, kept = ops.begins(sample.counts, self._num_edges), self._padded(known, query.first)
        rows = EdgeRanges(
            ops.concatenate([kept.begin, begins], np.int64), ops.concatenate([kept.count, sample.counts], np.int32)
        )
        if query.whole:
            self._whole = rows
        else:
            self._drawn = rows
        self._src.append(local)
        if sample.edge is not None:
            self._edge.append(sample.edge)
        if sample.scores is not None and sample.hops is not None:
            self._scores.append(sample.scores)
            self._hops.append(sample.hops)
        self._num_edges += len(local)
        self._per_hop[hop] += len(local)

    def per_hop(self) -> tuple[int, ...]:
        return () if self._requested_again else tuple(self._per_hop)

    def finish(self, num_targets: int, with_edge: bool, per_hop: tuple[int, ...], ruled: bool = False) -> EdgeSet:
        drawn = self._padded(self._drawn, num_targets)
        return EdgeSet(
            fanouts=self.fanouts,
            row_begin=drawn.begin,
            row_count=drawn.count,
            src=self._ops.concatenate(self._src, np.int32),
            edge=self._ops.concatenate(self._edge, np.int64) if with_edge else None,
            per_hop=per_hop,
            whole=self._padded(self._whole, num_targets) if len(self._whole.count) else None,
            scores=self._ops.concatenate(self._scores, np.float32) if ruled else None,
            hops=self._ops.concatenate(self._hops, np.int8) if ruled else None,
        )

    def _padded(self, rows: EdgeRanges, num_targets: int) -> EdgeRanges:
        missing, ops = max(0, num_targets - len(rows.count)), self._ops
        if missing == 0:
            return EdgeRanges(rows.begin[:num_targets], rows.count[:num_targets])
        return EdgeRanges(
            ops.concatenate([rows.begin, ops.zeros(missing, np.int64)], np.int64),
            ops.concatenate([rows.count, ops.zeros(missing, np.int32)], np.int32),
        )


def _first_lacking(fanouts: Sequence[int], hop: int) -> int:
    """Return the first level of nodes whose neighbours must be requested for ``hop``.

    Level 0 is the seeds, level n the nodes that hop n - 1 added. For nodes of lower levels, requests of earlier hops
    returned enough neighbours.
    """
    for earlier in reversed(range(hop)):
        if fanouts[earlier] < 0 or 0 <= fanouts[hop] <= fanouts[earlier]:
            return earlier + 1
    return 0


def _shuffle_of(fanouts: Sequence[int], hop: int, level: int) -> int:
    others = fanouts if level < hop else fanouts[hop + 1 :]
    # How many leading neighbours must be in random order in an answer with all neighbours: other hops take the first.
    return max((fanout for fanout in others if fanout >= 0), default=0)


def _tree_keys(seeds: SeedSet) -> Ids:
    count = np.arange(sum(map(len, seeds.nodes.values())))
    starts = np.cumsum([0, *map(len, seeds.nodes.values())])
    pieces = [
        seeds.trees.get(of, count[start : start + len(ids)])
        for (of, ids), start in zip(seeds.nodes.items(), starts, strict=False)
    ]
    # Part of the random key, so that repeated seeds get different trees.
    return np.concatenate([np.empty(0, np.int64), *pieces])


def _tree_times(seeds: SeedSet) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *(seeds.times[of] for of in seeds.nodes)], dtype=np.int64)
