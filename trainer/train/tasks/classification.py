"""Classification: one class per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.train.tasks.task import Kind, Labelled, Metric


@dataclass(frozen=True)
class Classification:
    """Cross entropy and accuracy. ``out``: logits [num_seeds, outputs]; ``batch.y``: classes, integers [num_seeds]."""

    outputs: int  #: number of classes
    kind: Kind = "classification"
    metric: Metric = Metric("accuracy", "higher")
    num_sums: int = 2

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        assert batch.y is not None
        return functional.cross_entropy(out, batch.y.long(), reduction="sum")

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return the number of seeds predicted correctly, and the number of seeds."""
        assert batch.y is not None
        right = out.argmax(1) == batch.y.long()
        return torch.stack([right.sum(), right.new_full((), len(right), dtype=torch.int64)]).double()

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"accuracy": sums[0] / sums[1]}

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs}
