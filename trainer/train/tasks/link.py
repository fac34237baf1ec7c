"""Link prediction: learns to rank the target of each link above other nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainer.core.train_config import METRICS
from trainer.nn.link_metrics import LinkSums
from trainer.nn.links import softmax_loss
from trainer.train.tasks.task import Kind, Labelled


@dataclass(frozen=True)
class LinkPrediction:
    """Loss: each link's target against the step's negatives. Metrics: MRR, Hits@k and AUC among them.

    Losses are ``softmax`` (cross entropy of the target among the negatives), ``in-batch`` (the same, corrected by
    ``LinkEnds.log_q``), ``bpr`` and ``bce`` (binary cross entropy, with the same weight for targets and negatives).

    ``out``: scores from ``LinkModel``, [num_seeds, 1 + m + k]. Column 0 has the scores of the links. The other columns
    have the scores of the m negatives that all links share, and of the k that a link alone has. A negative
    that equals the target of a link is left out for that link. Without any other negative, as in a graph with one
    target, there is no AUC. Links that are queries for both of their ends have two rows, and their loss is the mean.
    """

    outputs: int  #: width of a node's embedding
    names: tuple[str, ...] = METRICS["link"]
    loss: str = "softmax"
    kind: Kind = "link"

    @property
    def hits(self) -> tuple[int, ...]:
        """The k of the chosen Hits@k."""
        return tuple(int(name.removeprefix("hits@")) for name in self.names if name.startswith("hits@"))

    @property
    def num_sums(self) -> int:
        return 4 + len(self.hits)

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        if not len(out):
            return out.sum()
        positive, negative = self._scores(out, batch)
        if self.loss == "bpr":
            loss = _mean_per_link(functional.softplus(negative - positive[:, None]), negative)
        elif self.loss == "bce":
            loss = functional.softplus(-positive).sum() + _mean_per_link(functional.softplus(negative), negative)
        else:
            if batch.links is not None and batch.links.log_q is not None:
                positive = positive - batch.links.log_q[: len(out)]
                log_q = batch.links.log_q[len(out) :]
                negative = negative - functional.pad(
                    log_q, (0, negative.shape[1] - len(log_q))
                )  # own ones are always there
            loss = softmax_loss(positive, negative) * len(out)
        return loss / batch.links.per_link if batch.links is not None else loss

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        sums = LinkSums(self.hits, out.device)
        if len(out):
            sums.add(*self._scores(out, batch))
        return sums.sums

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        score = LinkSums(self.hits).result(torch.tensor(sums, dtype=torch.float64))
        found = {"mrr": score.mrr, **{f"hits@{k}": score.hits[k] for k in self.hits}, "auc": score.auc}
        undefined = {"auc"} if math.isnan(score.auc) and self.names[0] != "auc" else set()
        return {name: found[name] for name in self.names if name not in undefined}

    def scores(self, out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs, "metrics": list(self.names), "loss": self.loss}

    @staticmethod
    def _scores(out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        links = batch.links
        assert links is not None
        return out[:, 0], out[:, 1:].masked_fill(links.is_target(), -torch.inf)


def _mean_per_link(losses: Tensor, negative: Tensor) -> Tensor:
    """Return the sum over links of the mean over the negatives that are not left out (``-inf``); 0 without any."""
    counted = negative != -torch.inf
    return (torch.where(counted, losses, 0).sum(1) / counted.sum(1).clamp(min=1)).sum()
