"""The bundled trainer's task, node classification: loss and number of correct predictions of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainer.core.batch import Batch, HeteroBatch
from trainer.core.errors import DataError, SettingsError
from trainer.core.ranks import RankGroup
from trainer.core.schema import HOMO_NODE, NodeType
from trainer.graph.open import Graph
from trainer.sampler.types import RowRequest
from trainer.store.manifest import Manifest, NodeSpec


class Task(Protocol):
    """Computes loss and correct predictions of a model's output, summed over the seeds of this rank's batch."""

    def loss_sum(self, out: Tensor, batch: Batch | HeteroBatch) -> Tensor:
        """Return the differentiable loss, summed over the seeds; 0 for a batch without seeds."""

    def correct(self, out: Tensor, batch: Batch | HeteroBatch) -> Tensor:
        """Return the number of seeds predicted correctly, int64 []."""


@dataclass(frozen=True)
class NodeClassification:
    """Classification of seed nodes, with one class per node. ``out``: logits [num_seeds, num_classes]."""

    num_classes: int

    def loss_sum(self, out: Tensor, batch: Batch | HeteroBatch) -> Tensor:
        assert batch.y is not None
        return functional.cross_entropy(out, batch.y.long(), reduction="sum")

    def correct(self, out: Tensor, batch: Batch | HeteroBatch) -> Tensor:
        assert batch.y is not None
        return (out.argmax(1) == batch.y).sum()


def pick_target(manifest: Manifest, wanted: str | None = None) -> NodeType:
    """Return the node type to classify: ``wanted``, or else the only one with labels, classes and train seeds.

    Raises ``SettingsError`` if ``wanted`` does not exist or several types can be classified, ``DataError`` if none can.
    """
    if wanted is not None:
        if wanted not in manifest.nodes:
            raise SettingsError(f"target is {wanted!r}; {manifest.dataset} has {', '.join(sorted(manifest.nodes))}")
        return wanted
    if not manifest.hetero:
        return HOMO_NODE
    able = [of for of, spec in manifest.nodes.items() if "y" in spec.attrs and spec.num_classes and _trains(spec)]
    if len(able) > 1:
        raise SettingsError(f"{manifest.dataset}: {', '.join(able)} can all be classified; choose one as target")
    if not able:
        raise DataError(f"{manifest.dataset}: no node type has both class labels y and a train split with seeds")
    return able[0]


def node_classification(
    graph: Graph, target: NodeType, splits: tuple[str, ...], group: RankGroup
) -> NodeClassification:  # fmt: skip
    """Make the task, after checking the labels of all seeds. Each rank checks its share. Collective.

    Raises ``DataError`` if the target has no labels or train seeds, a seed has no label, or a homogeneous graph has no
    features.
    """
    manifest = graph.manifest
    spec, nodes = manifest.nodes[target], f"nodes of type {target}" if manifest.hetero else "nodes"
    for attr in ("y",) if manifest.hetero else ("x", "y"):
        if attr not in spec.attrs:
            needs = "labels y" if manifest.hetero else "features x and labels y"
            raise DataError(f"{manifest.dataset}: {nodes} have no {attr}; training needs {needs}")
    if not _trains(spec):
        raise DataError(f"{manifest.dataset}: the train split{_of(manifest, target)} has no seeds")
    if len(spec.attrs["y"].shape) != 1 or spec.num_classes < 1:
        raise DataError(f"{manifest.dataset}: y must be one class per node, not {list(spec.attrs['y'].shape)}")
    for split in splits:
        _check_labels(graph, target, split, group)
    return NodeClassification(spec.num_classes)


def _trains(spec: NodeSpec) -> bool:
    return spec.splits.get("train", 0) > 0


def _of(manifest: Manifest, target: NodeType) -> str:
    return f" of {target}" if manifest.hetero else ""


def _check_labels(graph: Graph, target: NodeType, split: str, group: RankGroup) -> None:
    seeds = np.asarray(graph.store.seeds(target, split))[group.rank :: group.size]
    rows = graph.access.gather([RowRequest(target, seeds, ("y", "orig_id"))])[0]
    labels = torch.from_numpy(np.asarray(rows["y"], np.float64))
    classes = graph.manifest.nodes[target].num_classes
    bad = (~(labels >= 0) | (labels >= classes) | (labels != labels.floor())).nonzero().flatten()
    if len(bad):
        node, label = rows["orig_id"][int(bad[0])], labels[bad[0]].item()
        raise DataError(
            f"{graph.manifest.dataset}: {len(bad)} seeds of the {split} split{_of(graph.manifest, target)} have no "
            f"class in 0 … {classes - 1}, for instance node {node} with y = {label:g}; "
            "remove them from the split, or label them"
        )
