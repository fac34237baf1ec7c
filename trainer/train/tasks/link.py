"""Link prediction: learns to rank the target of each link above other nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.nn.link_metrics import LinkSums
from trainer.nn.links import softmax_loss
from trainer.train.tasks.task import METRICS, Kind, Labelled

HITS = (1, 10, 50)  #: k of the reported Hits@k


@dataclass(frozen=True)
class LinkPrediction:
    """Loss: softmax cross entropy of each link's target among the step's negatives. Metrics: MRR, Hits@k and AUC.

    ``out``: scores from ``LinkModel``, [num_seeds, 1 + m]. Column 0 has the scores of the links. The other columns have
    the scores of the m negatives that all links share. A negative that equals the target of a link is left out for
    that link. Without any other negative, as in a graph with one target, there is no AUC.
    """

    outputs: int  #: width of a node's embedding
    names: tuple[str, ...] = METRICS["link"]
    kind: Kind = "link"
    num_sums: int = 4 + len(HITS)

    def loss_sum(self, out: Tensor, batch: Labelled) -> Tensor:
        positive, negative = self._scores(out, batch)
        return softmax_loss(positive, negative) * len(out) if len(out) else out.sum()

    def metric_sums(self, out: Tensor, batch: Labelled) -> Tensor:
        sums = LinkSums(HITS, out.device)
        if len(out):
            sums.add(*self._scores(out, batch))
        return sums.sums

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        score = LinkSums(HITS).result(torch.tensor(sums, dtype=torch.float64))
        found = {"mrr": score.mrr, **{f"hits@{k}": score.hits[k] for k in HITS}, "auc": score.auc}
        undefined = {"auc"} if math.isnan(score.auc) and self.names[0] != "auc" else set()
        return {name: found[name] for name in self.names if name not in undefined}

    def scores(self, out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def record(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "outputs": self.outputs, "metrics": list(self.names)}

    @staticmethod
    def _scores(out: Tensor, batch: Labelled) -> tuple[Tensor, Tensor]:
        links = batch.links
        assert links is not None
        return out[:, 0], out[:, 1:].masked_fill(links.is_target(), -torch.inf)
