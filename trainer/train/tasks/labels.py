"""Labels ``y`` of seeds: as numbers, with NaN for missing labels, and the names of their classes or columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.graph_attrs import decode_texts
from trainer.core.schema import AnyType, type_name
from trainer.graph.open import Graph


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
class SeedLabels:
    split: str
    ids: Ids  #: int64 [n] original ids
    y: Tensor  #: [n, …] in the dataset's dtype


def label_texts(graph: Graph, target: AnyType, word: str) -> list[str] | None:
    """Return the names of the classes (``CATEGORIES``), or of the columns of ``y``; None if they have none."""
    prefix = f"{type_name(target)}__" if graph.manifest.hetero or not isinstance(target, str) else ""
    texts = graph.store.graph_attrs.get(f"{prefix}y__{word}")
    return decode_texts(np.asarray(texts)) if texts is not None else None
