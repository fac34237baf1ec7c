"""Multi-label classification: several labels per node, each of which applies or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.train.tasks.labels import labels_01
from trainer.train.tasks.task import Kind, Labelled, macro_f1


@dataclass(frozen=True)
class MultiLabel:
    """Loss: binary cross entropy. Metrics: F1, the share of correct labels, ROC-AUC and average precision.

    ``out``: logits [num_seeds, outputs]; a label is predicted if its logit is above 0, and NaN is always wrong.
    ``batch.y``: 0 or 1 [num_seeds, outputs]; missing labels are left out. The loss of a seed is the mean over its known
    labels.
    """

    outputs: int  #: number of labels
    names: tuple[str, ...] = ("micro_f1", "accuracy")
    kind: Kind = "multilabel"

    @property
    def num_sums(self) -> int:
        return 5 * self.outputs

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        y, known = self._known(batch)
        each = functional.binary_cross_entropy_with_logits(out, y.nan_to_num().to(out.dtype), reduction="none")
        return (torch.where(known, each, 0).sum(1) / known.sum(1).clamp(min=1)).sum()

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return by label how often it was predicted rightly, predicted, true, predicted or left out rightly, known."""
        y, known = self._known(batch)
        predicted, true = (out > 0) & known, y == 1
        counts = [predicted & true, predicted, true, (predicted == true) & known & ~out.isnan(), known]
        return torch.cat([count.sum(0) for count in counts]).double()

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return F1 (0 without true positives) and the share of known labels predicted correctly."""
        by_label = torch.tensor(sums, dtype=torch.float64).view(5, -1)
        right, predicted, true, correct, known = by_label.sum(1).tolist()
        found = {
            "micro_f1": 2 * right / max(predicted + true, 1),
            "macro_f1": macro_f1(*by_label[:3]),
            "accuracy": correct / max(known, 1),
        }
        return {name: found[name] for name in self.names if name in found}

    def scores(self, out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        y, known = self._known(batch)
        return out, torch.where(known, y, -1)

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs, "metrics": list(self.names)}

    def _known(self, batch: Labelled) -> tuple[Tensor, Tensor]:
        assert batch.y is not None
        y = labels_01(batch.y)
        return y, ~y.isnan()
