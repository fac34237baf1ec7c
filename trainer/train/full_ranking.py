"""Scores a model of links on held-out links: each is ranked among all nodes of the target type."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.core.arrays import Ids
from trainer.core.graph_attrs import held_out_links
from trainer.core.ranks import RankGroup
from trainer.core.schema import AnyType, EdgeType, LinkTypes, link_types, seed_types
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import sampling_of
from trainer.loader.node_links import leading_type
from trainer.nn.layerwise_inference import LayerResults, LayerRows, WholeGraph, stack_of
from trainer.nn.link_embeddings import LinkEmbeddings, RankedLinks
from trainer.nn.link_model import LinkModel
from trainer.sampler.types import RowRequest
from trainer.train.epoch import Score
from trainer.train.loaders import loader_settings, named_type
from trainer.train.model import embeddings_of
from trainer.train.settings import TrainSettings
from trainer.train.tasks.baseline import LinkCounts
from trainer.train.tasks.task import at_k


@dataclass(frozen=True)
class FullRanking:
    """The held-out links of a split, and what is left out of their ranking. Its methods are collective.

    Left out are targets that the source is known to be linked to: by an edge of the graph or, on test, a link of val.
    With ``eval_candidates``, links are ranked among the listed targets of their source, and its links of the split.
    """

    graph: Graph
    target: EdgeType | LinkTypes
    split: str
    settings: TrainSettings
    layout: RankLayout
    group: RankGroup
    folder: Path  #: for files with the rows of all nodes, which are deleted again

    def score(self, model: nn.Module, names: Sequence[str]) -> Score:
        """Score the model on all nodes with all their neighbours; a class without layers on sampled neighbours."""
        assert isinstance(model, LinkModel)
        model.eval()
        scratch = self.folder / f".ranking-rank{self.group.rank}"
        try:
            scratch.mkdir(parents=True, exist_ok=True)
            rows = output_rows(model, self.target, self.graph, self.settings, self.layout, scratch, self.group)
            links = LinkEmbeddings.of(self.graph, model, rows, scratch, self.group)
            return Score(self.metrics(links, names), float("nan"), self.num_links)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @property
    def num_links(self) -> int:
        return sum(self._held_out(of, self.split).shape[1] for of in link_types(self.target))

    def metrics(self, embeddings: Iterable[LinkEmbeddings], names: Sequence[str]) -> dict[str, float]:
        """Rank the links of all edge types, with those of ``embeddings`` that are the other way round in both."""
        found: list[RankedLinks] = []
        for each in embeddings:
            links, other = (self._held_out(each.edge_type, of) for of in self._splits)
            if links.shape[1]:
                step, none = -1 if each.backward else 1, np.empty((2, 0), np.int64)
                seen, known = (other, none) if self.split == "test" else (none, other)
                among: EdgeType | None = None
                if (name := self.settings.eval_candidates) is not None:
                    seen, known, among = none, none, named_type(self.graph, "eval_candidates", name)
                    if (among[0], among[2]) != each.ends:
                        among = leading_type(self.graph, among, *each.ends[::-1], "eval_candidates")
                ranked = each.ranked(links[::step], seen[::step], known[::step], among)
                first = 1 + int(found[-1].source.max(initial=-1)) if found else 0
                found.append(replace(ranked, source=ranked.source + first))
        return ranking_metrics(RankedLinks.joined(found), names, self.group)

    @property
    def _splits(self) -> tuple[str, str]:
        return self.split, "val" if self.split == "test" else "test"

    def _held_out(self, of: EdgeType, split: str) -> Ids:
        found, _ = held_out_links(self.graph.store.graph_attrs, of, split)
        return np.empty((2, 0), np.int64) if found is None else np.asarray(found, np.int64)

    def popularity(self, counts: LinkCounts, names: Sequence[str]) -> dict[str, float]:
        """Return the metrics of ranking nodes by their number of train links, at the end that is asked for."""
        whole, loops = WholeGraph(self.graph, self.layout, self.group, self.folder), self.settings.decoder != "dot"

        def embeddings() -> Iterator[LinkEmbeddings]:
            for of, end in counts.asked:
                asked, other = (of[2], of[0]) if end else (of[0], of[2])
                (found,) = self.graph.access.gather([RowRequest(asked, whole.own(asked), ("orig_id",))])
                popular = counts.of(of, end, np.asarray(found["orig_id"], np.int64)).astype(np.float32)[:, None]
                ones = np.ones((len(whole.own(other)), 1), np.float32)
                rows = LayerRows(whole.shares[other], ones), LayerRows(whole.shares[asked], popular)
                yield LinkEmbeddings(self.graph, of, self.group, *rows, backward=not end, loops=loops)

        return self.metrics(embeddings(), names)


def output_rows(
    model: nn.Module, target: AnyType | LinkTypes, graph: Graph, settings: TrainSettings, layout: RankLayout,
    scratch: Path, group: RankGroup, nodes_at_once: int = 4096,
) -> LayerResults:  # fmt: skip
    """Compute the output of a model, or of the encoder of a ``LinkModel``, for all nodes. Collective.

    Layer by layer, with all neighbours, or with those that ``neighbors: top`` takes in evaluation. A class that has no
    layers is run on neighbours sampled as in evaluation, and so is a model of neighbours that a rule chooses. With
    times, each node is computed from neighbours sampled at its own time. ``target``: node type of the seeds, or edge
    types of the links.
    """
    columns, degree = embeddings_of(model).names, bool(getattr(model, "needs_degree", False))
    sampling = loader_settings(settings, target, "val", degree, columns, getattr(model, "timed", ()))
    latest = sampling_of(graph, sampling).time if sampling.top and sampling.weight is None else None
    whole = WholeGraph(
        graph, layout, group, scratch, nodes_at_once, settings.weight_attr, settings.edge_attr, columns,
        settings.eval_fanouts or settings.fanouts if sampling.top else (), latest,
    )  # fmt: skip
    if isinstance(target, str) and (sampling.rule or settings.time_attr is not None):
        return whole.run_sampled(lambda batch: {target: model(batch)}, [target], sampling)
    encoder: Any = getattr(model, "encoder", model)
    if sampling.rule:
        return whole.run_sampled(encoder.seed_rows, seed_types(target), sampling)
    stack = stack_of(model)
    if stack is not None:
        return whole.run(stack)
    sampling = replace(sampling, global_batch=nodes_at_once)
    return whole.run_sampled(encoder.seed_rows, seed_types(target), sampling)


def ranking_metrics(found: RankedLinks, names: Sequence[str], group: RankGroup) -> dict[str, float]:
    """Return the metrics in ``names`` of the links of all ranks; NaN without links. Collective.

    Recall, precision, NDCG and MAP at k are means over the sources that have links. For a source with n links and the
    ranks r of its links among the targets that it is not known to be linked to: recall is the share of its links with
    r ≤ k, precision their number / k, NDCG the sum of 1 / log2(1 + r) over them, as a share of its largest value for
    min(n, k) links, and MAP the sum over them of (number of links up to r) / r, divided by min(n, k); as in
    torch_geometric's ``LinkPredRecall`` and others. MRR, Hits@k and AUC are means over the links, each ranked without
    the other targets that its source is known to be linked to, as for knowledge graphs ("filtered").
    """
    _, start, count = np.unique(found.source, return_index=True, return_counts=True)
    order = np.lexsort((found.rank, found.source))
    rank, place = found.rank[order], 1 + np.arange(len(order)) - np.repeat(start, count)

    def per_source(values: Any) -> Any:
        return np.add.reduceat(values, start) if len(start) else np.zeros(0)

    def metric(name: str) -> Any:
        kind, k = at_k(name)
        if kind in ("mrr", "auc"):
            some = found.candidates > 0
            beaten = found.candidates[some] + 1 - found.filtered[some]
            return 1 / found.filtered if kind == "mrr" else beaten / found.candidates[some]
        if kind == "hits":
            return found.filtered <= k
        near, most = rank <= k, np.minimum(count, k)
        if kind == "ndcg":
            ideal = np.cumsum(1 / np.log2(2 + np.arange(most.max(initial=0))))
            return per_source(near / np.log2(1 + rank)) / ideal[most - 1]
        if kind == "map":
            return per_source(near * place / rank) / most
        return per_source(near) / (count if kind == "recall" else k)

    values = [np.asarray(metric(name), np.float64) for name in names]
    sums = group.sum(torch.tensor([[each.sum(), len(each)] for each in values], dtype=torch.float64))
    return {
        name: total / number if number else float("nan")
        for name, (total, number) in zip(names, sums.tolist(), strict=True)
    }
