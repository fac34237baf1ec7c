"""ROC-AUC and average precision, which are no sums over seeds: they need the scores of all seeds of a split."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.core.ranks import RankGroup
from trainer.train.tasks.task import RANKING, Labelled, Task


class SplitScores:
    """Collects the scores and labels of this rank's seeds of a split, in memory on the host.

    Each class or label is a column; two classes are one column, that of class 1. A metric is the mean over the columns
    that have both kinds of seeds, as with OGB, and with scikit-learn for one class versus the rest.
    """

    def __init__(self, task: Task):
        self._task, self._names = task, [name for name in task.names if name in RANKING]
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, out: Tensor, batch: Labelled) -> None:
        if self._names and len(out):
            scores, labels = self._task.scores(out, batch)
            self._parts.append((scores.float().cpu(), labels.to(torch.int8).cpu()))

    def metrics(self, group: RankGroup) -> dict[str, float]:
        """Return the metrics by name; NaN without a column that has both kinds of seeds. Collective.

        All ranks get one column at a time, and each computes the metrics of some of them.
        """
        if not self._names:
            return {}
        scores, labels = (torch.cat([part[k] for part in self._parts]) if self._parts else None for k in (0, 1))
        width = max(group.gather(0 if scores is None else scores.shape[1]))
        sums = torch.zeros(1 + len(RANKING), dtype=torch.float64)  # number of columns, and sum of each metric
        for k in range(width):
            own = None if scores is None or labels is None else (scores[:, k], labels[:, k])
            parts = group.gather(own and tuple(column.contiguous().numpy().tobytes() for column in own))
            if k % group.size == group.rank:
                some = [part for part in parts if part is not None]
                column = torch.frombuffer(bytearray(b"".join(part[0] for part in some)), dtype=torch.float32)
                known = torch.frombuffer(bytearray(b"".join(part[1] for part in some)), dtype=torch.int8)
                sums += _binary_metrics(column[known >= 0], known[known >= 0] == 1)
        count, *totals = group.sum(sums).tolist()
        found = dict(zip(RANKING, totals, strict=True))
        return {name: found[name] / count if count else float("nan") for name in self._names}


def in_order(task: Task, *found: Mapping[str, float]) -> dict[str, float]:
    """Return all metrics in the order in which they were chosen, then the others, such as those of single columns."""
    metrics = {name: value for each in found for name, value in each.items()}
    return {name: metrics[name] for name in (*task.names, *metrics) if name in metrics}


def _binary_metrics(scores: Tensor, true: Tensor) -> Tensor:
    """Return 1, ROC-AUC and average precision, or zeros if all seeds are true, or none is.

    Equal scores are one threshold, whatever their order. A score of NaN counts against the model.
    """
    if not 0 < int(true.sum()) < len(true):
        return torch.zeros(1 + len(RANKING), dtype=torch.float64)
    scores = torch.where(scores.isnan(), torch.where(true, -torch.inf, torch.inf), scores)
    order = scores.argsort(descending=True)
    scores, true = scores[order], true[order].double()
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # of each group of equal scores
    seen = torch.arange(1, len(true) + 1, dtype=torch.float64)[last]
    right = true.cumsum(0)[last]
    wrong, zero = seen - right, torch.zeros(1, dtype=torch.float64)
    area = torch.trapezoid(torch.cat([zero, right]) / right[-1], torch.cat([zero, wrong]) / wrong[-1])
    precision = (right.diff(prepend=zero) / right[-1] * right / seen).sum()
    return torch.stack([torch.ones_like(area), area, precision])
