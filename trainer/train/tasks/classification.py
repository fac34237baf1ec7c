"""Classification: one class per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.train.tasks.labels import on_device
from trainer.train.tasks.task import Kind, Labelled, macro_f1


@dataclass(frozen=True)
class Classification:
    """Cross entropy and accuracy. ``out``: logits [num_seeds, outputs]; ``batch.y``: classes, integers [num_seeds].

    The loss of a seed has the weight of its class, and the loss of a step is the mean of these products over its seeds,
    so that it does not depend on the number of ranks.
    """

    outputs: int  #: number of classes
    weights: tuple[float, ...] = ()  #: of each class; (): all 1
    smoothing: float = 0.0  #: share of each label that is spread over all classes
    names: tuple[str, ...] = ("accuracy",)
    kind: Kind = "classification"

    @property
    def num_sums(self) -> int:
        return 2 + 3 * self.outputs * ("macro_f1" in self.names)

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        assert batch.y is not None
        weight = on_device(self.weights, out.device).to(out.dtype) if self.weights else None
        return functional.cross_entropy(out, batch.y.long(), weight, reduction="sum", label_smoothing=self.smoothing)

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        """Return the number of seeds predicted correctly, and the number of seeds. NaN predicts no class.

        For macro-F1 also returns these numbers by class: predicted correctly, predicted, and of the class.
        """
        assert batch.y is not None
        predicted, y, known = out.argmax(1), batch.y.long(), ~out.isnan().any(1)
        right = (predicted == y) & known
        sums = [torch.stack([right.sum(), right.new_full((), len(right), dtype=torch.int64)]).double()]
        if "macro_f1" in self.names:
            for classes, counted in ((y, right), (predicted, known), (y, right | True)):
                by_class = torch.zeros(self.outputs, dtype=torch.float64, device=out.device)
                sums.append(by_class.index_add_(0, classes, counted.double()))
        return torch.cat(sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        accuracy = sums[0] / sums[1]  # also the micro-averaged F1, as each seed has one class and one prediction
        by_class = torch.tensor(sums[2:], dtype=torch.float64).view(3, -1)
        found = {"accuracy": accuracy, "micro_f1": accuracy, "macro_f1": macro_f1(*by_class)}
        return {name: found[name] for name in self.names if name in found}

    def scores(self, out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        assert batch.y is not None
        labels = batch.y.long()[:, None] == torch.arange(self.outputs, device=out.device)
        # In the order of the probabilities, of which those above 1 - 2^-25 would all be 1. Equal ones are equal once
        # they are rounded to float32, in whatever order the classes are added.
        out = out.double()
        if self.outputs == 2:
            return out[:, 1:] - out[:, :1], labels[:, 1:]
        total, best = out.logsumexp(1, keepdim=True), out.argmax(1, keepdim=True)
        others = total + torch.log1p(-(out - total).exp())  # logsumexp of the other classes; inexact for the best class
        others.scatter_(1, best, out.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True))
        return out - others, labels

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs, "metrics": list(self.names)}
