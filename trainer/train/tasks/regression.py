"""Regression: one or several numbers per node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.train.tasks.labels import numbers, on_device
from trainer.train.tasks.task import Kind, Labelled

_COLUMNS_SHOWN = 20  #: of targets with more columns, metrics lines have only the means over columns


@dataclass(frozen=True)
class Regression:
    """Loss: mean squared error of standardised targets. Metrics: MAE and RMSE in units of ``y``.

    ``out``: [num_seeds, D], predictions of ``(y - mean) / std``. The loss of a seed is the mean over its known columns;
    missing values are left out.
    """

    mean: tuple[float, ...]  #: of each column, over the train seeds
    std: tuple[float, ...]  #: population standard deviation of each column; 1 for a constant
    classes: bool = False  #: whether ``y`` are class labels, of which -1 means missing
    names: tuple[str, ...] = ("mae", "rmse")
    kind: Kind = "regression"

    @property
    def outputs(self) -> int:
        return len(self.mean)

    @property
    def num_sums(self) -> int:
        return 3 * self.outputs

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        y, known = self._known(batch)
        mean, std = on_device(self.mean, y.device), on_device(self.std, y.device)
        wanted = ((y - mean) / std).to(out.dtype)
        squares = torch.where(known, out - wanted, 0).square()
        return (squares.sum(1) / known.sum(1).clamp(min=1)).sum()

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return for each column the sums of absolute and of squared errors, and the number of known values."""
        y, known = self._known(batch)
        errors = torch.where(known, self.predictions(out) - y, 0)
        return torch.cat([errors.abs().sum(0), errors.square().sum(0), known.double().sum(0)])

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return MAE and RMSE over all known values.

        With up to ``_COLUMNS_SHOWN`` columns, also returns the MAE of each column, NaN without known values.
        """
        width = self.outputs
        absolute, squared, known = sums[:width], sums[width : 2 * width], sums[2 * width :]
        count = max(sum(known), 1)
        both = {"mae": sum(absolute) / count, "rmse": math.sqrt(sum(squared) / count)}
        found = {name: both[name] for name in self.names}
        for k in range(width if 1 < width <= _COLUMNS_SHOWN else 0):
            found[f"mae_{k}"] = absolute[k] / known[k] if known[k] else math.nan
        return found

    def predictions(self, out: Tensor) -> Tensor:
        """Return predictions in units of ``y``, float64 [n, D]."""
        mean, std = on_device(self.mean, out.device), on_device(self.std, out.device)
        return out.double() * std + mean

    def record(self) -> Mapping[str, Any]:
        moments = {"mean": list(self.mean), "std": list(self.std)}
        return {"kind": self.kind, **moments, "classes": self.classes, "metrics": list(self.names)}

    def scores(self, out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _known(self, batch: Labelled) -> tuple[Tensor, Tensor]:
        assert batch.y is not None
        y = numbers(batch.y, self.classes)
        return y, ~y.isnan()
