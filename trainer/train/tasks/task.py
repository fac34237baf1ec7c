"""The interface of a task, which defines what a model learns: its loss and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from trainer.core.batch import LinkEnds
from trainer.core.train_config import LOWER_IS_BETTER

Kind: TypeAlias = Literal["classification", "regression", "multilabel", "link"]


class Labelled(Protocol):
    @property
    def y(self) -> Tensor | None:
        """Labels of the seed nodes, [num_seeds, …]; None in link prediction."""

    @property
    def links(self) -> LinkEnds | None:
        """The links whose targets are ranked, in link prediction; else None."""


@dataclass(frozen=True)
class Labels:
    """Labels of seeds, passed to ``Task.metric_sums`` in place of a batch."""

    y: Tensor | None = None
    links: LinkEnds | None = None


@dataclass(frozen=True)
class Metric:
    """The metric of a task by which the best epoch is chosen."""

    name: str  #: as in metrics lines, such as ``accuracy`` or ``mae``
    better: Literal["higher", "lower"]

    def improves(self, value: float, best: float | None) -> bool:
        return best is None or math.isnan(best) or (value > best if self.better == "higher" else value < best)


RANKING = ("roc_auc", "average_precision")  #: metrics that are no sums over seeds; ``SplitScores`` computes them


def at_k(name: str) -> tuple[str, int]:
    """Split the name of a metric such as ``recall@20`` into what is measured, and k; 0 for other metrics."""
    kind, _, k = name.partition("@")
    return kind, int(k) if k.isdecimal() else 0


def metric_named(name: str) -> Metric:
    return Metric(name, "lower" if name in LOWER_IS_BETTER else "higher")


def macro_f1(right: Tensor, predicted: Tensor, true: Tensor) -> float:
    """Return the mean of the F1 of all classes that were predicted or are true; 0 without any. Counts by class."""
    some = predicted + true > 0
    return float((2 * right[some] / (predicted + true)[some]).mean()) if bool(some.any()) else 0.0


class Task(Protocol):
    """Loss and metrics of a model's output. Seeds are nodes or, in link prediction, links.

    ``loss_sum`` and ``metric_sums`` are sums over the seeds of this rank's batch. They can be added up over batches and
    ranks.
    """

    @property
    def kind(self) -> Kind: ...
    @property
    def names(self) -> tuple[str, ...]:
        """The chosen metrics; the first one chooses the best epoch."""

    @property
    def outputs(self) -> int:
        """How many numbers the model outputs per seed node; in link prediction, the width of an embedding."""

    @property
    def num_sums(self) -> int: ...

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return the differentiable loss, summed over the seeds; 0 for a batch without seeds."""

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return sums from which ``metrics`` computes the metrics, float64 [num_sums]."""

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the chosen metrics by name, except those in ``RANKING``."""

    def scores(self, out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        """Return scores [num_seeds, D] for ``RANKING``, and labels of the same shape: 1, 0, or -1 if missing."""

    def record(self) -> Mapping[str, Any]:
        """Return the values that a checkpoint stores, such as ``kind``. ``of_record`` makes the task from them."""
