"""Chooses the task of a run by the settings or labels, and restores the task that a checkpoint records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import CATEGORIES, CLASSES
from trainer.core.memory import size_text
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.core.train_config import AT_K, METRICS, TrainConfig, is_own_model
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.sampler.types import RowRequest
from trainer.store.manifest import AttrSpec
from trainer.train.tasks.baseline import Baseline, node_baseline
from trainer.train.tasks.choose_target import check_trainable
from trainer.train.tasks.classification import Classification
from trainer.train.tasks.labels import SeedLabels, label_texts, labels_01, numbers
from trainer.train.tasks.multilabel import MultiLabel
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import RANKING, Kind, Task, at_k

if TYPE_CHECKING:
    from trainer.loader.edge_block_loader import LabelledEdges

_SCORE_BYTES = 5  #: of a score and its label

_MOST_SCORES = 4 << 30  #: largest size of the scores of a split on each rank, in bytes

#: Default metrics of task link with ``eval_negatives: all``.
_FULL_RANKING = ("recall@20", "ndcg@20", "precision@20", "mrr", "hits@10", "auc")


@dataclass(frozen=True)
class _LabelSpec:
    """What is known of the labels of a type of nodes or edges."""

    dataset: str
    of: str  #: `` of TYPE`` for messages; '' in a homogeneous graph
    y: AttrSpec
    num_classes: int  #: 0: they are not classes
    seed: str = "node"  #: or ``edge``


def node_task(
    graph: Graph, target: NodeType, settings: TrainConfig, splits: Sequence[str], group: RankGroup
) -> tuple[Task, str, Baseline]:  # fmt: skip
    """Make the task of a node type, after checking the labels of all seeds. Collective.

    Returns the task, the reason for its kind in words, and a baseline. Raises ``DataError`` if the target has no labels
    or train seeds, a seed has no label, or the labels do not fit the task in ``settings``.
    """
    manifest = graph.manifest
    group.agree(lambda: check_trainable(manifest, target, needs_features=not is_own_model(settings.model)))
    labels = group.agree(lambda: [_own_labels(graph, target, split, group) for split in splits])
    own = manifest.nodes[target]
    spec = _LabelSpec(manifest.dataset, f" of {target}" if manifest.hetero else "", own.attrs["y"], own.num_classes)
    return _labelled_task(spec, labels, settings.task, settings, group, label_texts(graph, target, CATEGORIES))


def _own_labels(graph: Graph, target: NodeType, split: str, group: RankGroup) -> SeedLabels:
    """Return this rank's seeds of a split with their labels: every ``group.size``-th seed, from ``group.rank`` on.

    Raises ``DataError`` for complex numbers.
    """
    seeds = np.asarray(graph.store.seeds(target, split))[group.rank :: group.size]
    rows = graph.access.gather([RowRequest(target, seeds, ("y", "orig_id"))])[0]
    y = as_tensor(np.ascontiguousarray(rows["y"]), graph.manifest.nodes[target].attrs["y"])
    if y.is_complex():
        raise DataError(f"{graph.manifest.dataset}: y is {y.dtype}; labels must be real numbers")
    return SeedLabels(split, np.asarray(rows["orig_id"]), y)


def edge_task(
    graph: Graph, edge_type: EdgeType, settings: TrainConfig, seeds: Mapping[str, LabelledEdges], group: RankGroup
) -> tuple[Task, str, Baseline]:  # fmt: skip
    """Make the task of labels of edges, as ``node_task`` does for nodes. Collective.

    ``seeds``: the edges of each split. Raises ``DataError`` without edges to train on, and as ``node_task``.
    """
    manifest, name = graph.manifest, type_name(edge_type)
    if "train" not in seeds:
        raise DataError(f"{manifest.dataset}: no edges of {name} are in the train split, by attribute edge_split")
    classes = graph.store.graph_attrs.get(f"{name}__{CLASSES}")
    spec = _LabelSpec(
        manifest.dataset, f" of {name}" if manifest.hetero else " of edges", manifest.edges[edge_type].attrs["y"],
        0 if classes is None else int(np.asarray(classes)[0]), "edge",
    )  # fmt: skip
    own = slice(group.rank, None, group.size)
    labels = [SeedLabels(split, edges.orig_id[own], edges.y[own]) for split, edges in seeds.items()]
    names = label_texts(graph, edge_type, CATEGORIES)
    return _labelled_task(spec, labels, settings.task.removeprefix("edge-"), settings, group, names)


def _labelled_task(
    spec: _LabelSpec, labels: Sequence[SeedLabels], wanted: str, settings: TrainConfig, group: RankGroup,
    classes: Sequence[str] | None,
) -> tuple[Task, str, Baseline]:  # fmt: skip
    """``labels``: those of this rank's seeds of each split. ``wanted``: ``auto``, or a kind of task.

    ``classes``: names of the classes, if they have some.
    """
    ys = [labels_01(each.y) for each in labels]
    others = group.sum(torch.tensor([sum(not bool(((y == 0) | (y == 1) | y.isnan()).all()) for y in ys)]))
    kind, why = group.agree(lambda: _kind(spec, wanted, matrix_01=not int(others)))
    task = _task(spec, kind, labels, settings, group)
    most = max((len(each.y) for each in labels if each.split != "train"), default=0) * task.outputs * _SCORE_BYTES
    if set(RANKING).intersection(task.names) and most > _MOST_SCORES:
        names = " and ".join(name for name in task.names if name in RANKING)
        raise SettingsError(
            f"{names}: the scores of a split would take {size_text(most)} on each process, more than "
            f"{size_text(_MOST_SCORES)}; leave them out, or use more processes"
        )
    return task, why, node_baseline(task, labels, group, classes)


def _kind(spec: _LabelSpec, wanted: str, matrix_01: bool) -> tuple[Kind, str]:
    """Return the kind of task, and the reason in words. ``matrix_01``: whether all seed labels are 0, 1 or missing."""
    y, name = spec.y, f"{spec.dataset}: y{spec.of}"
    found = f"y{spec.of} is {y.dtype} {list(y.shape)}"
    is_matrix = len(y.shape) == 2 and y.shape[1] > 1
    if len(y.shape) > 2:
        raise DataError(f"{name} is {y.dtype} {list(y.shape)}; expected [{spec.seed}s], or [{spec.seed}s, columns]")
    if wanted == "classification" and not spec.num_classes:
        raise DataError(
            f"{name} must be one class per {spec.seed} for task classification, not {y.dtype} {list(y.shape)}"
        )
    if wanted == "multilabel" and not (is_matrix and matrix_01):
        raise DataError(
            f"{name} must be a matrix of 0, 1 and missing labels (NaN, or -1) for task multilabel, not {y.dtype} "
            f"{list(y.shape)}" + (" with other values" if is_matrix else "")
        )
    if wanted != "auto":
        return wanted, found  # type: ignore[return-value]  # the settings check the names
    if spec.num_classes:
        return "classification", f"{found}, with {spec.num_classes} classes"
    if is_matrix and matrix_01:
        return "multilabel", f"{found}, and only 0 and 1"
    return "regression", f"{found}, not classes"


def _task(
    spec: _LabelSpec, kind: Kind, labels: Sequence[SeedLabels], settings: TrainConfig, group: RankGroup
) -> Task:  # fmt: skip
    (train,) = (each for each in labels if each.split == "train")
    if kind == "classification":
        _check_each(labels, lambda each: _check_classes(spec, each), group)
        weights = settings.class_weights or ()
        if weights == "balanced":
            counts = group.sum(torch.bincount(train.y.reshape(-1).long(), minlength=spec.num_classes).double())
            shares = counts * int((counts > 0).sum()) / counts.sum()
            weights = tuple((1 / torch.where(counts > 0, shares, 1.0)).tolist())
        if weights and len(weights) != spec.num_classes:
            raise SettingsError(
                f"class_weights has {len(weights)} numbers, but {spec.dataset} has {spec.num_classes} classes"
            )
        names = metric_names(settings, kind, ("accuracy",))
        return Classification(spec.num_classes, weights, settings.label_smoothing, names)
    if kind == "multilabel":
        _check_each(labels, lambda each: _check_known(spec, each, labels_01(each.y)), group)
        return MultiLabel(spec.y.shape[1], metric_names(settings, kind, ("micro_f1", "accuracy")))
    classes = spec.num_classes > 0 and "float" not in spec.y.dtype
    _check_each(labels, lambda each: _check_known(spec, each, numbers(each.y, classes)), group)
    # Mean and population standard deviation of each column of all ranks' train labels; 1 for a constant column.
    y = numbers(train.y, classes)
    known = ~y.isnan()
    count = group.sum(known.double().sum(0)).clamp(min=1)
    mean = group.sum(torch.where(known, y, 0).sum(0)) / count
    std = (group.sum(torch.where(known, y - mean, 0).square().sum(0)) / count).sqrt()
    std = torch.where(std > 1e-12 * mean.abs().clamp(min=1e-30), std, 1.0)
    return Regression(tuple(mean.tolist()), tuple(std.tolist()), classes, metric_names(settings, kind))


def metric_names(settings: TrainConfig, kind: Kind, default: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the metrics to compute, the one that chooses the best epoch first. ``default``: None: all.

    Also those of ``early_stop`` and ``schedule``. Raises ``SettingsError`` for a metric that the task does not have.
    """
    of_all = kind == "link" and settings.eval_negatives == "all"
    known = _FULL_RANKING if of_all else METRICS[kind]
    chosen = settings.metrics or default or known
    others = (keyed.metric for keyed in (settings.early_stop, settings.schedule) if keyed is not None)
    names = tuple(dict.fromkeys([*chosen, *(name for name in others if name not in (None, "loss"))]))
    if wrong := [name for name in names if not _has_metric(kind, name, of_all)]:
        if _has_metric(kind, wrong[0], True):
            raise SettingsError(f"{wrong[0]} needs eval_negatives: all")
        raise SettingsError(f"task {kind} has no metric {wrong[0]!r}; it has {', '.join(known)}")
    return names


