"""Scores of the simplest predictions, from which one sees whether a model has learned anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph
from trainer.train.tasks.classification import Classification
from trainer.train.tasks.labels import SeedLabels, labels_01
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import Labels, Task

if TYPE_CHECKING:
    from trainer.loader.edge_endpoints import EdgeEndpoints
    from trainer.loader.link_block_loader import LinkBlockLoader
    from trainer.loader.split_links import GivenLinks
    from trainer.train.tasks.link import LinkPrediction

#: Scores the ranking of all targets by given numbers, float64 [targets], by the metrics of the given names. Collective.
FullRanking: TypeAlias = Callable[[Tensor, Sequence[str]], dict[str, float]]

_MOST_COUNTED = 1 << 24  #: edges whose targets are counted

_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Baseline:
    name: str  #: what is predicted for every seed, in words
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  #: by split and name

    def fields(self) -> dict[str, str | float]:
        """Return the fields of a ``result`` line: ``baseline``, and ``baseline_<split>_<metric>``."""
        scores = {f"baseline_{split}_{name}": of for split, found in self.metrics.items() for name, of in found.items()}
        return {"baseline": self.name, **scores}


def node_baseline(task: Task, labels: Sequence[SeedLabels], group: RankGroup) -> Baseline:
    """Score the prediction that is best for the train seeds if nothing is known of a seed. Collective.

    That is the most frequent class, the mean of numbers, or each label that most seeds have. ``labels``: those of this
    rank's seeds of each split.
    """
    train = next(each.y for each in labels if each.split == "train")
    if isinstance(task, Classification):
        counts = group.sum(torch.bincount(train.reshape(-1).long(), minlength=task.outputs).double())
        name, out = f"class {int(counts.argmax())}, the most frequent", counts
    elif isinstance(task, Regression):
        name, out = "the mean", torch.zeros(task.outputs)
    else:
        y = labels_01(train).reshape(len(train), task.outputs)
        known = group.sum((~y.isnan()).double().sum(0))
        name, out = "each label that most seeds have", group.sum(y.nan_to_num().sum(0)) - known / 2
    found = {}
    for each in labels:
        if each.split != "train":
            sums = task.metric_sums(out.expand(len(each.y), -1), Labels(y=each.y)) if len(each.y) else None
            found[each.split] = group.sum(torch.zeros(task.num_sums, dtype=torch.float64) if sums is None else sums)
    metrics = {split: task.metrics(sums.tolist()) for split, sums in found.items()}
    return Baseline(name, {split: of for split, of in metrics.items() if of})


def target_counts(graph: Graph, edge_type: EdgeType, links: GivenLinks | None, group: RankGroup) -> Tensor:
    """Count the links of training by their targets: float64 [targets], by original id. Collective.

    ``links``: the links; None: all edges of the type. Of very many links, equally spaced ones are counted.
    """
    from trainer.loader.edge_endpoints import HeldEndpoints, StoredEndpoints

    size = graph.manifest.nodes[edge_type[2]].num_nodes
    ends: EdgeEndpoints = StoredEndpoints(graph, edge_type) if links is None else HeldEndpoints(*links.ends)
    every = max(1, -(-len(ends) // _MOST_COUNTED))

    def counted() -> Tensor:
        counts, own = np.zeros(size, np.int64), np.arange(group.rank * every, len(ends), group.size * every)
        for start in range(0, len(own), _AT_ONCE):
            counts += np.bincount(ends.ends_of(own[start : start + _AT_ONCE])[1], minlength=size)
        return torch.from_numpy(counts).double()

    return group.sum(group.agree(counted))


def link_baseline(
    loaders: Mapping[str, LinkBlockLoader], full: Mapping[str, FullRanking], task: LinkPrediction, counts: Tensor,
    group: RankGroup,
) -> Baseline:  # fmt: skip
    """Score the ranking of targets by their number of train links, among the negatives that the model gets. Collective.

    ``counts``: result of ``target_counts``. ``full``: for each split that is ranked
    among all targets, a function that scores such a ranking.
    """
    from trainer.nn.link_metrics import LinkSums

    def scored(loader: LinkBlockLoader) -> Tensor:
        sums = LinkSums(task.hits)
        for share in loader.shares(0):
            src, dst, negatives = loader.ends(share)
            if len(dst):
                own = loader.own(share, src, dst)
                alone = torch.from_numpy(own.table(len(dst), counts.numpy()[own.ids], -np.inf))
                scores = counts[negatives].expand(len(dst), -1)
                scores = scores.masked_fill(torch.from_numpy(dst[:, None] == negatives), -torch.inf)
                sums.add(counts[dst], torch.cat([scores, alone], 1))
        return sums.sums

    held_out = [(split, loader) for split, loader in loaders.items() if split != "train"]
    sums = {split: group.sum(group.agree(lambda loader=loader: scored(loader))) for split, loader in held_out}  # type: ignore[misc]
    metrics = {split: task.metrics(each.tolist()) for split, each in sums.items()}
    metrics |= {split: score(counts, task.names) for split, score in full.items()}
    return Baseline("the targets with most links", metrics)
