"""Embeddings of sources and targets of links, distributed over ranks: ranks of given links, and the best new links."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph
from trainer.nn.kernels.rows import run_rows
from trainer.nn.layerwise_inference import LayerResults, LayerRows
from trainer.nn.link_model import LinkModel
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


@dataclass(frozen=True)
class LinkEmbeddings:
    """Embeddings of this rank's nodes, as sources and as targets of links. All methods are collective.

    The score of a pair is the dot product of the source's and the target's embedding.
    """

    graph: Graph
    edge_type: EdgeType
    group: RankGroup
    source: LayerRows  #: float32 [own nodes of the source type, width]
    target: LayerRows

    @classmethod
    def of(cls, graph: Graph, model: LinkModel, rows: LayerResults, scratch: Path, group: RankGroup) -> LinkEmbeddings:
        """Compute the embeddings from the output of the model's encoder. ``scratch``: folder for their files."""
        source, _, target = model.edge_type
        return cls(
            graph, model.edge_type, group,
            _projected(rows[source], model.as_source, scratch / "source.npy", group),
            _projected(rows[target], model.as_target, scratch / "target.npy", group),
        )  # fmt: skip

    def ranked(self, links: Ids, seen: Ids, known: Ids) -> RankedLinks:
        """Rank the target of each of ``links`` among all targets, by the scores of its source.

        All arguments are pairs of original ids, int64 [2, n], the same on all ranks. Targets to which the source has an
        edge in the graph, those of its pairs in ``seen``, and the source itself, are left out. ``known``: further pairs
        that ``RankedLinks.filtered`` leaves out. Returns the ranks of the links whose sources this rank owns, without
        those whose target is left out, as they repeat an edge of the graph.

        Scores are rounded float64 sums, so they do not depend on the ranks that compute them. Memory: 20 bytes times
        ``_RANKED`` · ``_TARGETS``, and 40 bytes per link.
        """
        pairs, at = np.unique(np.concatenate([links, known], axis=1), axis=1, return_index=True)
        mine, rows, targets = self._own(pairs)
        counts = at[mine] < links.shape[1]  # the others are only known
        sources = np.unique(rows[counts])
        order = np.argsort(rows, kind="stable")
        order = order[np.isin(rows[order], sources)]
        place, targets, counts = np.searchsorted(sources, rows[order]), targets[order], counts[order]
        own = torch.from_numpy(np.asarray(self.source.values)[sources]).double()
        score = (own[place] * self.target.fetch(targets).double()).sum(1).float().numpy()
        found = np.zeros((4, len(place)), np.int64)  # not beaten, level, counted, masked
        _, hidden, hidden_targets = self._own(seen)
        for first in range(0, self.graph.manifest.nodes[self.edge_type[2]].num_nodes, _TARGETS):
            block = np.arange(first, min(first + _TARGETS, self.graph.manifest.nodes[self.edge_type[2]].num_nodes))
            theirs, (linked, to) = self.target.fetch(block).double(), self._linked(block)
            inside = (hidden_targets >= first) & (hidden_targets <= block[-1])
            linked = np.concatenate([linked, hidden[inside]])
            to = np.concatenate([to, hidden_targets[inside] - first])
            at = np.searchsorted(sources, linked)
            kept = sources[np.minimum(at, len(sources) - 1)] == linked if len(sources) else np.zeros(len(at), np.bool_)
            by_source = np.argsort(at[kept], kind="stable")
            at, to = at[kept][by_source], to[kept][by_source]
            for begin in range(0, len(sources), _RANKED):
                scores = (own[begin : begin + _RANKED] @ theirs.t()).float().numpy()
                here = slice(*np.searchsorted(at, [begin, begin + _RANKED]))
                scores[at[here] - begin, to[here]] = -np.inf
                some = slice(*np.searchsorted(place, [begin, begin + _RANKED]))
                args = place[some] - begin, targets[some] - first, score[some], scores, found[:, some]
                run_rows(_count_others, len(args[0]), *args)
        filtered = found.copy()
        _leave_out_known(place, score, found, filtered)
        counts &= found[3] == 0
        return RankedLinks(place[counts], _rank(found)[counts], _rank(filtered)[counts], filtered[2][counts])

    def _own(self, pairs: Ids) -> tuple[Ids, Ids, Ids]:
        """Find the pairs whose sources this rank owns. Returns positions, rows of ``source``, global ids of targets."""
        source, _, target = self.edge_type
        src = self.graph.store.to_global(source, pairs[0])
        mine = np.flatnonzero(self.source.shares.owners(src) == self.group.rank)
        return mine, self.source.shares.rows(src[mine]), self.graph.store.to_global(target, pairs[1][mine])

    def best_targets(self, count: int) -> tuple[Array, Array]:
        """Return the ``count`` targets with the highest scores, best first, of each source that this rank owns.

        Returns the original ids of the targets, int64 [own sources, count], and their scores, float32. The id is -1
        where a source has fewer targets. Of equal scores, the target that comes first in the parts is better. Edges of
        the graph, and pairs of a node with itself, are left out.
        """
        own = torch.from_numpy(np.asarray(self.source.values))
        best = np.full((len(own), count), -np.inf, np.float32)
        ids = np.full((len(own), count), -1, np.int64)
        num_targets = self.graph.manifest.nodes[self.edge_type[2]].num_nodes
        space = torch.empty(min(_SOURCES, len(own)), min(_TARGETS, num_targets))  # used again: new pages take longer
        for first in range(0, num_targets, _TARGETS):
            targets = np.arange(first, min(first + _TARGETS, num_targets))
            rows, (linked, to) = self.target.fetch(targets), self._linked(targets)
            for begin in range(0, len(own), _SOURCES):
                block = slice(begin, begin + _SOURCES)
                some = own[block]
                out = space.view(-1)[: len(some) * len(targets)].view(len(some), len(targets))
                scores = torch.mm(some, rows.t(), out=out).numpy()
                here = slice(*np.searchsorted(linked, [begin, begin + _SOURCES]))
                scores[linked[here] - begin, to[here]] = -np.inf
                run_rows(_keep_best, len(scores), scores, best[block], ids[block], first)
        return self._original(ids), best

    def _linked(self, targets: Ids) -> tuple[Ids, Ids]:
        """Return the edges from this rank's sources to ``targets``, sorted by source.

        Sources are returned as rows of ``self.source``, targets as positions in ``targets``. If source and target have
        the same type, pairs of a node with itself are included.
        """
        request = HopRequest(self.edge_type, targets, -1, 0, key=0)
        (sample,) = self.graph.access.sample_hops([request])
        src, to = np.asarray(sample.src, np.int64), np.repeat(np.arange(len(targets)), sample.counts)
        if self.edge_type[0] == self.edge_type[2]:
            src, to = np.concatenate([src, targets]), np.concatenate([to, np.arange(len(targets))])
        mine = self.source.shares.owners(src) == self.group.rank
        rows, to = self.source.shares.rows(src[mine]), to[mine]
        order = np.argsort(rows, kind="stable")
        return rows[order], to[order]

    def _original(self, ids: Array) -> Array:
        for begin in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[begin : begin + _ROWS_AT_ONCE]
            wanted = RowRequest(self.edge_type[2], some[some >= 0], ("orig_id",))
            (answer,) = self.graph.access.gather([wanted])
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
