"""Ranks the links of a split among all targets, each link with what was known at its time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.arrays import Array, Ids
from trainer.core.graph_attrs import is_task_table
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType, NodeType
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.edge_endpoints import StoredEndpoints, edges_in_order
from trainer.loader.link_ends import TimeGroups
from trainer.loader.link_seeds import LinkInputs
from trainer.loader.node_links import leading_type
from trainer.nn.layerwise_inference import LayerRows, WholeGraph
from trainer.nn.link_embeddings import DotProducts, Links, RankedLinks, rank_links
from trainer.nn.link_model import LinkModel
from trainer.sampler.types import HopRequest, RowRequest
from trainer.train.epoch import Score
from trainer.train.full_ranking import FullRanking, ranking_metrics
from trainer.train.loaders import loader_settings, named_type
from trainer.train.model import embeddings_of
from trainer.train.settings import TrainSettings
from trainer.train.tasks.baseline import LinkCounts


@dataclass(frozen=True)
class Queries:
    """Sources at their times. Every target is seen at the earliest time of a query's group."""

    sources: Ids  #: int64 [q] original ids
    trees: Ids  #: int64 [q] keys of the draws around them
    times: Ids | None = None  #: int64 [q]; None: nothing has a time

    @cached_property
    def groups(self) -> TimeGroups:
        """At most ``MOST_GROUPS`` groups of similar time: with up to so many different times, one for each."""
        return TimeGroups.by_time(np.zeros(len(self.sources), np.int64) if self.times is None else self.times)

    def at(self, some: Ids) -> Queries:
        return Queries(self.sources[some], self.trees[some], None if self.times is None else self.times[some])


class _RowsAt(Protocol):
    """Rows of queries, and of targets at a time. Its methods are collective."""

    def of_queries(self, queries: Queries) -> Tensor: ...
    def of_targets(self, time: int) -> LayerRows: ...


@dataclass(frozen=True)
class ModelRows:
    """Computes rows of this rank's queries and nodes. Its methods are collective."""

    graph: Graph
    edge_type: EdgeType
    settings: TrainSettings
    whole: WholeGraph
    model: LinkModel

    def of_queries(self, queries: Queries) -> Tensor:
        """Return the rows with which queries are compared to targets, float32 [q, width]."""
        of = self.edge_type[0]
        seeds = self.graph.store.to_global(of, queries.sources)
        return torch.from_numpy(np.array(self._rows(of, self.model.as_source, seeds, queries.trees, queries.times)))

    def of_targets(self, time: int) -> LayerRows:
        """Return the rows of all targets, as they were at ``time``."""
        of, seeds = self.edge_type[2], self.whole.own(self.edge_type[2])
        (found,) = self.graph.access.gather([RowRequest(of, seeds, ("orig_id",))])
        trees, times = np.asarray(found["orig_id"], np.int64), np.full(len(seeds), time)
        return LayerRows(self.whole.shares[of], self._rows(of, self.model.as_target, seeds, trees, times))

    def _rows(self, of: NodeType, projection: nn.Module, seeds: Ids, trees: Ids, times: Ids | None) -> Array:
        encoder = self.model.encoder
        degree, names, ages = encoder.needs_degree, embeddings_of(self.model).names, self.model.timed
        sampling = loader_settings(self.settings, self.edge_type, "val", degree, names, ages)
        given = (trees, times) if self.settings.time_attr is not None else ()
        return self.whole.run_seeds(
            lambda batch: projection(encoder.seed_rows(batch)[of]), replace(sampling, target=of), seeds, *given
        )


