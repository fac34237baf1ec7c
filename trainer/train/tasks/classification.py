"""Classification: one class per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.train.tasks.labels import on_device
from trainer.train.tasks.task import Kind, Labelled, Metric


@dataclass(frozen=True)
class Classification:
    """Cross entropy and accuracy. ``out``: logits [num_seeds, outputs]; ``batch.y``: classes, integers [num_seeds].

    The loss of a seed has the weight of its class, and the loss of a step is the mean of these products over its seeds,
    so that it does not depend on the number of ranks.
    """

    outputs: int  #: number of classes
    weights: tuple[float, ...] = ()  #: of each class; (): all 1
    smoothing: float = 0.0  #: share of each label that is spread over all classes
    kind: Kind = "classification"
    metric: Metric = Metric("accuracy", "higher")
    num_sums: int = 2

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        assert batch.y is not None
        weight = on_device(self.weights, out.device).to(out.dtype) if self.weights else None
        return functional.cross_entropy(out, batch.y.long(), weight, reduction="sum", label_smoothing=self.smoothing)

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return the number of seeds predicted correctly, and the number of seeds."""
        assert batch.y is not None
        right = out.argmax(1) == batch.y.long()
        return torch.stack([right.sum(), right.new_full((), len(right), dtype=torch.int64)]).double()

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        return {"accuracy": sums[0] / sums[1]}

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs}
