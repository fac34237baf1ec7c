"""Multi-label classification: several labels per node, each of which applies or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.train.tasks.labels import labels_01
from trainer.train.tasks.task import Kind, Labelled, Metric


@dataclass(frozen=True)
class MultiLabel:
    """Loss: binary cross entropy. Metrics: micro-averaged F1, and the share of correct labels.

    ``out``: logits [num_seeds, outputs]; a label is predicted if its logit is above 0. ``batch.y``: 0 or 1 [num_seeds,
    outputs]; missing labels are left out. The loss of a seed is the mean over its known labels.
    """

    outputs: int  #: number of labels
    kind: Kind = "multilabel"
    metric: Metric = Metric("micro_f1", "higher")
    num_sums: int = 5

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        y, known = self._known(batch)
        each = functional.binary_cross_entropy_with_logits(out, y.nan_to_num().to(out.dtype), reduction="none")
        return (torch.where(known, each, 0).sum(1) / known.sum(1).clamp(min=1)).sum()

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return the numbers of true positives, false positives, false negatives, correct labels and known labels."""
        y, known = self._known(batch)
        predicted, true = out > 0, y == 1
        counts = [predicted & true, predicted & ~true & known, ~predicted & true, (predicted == true) & known, known]
        return torch.stack([count.sum() for count in counts]).double()

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return micro-averaged F1 (0 without true positives) and the share of known labels predicted correctly."""
        right, false_positives, false_negatives, correct, known = sums
        return {
            "micro_f1": 2 * right / max(2 * right + false_positives + false_negatives, 1),
            "accuracy": correct / max(known, 1),
        }

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs}

    def _known(self, batch: Labelled) -> tuple[Tensor, Tensor]:
        assert batch.y is not None
        y = labels_01(batch.y)
        return y, ~y.isnan()
