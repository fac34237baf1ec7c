"""Converts labels ``y`` to numbers, with NaN for missing labels, and checks the labels of all seeds."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import DataError
from trainer.core.graph_attrs import decode_texts
from trainer.core.ranks import RankGroup
from trainer.core.schema import AnyType, NodeType, type_name
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.sampler.types import RowRequest
from trainer.store.manifest import AttrSpec


def numbers(y: Tensor, classes: bool = False) -> Tensor:
    """Return ``y`` [n] or [n, D] as float64 [n, D].

    If ``classes``, a negative value means a missing label, and becomes NaN.
    """
    values = y.double().flatten(1) if y.dim() > 1 else y.double()[:, None]
    return torch.where(values < 0, torch.nan, values) if classes else values


def labels_01(y: Tensor) -> Tensor:
    """Return labels 0 and 1 as float64 [n, L]. Missing labels, NaN or a negative integer in ``y``, become NaN."""
    return numbers(y, classes=not y.is_floating_point())


@functools.cache
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return ``values`` as float64 [D] on ``device``, without a copy from the host, which would synchronise a GPU."""
    return torch.stack([torch.full((), value, dtype=torch.float64, device=device) for value in values])


@dataclass(frozen=True)
class LabelSpec:
    """What is known of the labels of a type of nodes or edges."""

    dataset: str
    of: str  #: `` of TYPE`` for messages; '' in a homogeneous graph
    y: AttrSpec
    num_classes: int  #: 0: they are not classes
    seed: str = "node"  #: or ``edge``


@dataclass(frozen=True)
class SeedLabels:
    split: str
    ids: Ids  #: int64 [n] original ids
    y: Tensor  #: [n, …] in the dataset's dtype


def own_labels(graph: Graph, target: NodeType, split: str, group: RankGroup) -> SeedLabels:
    """Return this rank's seeds of a split with their labels: every ``group.size``-th seed, from ``group.rank`` on.

    Raises ``DataError`` for complex numbers.
    """
    seeds = np.asarray(graph.store.seeds(target, split))[group.rank :: group.size]
    rows = graph.access.gather([RowRequest(target, seeds, ("y", "orig_id"))])[0]
    y = as_tensor(np.ascontiguousarray(rows["y"]), graph.manifest.nodes[target].attrs["y"])
    if y.is_complex():
        raise DataError(f"{graph.manifest.dataset}: y is {y.dtype}; labels must be real numbers")
    return SeedLabels(split, np.asarray(rows["orig_id"]), y)


def check_classes(spec: LabelSpec, labels: SeedLabels) -> None:
    y, classes = labels.y.double(), spec.num_classes
    bad = (~(y >= 0) | (y >= classes) | (y != y.floor())).nonzero().flatten()
    if len(bad):
        seed, label = labels.ids[int(bad[0])], y[bad[0]].item()
        raise DataError(
            f"{spec.dataset}: {len(bad)} seeds of the {labels.split} split{spec.of} have no "
            f"class in 0 … {classes - 1}, for instance {spec.seed} {seed} with y = {label:g}; "
            "remove them from the split, or label them"
        )


def check_known(spec: LabelSpec, labels: SeedLabels, y: Tensor) -> None:
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


def label_texts(graph: Graph, target: AnyType, word: str) -> list[str] | None:
    """Return the names of the classes (``CATEGORIES``), or of the columns of ``y``; None if they have none."""
    prefix = f"{type_name(target)}__" if graph.manifest.hetero or not isinstance(target, str) else ""
    texts = graph.store.graph_attrs.get(f"{prefix}y__{word}")
    return decode_texts(np.asarray(texts)) if texts is not None else None
