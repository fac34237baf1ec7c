"""Scores of the simplest predictions, from which one sees whether a model has learned anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array, Ids
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph
from trainer.sampler.types import RowRequest
from trainer.train.tasks.classification import Classification
from trainer.train.tasks.labels import SeedLabels, labels_01
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import Labels, Task

if TYPE_CHECKING:
    from trainer.loader.block_loader import BlockLoader
    from trainer.loader.edge_endpoints import EdgeEndpoints
    from trainer.loader.link_block_loader import LinkBlockLoader
    from trainer.loader.link_seeds import LinkInputs
    from trainer.loader.typed_link_loader import TypedLinkLoader
    from trainer.train.tasks.link import LinkPrediction

#: Scores the ranking of all nodes by their numbers of links, by the metrics of the given names. Collective.
FullRanking: TypeAlias = Callable[["LinkCounts", Sequence[str]], dict[str, float]]

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


def node_baseline(
    task: Task, labels: Sequence[SeedLabels], group: RankGroup, classes: Sequence[str] | None = None
) -> Baseline:
    """Score the prediction that is best for the train seeds if nothing is known of a seed. Collective.

    That is the most frequent class, the mean of numbers, or each label that most seeds have. ``labels``: those of this
    rank's seeds of each split. ``classes``: their names, if they have some.
    """
    train = next(each.y for each in labels if each.split == "train")
    if isinstance(task, Classification):
        counts = group.sum(torch.bincount(train.reshape(-1).long(), minlength=task.outputs).double())
        most = int(counts.argmax())
        name, out = f"class {classes[most] if classes else most}, the most frequent", counts
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


@dataclass(frozen=True)
class LinkCounts:
    """How many links of training nodes have, by edge type and end: 0 source, 1 target."""

    found: Mapping[tuple[EdgeType, int], tuple[Ids, Array]]  #: original ids, ascending, and counts above 0

    @classmethod
    def counted(
        cls, graph: Graph, types: Mapping[EdgeType, LinkInputs | None], both: bool, group: RankGroup
    ) -> LinkCounts:  # fmt: skip
        """Count the links of edge types; None: all edges of the type. Collective. ``both``: also those of sources.

        Of very many links, equally spaced ones are counted. A process needs 8 bytes per node of a type at a time, and
        16 bytes per node that has links, of each type.
        """
        from trainer.loader.edge_endpoints import StoredEndpoints

        found: dict[tuple[EdgeType, int], tuple[Ids, Array]] = {}
        for end in (1, 0) if both else (1,):
            for of, links in types.items():
                size = graph.manifest.nodes[of[2 * end]].num_nodes
                ends: EdgeEndpoints = StoredEndpoints(graph, of) if links is None else links.ends
                every = max(1, -(-len(ends) // _MOST_COUNTED))

                def own_counts(
                    ends: EdgeEndpoints = ends, every: int = every, size: int = size, end: int = end
                ) -> Tensor:
                    counts, own = np.zeros(size, np.int64), np.arange(group.rank * every, len(ends), group.size * every)
                    for start in range(0, len(own), _AT_ONCE):
                        counts += np.bincount(ends.ends_of(own[start : start + _AT_ONCE])[end], minlength=size)
                    return torch.from_numpy(counts).double()

                counts = group.sum(group.agree(own_counts)).numpy()
                linked = np.flatnonzero(counts)
                found[of, end] = linked, counts[linked]
        return cls(found)

    @property
    def asked(self) -> Sequence[tuple[EdgeType, int]]:
        """The edge types and ends that were counted, targets first."""
        return tuple(self.found)

    def of(self, edge_type: EdgeType, end: int, nodes: Ids) -> Array:
        """Return the counts of nodes by original id, float64 [n]."""
        linked, counts = self.found[edge_type, end]
        if not len(linked):
            return np.zeros(len(nodes))
        at = np.minimum(np.searchsorted(linked, nodes), len(linked) - 1)
        return np.where(linked[at] == nodes, counts[at], 0.0)

    def of_targets(self, graph: Graph) -> Tensor:
        """Return the counts of all targets of the only edge type, float64 [targets] by original id."""
        ((edge_type, _),) = self.found
        return torch.from_numpy(self.of(edge_type, 1, np.arange(graph.manifest.nodes[edge_type[2]].num_nodes)))


def link_baseline(
    loaders: Mapping[str, BlockLoader], full: Mapping[str, FullRanking], task: LinkPrediction, counts: LinkCounts,
    graph: Graph, group: RankGroup,
) -> Baseline:  # fmt: skip
    """Score the ranking of nodes by their number of train links, among the negatives that the model gets. Collective.

    ``full``: for each split that is ranked among all nodes, a function that scores such a ranking.
    """
    from trainer.loader.typed_link_loader import TypedLinkLoader

    def scored(loader: Any) -> Tensor:
        if isinstance(loader, TypedLinkLoader):
            return _typed_sums(loader, task, counts)
        return _sums(loader, task, counts.of_targets(graph))

    held_out = [(split, loader) for split, loader in loaders.items() if split != "train"]
    sums = {split: group.sum(group.agree(lambda loader=loader: scored(loader))) for split, loader in held_out}  # type: ignore[misc]
    metrics = {split: task.metrics(each.tolist()) for split, each in sums.items()}
    metrics |= {split: score(counts, task.names) for split, score in full.items()}
    both = any(not end for _, end in counts.asked)
    return Baseline(f"the {'nodes' if both else 'targets'} with most links", metrics)


def _sums(loader: LinkBlockLoader, task: LinkPrediction, counts: Tensor) -> Tensor:
    from trainer.nn.link_metrics import LinkSums

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


def _typed_sums(loader: TypedLinkLoader, task: LinkPrediction, counts: LinkCounts) -> Tensor:
    sums, types = torch.zeros(task.num_sums, dtype=torch.float64), loader.links.types
    for share in loader.shares(0):
        seeds, ends = loader.seeded(share)
        if not len(share.positions) or ends.relation is None or ends.group is None:
            continue
        rows = loader.graph.access.gather([RowRequest(of, seeds.nodes[of], ("orig_id",)) for of in ends.types])
        ids = [np.asarray(each["orig_id"], np.int64) for each in rows]
        out = torch.empty(len(ends.dst), 1 + ends.negatives.shape[1], dtype=torch.float64)
        for number in ends.relation.unique().tolist():
            of, end = types[number % len(types)], int(number < len(types))
            popular = [
                counts.of(of, end, own) if each == of[2 * end] else np.zeros(len(own))
                for each, own in zip(ends.types, ids, strict=True)
            ]
            table, some = torch.from_numpy(np.concatenate(popular)), ends.relation == number
            out[some] = table[torch.cat([ends.dst[some][:, None], ends.negatives[ends.group[some]]], 1)]
        sums += task.metric_sums(out, Labels(links=ends))
    return sums
