"""Embeddings of sources and targets of links, distributed over ranks: ranks of given links, and the best new links."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.graph_attrs import held_out_links
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType, NodeType, link_types
from trainer.graph.open import Graph
from trainer.nn.kernels.rows import run_rows
from trainer.nn.layerwise_inference import LayerResults, LayerRows
from trainer.nn.link_model import LinkModel
from trainer.nn.relation_decoders import RelationDecoder
from trainer.sampler.types import HopRequest, RowRequest

_TARGETS, _SOURCES = 8192, 2048  #: targets and sources of which all pairs are scored at once

_AT_A_TIME = 64  #: scores of a row that are compared with its list at once

_RANKED = 1024  #: sources that are ranked at once, in float64

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class RankedLinks:
    """Ranks of links among all targets, from 1. Of equal scores each has the mean of their ranks."""

    source: Ids  #: int64 [n] number of the source of each link, ascending
    rank: Array  #: float64 [n] among the targets that the source is not known to be linked to, and its other links
    filtered: Array  #: float64 [n] without its other links, and without known ones
    candidates: Ids  #: int64 [n] targets that take part in ``filtered``, besides the link's own

    @classmethod
    def joined(cls, parts: Sequence[RankedLinks]) -> RankedLinks:
        """Join the ranks of several edge types, whose numbers of sources are ascending from part to part."""
        none = np.empty(0, np.int64)
        return cls(*(
            np.concatenate([none, *(getattr(each, name.name) for each in parts)]) for name in fields(cls)
        ))  # fmt: skip


@dataclass(frozen=True)
class LinkEmbeddings:
    """Embeddings of this rank's nodes, as sources and as targets of links. All methods are collective.

    The score of a pair is the dot product of the source's and the target's embedding, or that of ``decoder``. If
    ``backward``, links are ranked the other way round: what the methods call a source is the target of an edge.
    """

    graph: Graph
    edge_type: EdgeType
    group: RankGroup
    source: LayerRows  #: float32 [own nodes of the source type, width]
    target: LayerRows
    decoder: RelationDecoder | None = field(default=None, kw_only=True)  #: on the CPU
    relation: int = field(default=0, kw_only=True)  #: number of the edge type in the decoder
    backward: bool = field(default=False, kw_only=True)
    loops: bool = field(default=False, kw_only=True)  #: pairs of a node with itself are ranked

    @classmethod
    def of(
        cls, graph: Graph, model: LinkModel, rows: LayerResults, scratch: Path, group: RankGroup
    ) -> tuple[LinkEmbeddings, ...]:  # fmt: skip
        """Compute the embeddings from the output of the model's encoder. ``scratch``: folder for their files.

        Returns those of each edge type that the model predicts; with a decoder, then those the other way round.
        """
        decoder, types = copy.deepcopy(model.decoder), link_types(model.target)
        if decoder is not None:
            decoder.cpu()  # where the rows are
            return tuple(
                cls(
                    graph, of, group, *(rows[end] for end in (of[0], of[2])[::step]), decoder=decoder, relation=number,
                    backward=step < 0, loops=True,
                )
                for step in (1, -1) for number, of in enumerate(types)
            )  # fmt: skip
        found: list[dict[NodeType, LayerRows]] = []
        for end, role, projection in ((0, "source", model.as_source), (2, "target", model.as_target)):
            ends = dict.fromkeys(of[end] for of in types)
            found.append({of: _projected(rows[of], projection, scratch / f"{role}-{of}.npy", group) for of in ends})
        return tuple(cls(graph, of, group, found[0][of[0]], found[1][of[2]]) for of in types)

    @property
    def ends(self) -> tuple[NodeType, NodeType]:
        """The node types of sources and targets."""
        source, _, target = self.edge_type
        return (target, source) if self.backward else (source, target)

    def queries(self, rows: Tensor) -> Tensor:
        """Return what is compared with the rows of targets, from rows of sources, [n, width]."""
        if self.decoder is None:
            return rows
        number = self.relation + self.backward * len(self.decoder.relation)
        return self.decoder.query(rows, torch.full((len(rows),), number)).detach()

    def pair_scores(self, queries: Tensor, rows: Tensor) -> Tensor:
        return (queries * rows).sum(1) if self.decoder is None else self.decoder.pair_scores(queries, rows)

    def all_scores(self, queries: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the scores of all queries with all rows, [n, m], in ``out`` if they are dot products."""
        if self.decoder is None or not self.decoder.distance:
            return torch.mm(queries, rows.t(), out=out)
        return self.decoder.all_scores(queries, rows)

    def ranked(self, links: Ids, seen: Ids, known: Ids, among: EdgeType | None = None) -> RankedLinks:
        """Rank the target of each of ``links`` among all targets, by the scores of its source.

        All arguments are pairs of original ids, int64 [2, n], the same on all ranks. Targets to which the source has an
        edge in the graph, those of its pairs in ``seen``, and without ``loops`` the source itself, are left out.
        ``known``: further pairs that ``RankedLinks.filtered`` leaves out. Returns the ranks of the links whose sources
        this rank owns, without those whose target is left out, as they repeat an edge of the graph.

        With ``among``, an edge type from sources to targets, each link is instead ranked among the targets to which its
        source has such edges, and those of its ``links``; nothing else is left out.

        Memory: 20 bytes times
        ``_RANKED`` · ``_TARGETS``, and 40 bytes per link.
        """
        pairs, at = np.unique(np.concatenate([links, known], axis=1), axis=1, return_index=True)
        mine, rows, targets = self._own(pairs)
        counts = at[mine] < links.shape[1]  # the others are only known
        sources = np.unique(rows[counts])
        order = np.argsort(rows, kind="stable")
        order = order[np.isin(rows[order], sources)]
        place, targets, counts = np.searchsorted(sources, rows[order]), targets[order], counts[order]
        own = self.queries(torch.from_numpy(np.asarray(self.source.values)[sources]).double())
        left_out = self._left_out(seen, not self.loops and among is None, among)

        def marked(block: Ids) -> tuple[Ids, Ids]:
            linked, to = left_out(block)
            at = np.searchsorted(sources, linked)
            kept = sources[np.minimum(at, len(sources) - 1)] == linked if len(sources) else np.zeros(len(at), np.bool_)
            return at[kept], to[kept]

        num_targets = self.graph.manifest.nodes[self.ends[1]].num_nodes
        return rank_links(
            Links(own, place, targets, counts), self.target, num_targets, marked, listed=among is not None, score=self
        )

    def _own(self, pairs: Ids) -> tuple[Ids, Ids, Ids]:
        """Find the pairs whose sources this rank owns. Returns positions, rows of ``source``, global ids of targets."""
        source, target = self.ends
        src = self.graph.store.to_global(source, pairs[0])
        mine = np.flatnonzero(self.source.shares.owners(src) == self.group.rank)
        return mine, self.source.shares.rows(src[mine]), self.graph.store.to_global(target, pairs[1][mine])

    def best_targets(self, count: int, held_out: bool = False) -> tuple[Array, Array]:
        """Return the ``count`` targets with the highest scores, best first, of each source that this rank owns.

        Returns the original ids of the targets, int64 [own sources, count], and their scores, float32. The id is -1
        where a source has fewer targets. Of equal scores, the target that comes first in the parts is better. Edges of
        the graph, pairs of a node with itself and, with ``held_out``, the links held out for val and test are left out.
        """
        own = torch.from_numpy(np.asarray(self.source.values))
        own = own if self.decoder is None else self.queries(own)
        num_targets = self.graph.manifest.nodes[self.ends[1]].num_nodes
        attrs = self.graph.store.graph_attrs
        splits = [held_out_links(attrs, self.edge_type, split)[0] for split in ("val", "test") if held_out]
        seen = np.concatenate([np.empty((2, 0), np.int64), *(links for links in splits if links is not None)], axis=1)
        ids, best = best_targets(own, self.target, num_targets, count, self._left_out(seen), self)
        return original_ids(self.graph, self.ends[1], ids), best

    def _left_out(self, seen: Ids, itself: bool = True, among: EdgeType | None = None) -> _Marked:
        """Return a function like ``_linked`` that, unless there is ``among``, adds the pairs in ``seen``."""
        _, rows, targets = self._own(seen)

        def marked(block: Ids) -> tuple[Ids, Ids]:
            linked, to = self._linked(block, itself, among)
            inside = (targets >= block[0]) & (targets <= block[-1]) & (among is None)
            return np.concatenate([linked, rows[inside]]), np.concatenate([to, targets[inside] - block[0]])

        return marked

    def _linked(self, targets: Ids, itself: bool = True, of: EdgeType | None = None) -> tuple[Ids, Ids]:
        """Return the edges from this rank's sources to ``targets``, consecutive global ids.

        Sources are returned as rows of ``self.source``, targets as positions in ``targets``. If source and target have
        the same type, pairs of a node with itself are included, if wanted. ``of``: another edge type than that of the
        links.
        """
        if self.backward and of is None:
            rows, ids = self._edges_of_own
            some = slice(*np.searchsorted(ids, [targets[0], targets[-1] + 1]))
            rows, to = rows[some], ids[some] - targets[0]
        else:
            request = HopRequest(of or self.edge_type, targets, -1, 0, key=0)
            (sample,) = self.graph.access.sample_hops([request])
            src, to = np.asarray(sample.src, np.int64), np.repeat(np.arange(len(targets)), sample.counts)
            mine = self.source.shares.owners(src) == self.group.rank
            rows, to = self.source.shares.rows(src[mine]), to[mine]
        if itself and self.ends[0] == self.ends[1]:
            own = np.flatnonzero(self.source.shares.owners(targets) == self.group.rank)
            rows = np.concatenate([rows, self.source.shares.rows(targets[own])])
            to = np.concatenate([to, own])
        return rows, to

    @cached_property
    def _edges_of_own(self) -> tuple[Ids, Ids]:
        """All in-edges of this rank's nodes: rows of ``self.source``, and the edges' sources, ascending: int64 [n]."""
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for piece in self.source.shares.own(self.group.rank):
            for first in range(piece.first, piece.last, _TARGETS):
                nodes = np.arange(first, min(first + _TARGETS, piece.last))
                (sample,) = self.graph.access.sample_hops([HopRequest(self.edge_type, nodes, -1, 0, key=0)])
                rows = piece.row + nodes - piece.first
                found.append((np.repeat(rows, sample.counts), np.asarray(sample.src, np.int64)))
        rows, src = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.argsort(src, kind="stable")
        return rows[order], src[order]