@dataclass(frozen=True)
class TimedRanking:
    """The links of a split, ranked among all targets: by each source and time, or by each row of a task table.

    Of links that are edges of the graph or, on test, links of val, those that the source has until the time of the
    query are left out. Of a row nothing is: its list may repeat what its entity did before. With ``eval_candidates``,
    links are ranked among the targets that are listed for the source, or the row's entity, at exactly this time, and
    the query's own links. Methods are collective.
    """

    graph: Graph
    edge_type: EdgeType
    split: str
    links: LinkInputs
    known: LinkInputs | None  #: links of val, for test
    settings: TrainSettings
    layout: RankLayout
    group: RankGroup
    folder: Path  #: for files with rows of nodes, which are deleted again

    @property
    def num_links(self) -> int:
        return len(self.links)

    def score(self, model: nn.Module, names: Sequence[str]) -> Score:
        assert isinstance(model, LinkModel)
        model.eval()
        scratch = self.folder / f".ranking-rank{self.group.rank}"
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            rows = ModelRows(self.graph, self.edge_type, self.settings, self._whole(scratch), model)
            return Score(self.metrics(rows, names), float("nan"), self.num_links)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def popularity(self, counts: LinkCounts, names: Sequence[str]) -> dict[str, float]:
        """Return the metrics of ranking targets by their number of train links."""
        whole, of = self._whole(self.folder), self.edge_type[2]
        (found,) = self.graph.access.gather([RowRequest(of, whole.own(of), ("orig_id",))])
        popular = counts.of(self.edge_type, 1, np.asarray(found["orig_id"], np.int64)).astype(np.float32)[:, None]
        return self.metrics(_Given(LayerRows(whole.shares[of], popular)), names)

    def metrics(self, rows: _RowsAt, names: Sequence[str]) -> dict[str, float]:
        """Return the metrics in ``names``, means over queries or links."""
        queries, query_of = self._queries
        source, _, target = self.edge_type
        store, found, (_, all_targets) = self.graph.store, list[RankedLinks](), self.links.all_ends()
        owners = self._whole(self.folder).shares[source].owners(store.to_global(source, queries.sources))
        for number, time in enumerate(queries.groups.times.tolist()):
            own = np.flatnonzero((queries.groups.of == number) & (owners == self.group.rank))
            mine = np.flatnonzero(np.isin(query_of, own))
            mine = mine[np.argsort(query_of[mine], kind="stable")]
            place, targets = np.searchsorted(own, query_of[mine]), store.to_global(target, all_targets[mine])
            of_queries, of_targets = rows.of_queries(queries.at(own)), rows.of_targets(time)
            links = Links(of_queries.double(), place, targets, np.ones(len(place), np.bool_))
            marked = _Marked(self, queries.at(own))
            ranked = rank_links(
                links, of_targets, self.graph.manifest.nodes[target].num_nodes, marked, listed=marked.listed,
                score=DotProducts(),
            )  # fmt: skip
            found.append(replace(ranked, source=own[ranked.source]))
        joined = RankedLinks.joined(found)
        order = np.argsort(joined.source, kind="stable")
        joined = RankedLinks(joined.source[order], joined.rank[order], joined.filtered[order], joined.candidates[order])
        return ranking_metrics(joined, names, self.group)

    @cached_property
    def _queries(self) -> tuple[Queries, Ids]:
        """The queries, ordered by source and time, and the query of each link, int64 [n]."""
        (sources, _), times = self.links.all_ends(), self.links.times
        pairs = sources[None] if times is None else np.stack([sources, times])
        unique, query_of = np.unique(pairs, axis=1, return_inverse=True)
        rows = is_task_table(self.edge_type[0], self.graph.store.graph_attrs)
        trees = unique[0] if rows else np.arange(unique.shape[1])
        return Queries(unique[0], trees, None if times is None else unique[1]), query_of.reshape(-1)

    def _whole(self, scratch: Path) -> WholeGraph:
        return WholeGraph(self.graph, self.layout, self.group, scratch)


@dataclass(frozen=True)
class _Given:
    """Rows of targets that depend on no time, which are the scores of all queries."""

    targets: LayerRows

    def of_queries(self, queries: Queries) -> Tensor:
        return torch.ones(len(queries.sources), 1)

    def of_targets(self, time: int) -> LayerRows:
        return self.targets


