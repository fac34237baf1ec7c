"""Embeddings of sources and targets of links, distributed over ranks; computes metrics and the best new links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.arrays import Array, Ids
from trainer.core.batch import LinkEnds
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.layerwise_inference import LayerResults, LayerRows
from trainer.nn.link_model import LinkModel
from trainer.sampler.types import HopRequest, RowRequest
from trainer.train.epoch import EVAL_EPOCH
from trainer.train.loaders import link_loaders
from trainer.train.settings import TrainSettings
from trainer.train.tasks.task import Labels, Task

_TARGETS, _SOURCES = 8192, 4096  #: targets and sources of which all pairs are scored at once

_ROWS_AT_ONCE = 1 << 16


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

    def metrics(self, settings: TrainSettings, task: Task, layout: RankLayout) -> dict[str, dict[str, float]]:
        """Return the metrics on each split of held-out links, with the same negatives as evaluations in training.

        Embeddings are computed from all edges of the graph, even if ``settings`` has a ``time_attr``.
        """
        (source, _, target), store = self.edge_type, self.graph.store
        timeless = replace(settings, time_attr=None)
        loaders = link_loaders(
            timeless, self.graph, self.edge_type, ("val", "test"), False, self.group.rank, layout
        )  # fmt: skip
        found = {}
        for split, loader in loaders.items():
            sums = torch.zeros(task.num_sums, dtype=torch.float64)
            for share in loader.shares(EVAL_EPOCH):
                src, dst, negatives = loader.ends(share)
                rows = self.source.fetch(store.to_global(source, src))
                right = self.target.fetch(store.to_global(target, dst))
                wrong = self.target.fetch(store.to_global(target, negatives))
                out = torch.cat([(rows * right).sum(1, keepdim=True), rows @ wrong.t()], 1)
                ends = LinkEnds(source, target, *map(torch.from_numpy, (src, dst, negatives)))
                sums += task.metric_sums(out, Labels(links=ends))
            found[split] = task.metrics(self.group.sum(sums).tolist())
        return found

    def best_targets(self, count: int) -> tuple[Array, Array]:
        """Return the ``count`` targets with the highest scores, best first, of each source that this rank owns.

        Returns the original ids of the targets, int64 [own sources, count], and their scores, float32. The id is -1
        where a source has fewer targets. Edges of the graph, and pairs of a node with itself, are left out.
        """
        own = torch.from_numpy(np.asarray(self.source.values))
        best = torch.full((len(own), count), -torch.inf)
        ids = torch.full((len(own), count), -1, dtype=torch.int64)
        num_targets = self.graph.manifest.nodes[self.edge_type[2]].num_nodes
        for first in range(0, num_targets, _TARGETS):
            targets = np.arange(first, min(first + _TARGETS, num_targets))
            rows, (linked, to) = self.target.fetch(targets), self._linked(targets)
            for begin in range(0, len(own), _SOURCES):
                block = slice(begin, begin + _SOURCES)
                scores = own[block] @ rows.t()
                here = slice(*np.searchsorted(linked, [begin, begin + _SOURCES]))
                scores[linked[here] - begin, to[here]] = -torch.inf
                some = scores.topk(min(count, len(targets)))
                joined = torch.cat([best[block], some.values], 1).topk(count)
                both = torch.cat([ids[block], some.indices + first], 1)
                best[block], ids[block] = joined.values, both.gather(1, joined.indices)
        ids[best == -torch.inf] = -1
        return self._original(ids.numpy()), best.numpy()

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
def _projected(rows: LayerRows, projection: nn.Linear, path: Path, group: RankGroup) -> LayerRows:
    width = projection.out_features
    if not len(rows.values):
        return LayerRows(rows.shares, np.empty((0, width), np.float32))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(len(rows.values), width))
    for begin in range(0, len(out), _ROWS_AT_ONCE):
        some: Tensor = torch.from_numpy(np.array(rows.values[begin : begin + _ROWS_AT_ONCE])).to(group.device)
        out[begin : begin + len(some)] = projection(some).cpu().numpy()
    return LayerRows(rows.shares, out)