@dataclass(frozen=True)
class Links:
    """Links of this rank that are ranked, by the queries for their targets."""

    queries: Tensor  #: float64 [queries, width]
    place: Ids  #: int64 [n] query of each link, ascending
    targets: Ids  #: int64 [n] global ids
    counts: Array  #: bool [n]; others are only known, and left out of ``RankedLinks.filtered``


class _Scoring(Protocol):
    """How queries are compared with the rows of targets."""

    def pair_scores(self, queries: Tensor, rows: Tensor) -> Tensor: ...
    def all_scores(self, queries: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor: ...


class DotProducts:
    def pair_scores(self, queries: Tensor, rows: Tensor) -> Tensor:
        return (queries * rows).sum(1)

    def all_scores(self, queries: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(queries, rows.t(), out=out)


#: Returns pairs of a query and of a target, by position in a block of consecutive global ids of targets.
_Marked: TypeAlias = Callable[[Ids], tuple[Ids, Ids]]


def rank_links(
    links: Links, rows: LayerRows, num_targets: int, marked: _Marked, *, listed: bool, score: _Scoring
) -> RankedLinks:  # fmt: skip
    """Rank each link among all targets, by the scores of its query, less the pairs that are ``marked``. Collective.

    ``listed``: the marked pairs, and the links that count, are instead the only ones among which links are ranked.
    Returns the ranks of the links that count, without those that are left out themselves. Scores are rounded float64
    sums, so they do not depend on the ranks that compute them.
    """
    own, place, targets = links.queries, links.place, links.targets
    scores_of_links = score.pair_scores(own[place], rows.fetch(targets).double()).float().numpy()
    found = np.zeros((4, len(place)), np.int64)  # not beaten, level, counted, masked
    for first in range(0, num_targets, _TARGETS):
        block = np.arange(first, min(first + _TARGETS, num_targets))
        theirs = rows.fetch(block).double()
        at, to = marked(block)
        if listed:
            inside = links.counts & (targets >= first) & (targets <= block[-1])
            at, to = np.concatenate([at, place[inside]]), np.concatenate([to, targets[inside] - first])
        by_query = np.argsort(at, kind="stable")
        at, to = at[by_query], to[by_query]
        for begin in range(0, len(own), _RANKED):
            scores = score.all_scores(own[begin : begin + _RANKED], theirs).float().numpy()
            here = slice(*np.searchsorted(at, [begin, begin + _RANKED]))
            if listed:
                others = np.ones(scores.shape, np.bool_)
                others[at[here] - begin, to[here]] = False
                scores[others] = -np.inf
            else:
                scores[at[here] - begin, to[here]] = -np.inf
            some = slice(*np.searchsorted(place, [begin, begin + _RANKED]))
            args = place[some] - begin, targets[some] - first, scores_of_links[some], scores, found[:, some]
            run_rows(_count_others, len(args[0]), *args)
    filtered = found.copy()
    _leave_out_known(place, scores_of_links, found, filtered)
    kept = links.counts & (found[3] == 0)
    return RankedLinks(place[kept], _rank(found)[kept], _rank(filtered)[kept], filtered[2][kept])


def best_targets(
    queries: Tensor, rows: LayerRows, num_targets: int, count: int, marked: _Marked, score: _Scoring
) -> tuple[Array, Array]:  # fmt: skip
    """Return the ``count`` targets with the highest scores of each query, best first, less those marked. Collective.

    Returns the global ids of the targets, int64 [queries, count], -1 where there are fewer, and their scores, float32.
    Of equal scores, the target that comes first in the parts is better. ``queries``: float32 [queries, width].
    """
    best = np.full((len(queries), count), -np.inf, np.float32)
    ids = np.full((len(queries), count), -1, np.int64)
    space = torch.empty(min(_SOURCES, len(queries)), min(_TARGETS, num_targets))  # used again: new pages take longer
    for first in range(0, num_targets, _TARGETS):
        targets = np.arange(first, min(first + _TARGETS, num_targets))
        theirs, (linked, to) = rows.fetch(targets), marked(targets)
        order = np.argsort(linked, kind="stable")
        linked, to = linked[order], to[order]
        for begin in range(0, len(queries), _SOURCES):
            block = slice(begin, begin + _SOURCES)
            some = queries[block]
            out = space.view(-1)[: len(some) * len(targets)].view(len(some), len(targets))
            scores = score.all_scores(some, theirs, out).numpy()
            here = slice(*np.searchsorted(linked, [begin, begin + _SOURCES]))
            scores[linked[here] - begin, to[here]] = -np.inf
            run_rows(_keep_best, len(scores), scores, best[block], ids[block], first)
    return ids, best


def original_ids(graph: Graph, of: NodeType, ids: Array) -> Array:
    """Replace global ids of nodes, int64 [n, k], by original ids, in place; -1 remains."""
    for begin in range(0, len(ids), _ROWS_AT_ONCE):
        some = ids[begin : begin + _ROWS_AT_ONCE]
        (answer,) = graph.access.gather([RowRequest(of, some[some >= 0], ("orig_id",))])
        some[some >= 0] = answer["orig_id"]
    return ids


@torch.no_grad()
def _projected(rows: LayerRows, projection: nn.Module, path: Path, group: RankGroup) -> LayerRows:
    if not isinstance(projection, nn.Linear):
        return rows
    width = projection.out_features
    if not len(rows.values):
        return LayerRows(rows.shares, np.empty((0, width), np.float32))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(len(rows.values), width))
    for begin in range(0, len(out), _ROWS_AT_ONCE):
        some: Tensor = torch.from_numpy(np.array(rows.values[begin : begin + _ROWS_AT_ONCE])).to(group.device)
        out[begin : begin + len(some)] = projection(some).cpu().numpy()
    return LayerRows(rows.shares, out)


@njit()
def _keep_best(first: int, last: int, scores: Any, best: Any, ids: Any, first_id: int) -> None:
    """Enter the scores of a block of targets into the lists of best scores, in descending order, and their ids."""
    count, width = best.shape[1], scores.shape[1]
    for i in range(first, last):
        row = scores[i]
        lowest = best[i, count - 1]
        for block in range(-(-width // _AT_A_TIME)):
            better, begin = np.int32(block == width // _AT_A_TIME), block * _AT_A_TIME
            if not better:  # a whole block: of fixed length and without a branch, so that it is vectorized
                for j in range(_AT_A_TIME):
                    better |= np.int32(row[block * _AT_A_TIME + j] > lowest)
            if better:
                for j in range(begin, min(begin + _AT_A_TIME, width)):
                    if row[j] > lowest:
                        place = count - 1
                        while place > 0 and best[i, place - 1] < row[j]:
                            best[i, place], ids[i, place] = best[i, place - 1], ids[i, place - 1]
                            place -= 1
                        best[i, place], ids[i, place] = row[j], first_id + j
                        lowest = best[i, count - 1]


@njit()
def _count_others(
    first: int, last: int, place: Any, target: Any, score: Any, scores: Any, found: Any
) -> None:  # fmt: skip
    """Add to ``found`` what the other targets of a block are to each link: not beaten, level, counted.

    ``target``: position in the block of the link's own target, out of range if it is not there; ``found[3]`` becomes 1
    if it is left out for its source.
    """
    for i in range(first, last):
        own, row = score[i], scores[place[i]]
        not_beaten, level, counted = 0, 0, 0
        for j in range(row.shape[0]):
            there = row[j] != -np.inf
            not_beaten += there and not row[j] < own
            level += row[j] == own
            counted += there
        if 0 <= target[i] < row.shape[0]:
            value = row[target[i]]
            if value == -np.inf:
                found[3, i] = 1
            else:
                not_beaten -= not value < own
                level -= value == own
                counted -= 1
        found[0, i] += not_beaten
        found[1, i] += level
        found[2, i] += counted


@njit()
def _leave_out_known(place: Any, score: Any, found: Any, filtered: Any) -> None:
    """Subtract from each link's counts the other links of its source. ``place``: the sources, ascending."""
    begin = 0
    while begin < len(place):
        end = begin
        while end < len(place) and place[end] == place[begin]:
            end += 1
        for i in range(begin, end):
            for j in range(begin, end):
                if i != j and not found[3, j]:
                    filtered[0, i] -= not score[j] < score[i]
                    filtered[1, i] -= score[j] == score[i]
                    filtered[2, i] -= 1
        begin = end


def _rank(found: Array) -> Array:
    return 1 + found[0] - found[1] / 2