def _has_metric(kind: Kind, name: str, full_ranking: bool) -> bool:
    """Return whether a task has a metric. ``full_ranking``: links are ranked among all targets."""
    what, k = at_k(name)
    of_links = kind == "link" and k > 0 and what in AT_K and (full_ranking or what == "hits")
    return name in METRICS[kind] or of_links


def _check_classes(spec: _LabelSpec, labels: SeedLabels) -> None:
    y, classes = labels.y.double(), spec.num_classes
    bad = (~(y >= 0) | (y >= classes) | (y != y.floor())).nonzero().flatten()
    if len(bad):
        seed, label = labels.ids[int(bad[0])], y[bad[0]].item()
        raise DataError(
            f"{spec.dataset}: {len(bad)} seeds of the {labels.split} split{spec.of} have no "
            f"class in 0 … {classes - 1}, for instance {spec.seed} {seed} with y = {label:g}; "
            "remove them from the split, or label them"
        )


def _check_known(spec: _LabelSpec, labels: SeedLabels, y: Tensor) -> None:
    """Raise ``DataError`` if a row of ``y`` [n, D] has only NaN values or at least one infinite value."""
    for what, bad, advice in (
        ("no", y.isnan().all(1), "remove them from the split, or give them a value"),
        ("an infinite", y.isinf().any(1), "replace it"),
    ):
        if found := bad.nonzero().flatten().tolist():
            raise DataError(
                f"{spec.dataset}: {len(found)} seeds of the {labels.split} split{spec.of} have {what} y, for instance "
                f"{spec.seed} {labels.ids[found[0]]}; {advice}"
            )


def _check_each(labels: Sequence[SeedLabels], check: Callable[[SeedLabels], None], group: RankGroup) -> None:
    def all_splits() -> None:
        for each in labels:
            check(each)

    group.agree(all_splits)


def of_record(record: Mapping[str, Any]) -> Task:
    """Make the task of a checkpoint from ``Checkpoint.task``, the result of ``Task.record``."""
    kind, names = record["kind"], tuple(record["metrics"])
    if kind == "regression":
        return Regression(tuple(record["mean"]), tuple(record["std"]), record["classes"], names)
    if kind == "classification":
        return Classification(record["outputs"], names=names)
    if kind == "link":
        from trainer.train.tasks.link import LinkPrediction

        return LinkPrediction(record["outputs"], names, record["loss"])
    return MultiLabel(record["outputs"], names)