class _Marked:
    """Finds the pairs of a query and a target that are left out or, with candidates, the only ones."""

    def __init__(self, ranking: TimedRanking, queries: Queries):
        graph, edge_type, settings = ranking.graph, ranking.edge_type, ranking.settings
        self.graph, self.queries, self.target, self.time_attr = graph, queries, edge_type[2], settings.time_attr
        manifest, rows = graph.manifest, is_task_table(edge_type[0], graph.store.graph_attrs)
        self.listed = settings.eval_candidates is not None
        self.edge_type: EdgeType | None = None if rows else edge_type
        owner, owners = edge_type[0], queries.sources
        if settings.eval_candidates is not None:
            if rows:
                (about,) = [of for of in manifest.edges if of[2] == edge_type[0]]
                owner, entities = about[0], np.empty(manifest.nodes[about[2]].num_nodes, np.int64)
                for _, some, of_rows in edges_in_order(StoredEndpoints(graph, about)):
                    entities[of_rows] = some
                owners = entities[queries.sources]
            given = named_type(graph, "eval_candidates", settings.eval_candidates)
            if (given[0], given[2]) != (owner, self.target):
                given = leading_type(graph, given, self.target, owner, "eval_candidates")
            self.edge_type = given
        # Queries by the node that owns their lists, and by time.
        nodes = graph.store.to_global(owner, owners)
        times = np.zeros(len(nodes), np.int64) if queries.times is None else queries.times
        self.nodes, self.times = np.unique(nodes), np.unique(times)
        key = np.searchsorted(self.nodes, nodes) * (len(self.times) + 1) + np.searchsorted(self.times, times)
        self.order = np.argsort(key, kind="stable")
        self.key = key[self.order]
        # Further pairs that are left out.
        self.known = (np.empty(0, np.int64), np.empty(0, np.int64))
        if ranking.known is not None and not rows and not self.listed:
            sources, targets = ranking.known.all_ends()
            at, owned = self._queries_of(graph.store.to_global(owner, sources), ranking.known.times)
            self.known = owned, graph.store.to_global(self.target, targets)[at]
        if not rows and not self.listed and owner == self.target:
            self.known = tuple(  # type: ignore[assignment]
                np.concatenate(each) for each in zip(self.known, (np.arange(len(nodes)), nodes), strict=True)
            )

    def __call__(self, block: Ids) -> tuple[Ids, Ids]:
        of = self.edge_type
        inside = (self.known[1] >= block[0]) & (self.known[1] <= block[-1])
        queries, to = self.known[0][inside], self.known[1][inside] - block[0]
        if of is None:
            return queries, to
        attrs = self.graph.manifest.edges[of].attrs
        attr = next((name for name in (self.time_attr, "edge_time") if name in attrs), None)
        timed = attr is not None and self.queries.times is not None
        (sample,) = self.graph.access.sample_hops([HopRequest(of, block, -1, 0, key=0, with_edge=timed)])
        targets, times = np.repeat(np.arange(len(block)), sample.counts), None
        if timed and sample.edge is not None:
            (rows,) = self.graph.access.gather([RowRequest(of, np.asarray(sample.edge, np.int64), (attr or "",))])
            times = np.asarray(rows[attr or ""], np.int64)
        at, owned = self._queries_of(np.asarray(sample.src, np.int64), times)
        return np.concatenate([queries, owned]), np.concatenate([to, targets[at]])

    def _queries_of(self, nodes: Ids, times: Ids | None) -> tuple[Ids, Ids]:
        """Match edges of ``nodes`` with their queries: all, those not earlier than ``times``, or of the same time.

        Returns an index of the edge, and a query, for each match.
        """
        if not len(self.nodes):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        row = np.minimum(np.searchsorted(self.nodes, nodes), len(self.nodes) - 1)
        there = self.nodes[row] == nodes
        width = len(self.times) + 1
        first = np.zeros(len(nodes), np.int64) if times is None else np.searchsorted(self.times, times)
        last = np.full(len(nodes), width - 1)
        if self.listed and times is not None:
            last = np.searchsorted(self.times, times, "right")
        begin, end = np.searchsorted(self.key, row * width + first), np.searchsorted(self.key, row * width + last)
        count = np.where(there, end - begin, 0)
        at = np.repeat(np.arange(len(nodes)), count)
        slots = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count) + begin[at]
        return at, self.order[slots]


def ranking_of(
    graph: Graph, edge_type: EdgeType, split: str, links: Mapping[str, LinkInputs], settings: TrainSettings,
    layout: RankLayout, group: RankGroup, folder: Path,
) -> FullRanking | TimedRanking:  # fmt: skip
    """Return what ranks the links of a split of one edge type. ``links``: those of all splits."""
    if settings.time_attr is None and not is_task_table(edge_type[0], graph.store.graph_attrs):
        return FullRanking(graph, edge_type, split, settings, layout, group, folder)
    known = links.get("val") if split == "test" else None
    return TimedRanking(graph, edge_type, split, links[split], known, settings, layout, group, folder)
