"""What is learnt: the loss of a batch and how well it was predicted. The loop knows no more of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainer.batch import Batch
from trainer.errors import DataError
from trainer.load.open import Graph
from trainer.train.team import Team


class Task(Protocol):
    """A model's output becomes sums over the batch's own seeds; sums of ranks add up to the global batch."""

    def loss_sum(self, out: Tensor, batch: Batch) -> Tensor:
        """Loss summed over the seeds, differentiable; 0 for a batch without seeds."""

    def correct(self, out: Tensor, batch: Batch) -> Tensor:
        """Seeds predicted right, int64 []."""


@dataclass(frozen=True)
class NodeClassification:
    """One class per seed node; ``out`` is logits [num_seeds, num_classes]."""

    num_classes: int

    def loss_sum(self, out: Tensor, batch: Batch) -> Tensor:
        assert batch.y is not None
        return functional.cross_entropy(out, batch.y.long(), reduction="sum")

    def correct(self, out: Tensor, batch: Batch) -> Tensor:
        assert batch.y is not None
        return (out.argmax(1) == batch.y).sum()


def node_classification(graph: Graph, splits: tuple[str, ...], team: Team) -> NodeClassification:
    """The task of a graph whose seeds all have a label; each rank looks through its share of them.

    Raises ``DataError`` for a graph without features, labels or train seeds, or a seed without a label.
    """
    manifest = graph.manifest
    for attr in ("x", "y"):
        if attr not in manifest.attrs:
            raise DataError(f"{manifest.dataset}: nodes have no {attr}; training needs features x and labels y")
    if not manifest.splits.get("train"):
        raise DataError(f"{manifest.dataset}: the train split has no seeds")
    if len(manifest.attrs["y"].shape) != 1 or manifest.num_classes < 1:
        raise DataError(f"{manifest.dataset}: y must be one class per node, not {list(manifest.attrs['y'].shape)}")
    for split in splits:
        _check_labels(graph, split, team)
    return NodeClassification(manifest.num_classes)


def _check_labels(graph: Graph, split: str, team: Team) -> None:
    seeds = np.asarray(graph.store.seeds(split))[team.rank :: team.size]
    rows = graph.access.gather(seeds, ["y", "orig_id"])
    labels = torch.from_numpy(np.asarray(rows["y"], np.float64))
    bad = (~(labels >= 0) | (labels >= graph.manifest.num_classes) | (labels != labels.floor())).nonzero().flatten()
    if len(bad):
        node, label = rows["orig_id"][int(bad[0])], labels[bad[0]].item()
        raise DataError(
            f"{graph.manifest.dataset}: {len(bad)} seeds of the {split} split have no class in "
            f"0 … {graph.manifest.num_classes - 1}, for instance node {node} with y = {label:g}; "
            "take them out of the split, or label them"
        )
