"""Ranking metrics of links against given negatives: MRR, Hits@k, AUC.

Equal scores: a positive's rank is the middle of the ranks it could have, and AUC counts such a pair as half; a model
that scores all alike thus gets what chance gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HITS = (1, 3, 10, 50)


def ranks(positive: Tensor, negative: Tensor) -> Tensor:
    """Rank of each positive among its own negatives, from 1, float64 [n]; positive [n], negative [n, k].

    NaN scores rank last.
    """
    own = positive[:, None]
    above, level = (negative > own).sum(1), (negative == own).sum(1)
    found = 1 + above + level.double() / 2
    return torch.where(positive.isnan(), negative.shape[1] + 1.0, found)


def mrr(positive: Tensor, negative: Tensor) -> Tensor:
    """Mean reciprocal rank, float64 []; positive [n], negative [n, k]."""
    return ranks(positive, negative).reciprocal().mean()


def hits_at(k: int, positive: Tensor, negative: Tensor) -> Tensor:
    """Share of positives whose rank is at most k, float64 []; positive [n], negative [n, num]."""
    return (ranks(positive, negative) <= k).double().mean()


def auc(positive: Tensor, negative: Tensor) -> Tensor:
    """Chance that a positive scores above a negative, float64 []; any shapes, every positive against every negative.

    By the rank sum of the positives (Mann and Whitney, 1947), with middle ranks for equal scores.
    """
    scores = torch.cat([positive.flatten(), negative.flatten()])
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    middle = count.cumsum(0).double() - (count.double() - 1) / 2  # of the ranks 1 … n that equal scores share
    num_pos, num_neg = positive.numel(), negative.numel()
    rank_sum = middle[place[:num_pos]].sum()
    return (rank_sum - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg)


@dataclass(frozen=True)
class LinkScore:
    """A model's result on a set of links."""

    mrr: float
    hits: dict[int, float]  #: k -> share of positives with rank <= k
    auc: float  #: mean over positives, each against its own negatives
    links: int


class LinkSums:
    """The same over many batches and ranks: what is kept are sums, so those of all ranks can be added.

    AUC here is of each positive against its own negatives (the share of them that it beats), averaged over positives:
    the AUC over all pairs of all batches would need every score in one place.
    """

    def __init__(self, hits: Sequence[int] = HITS, device: torch.device | None = None):
        self.hits = tuple(hits)
        self.sums = torch.zeros(3 + len(self.hits), dtype=torch.float64, device=device)

    def add(self, positive: Tensor, negative: Tensor) -> None:
        """positive: [n]; negative: [n, k], k at least 1."""
        rank = ranks(positive, negative)
        beaten = (negative.shape[1] + 1 - rank) / negative.shape[1]
        values = [torch.ones_like(rank), rank.reciprocal(), beaten, *[(rank <= k).double() for k in self.hits]]
        self.sums += torch.stack(values).sum(1).to(self.sums.device)

    def result(self, sums: Tensor | None = None) -> LinkScore:
        """The means; ``sums``: those of all ranks together, float64, instead of the own. NaN without links."""
        count, reciprocal, beaten, *hits = (self.sums if sums is None else sums).tolist()
        means = [value / count if count else float("nan") for value in (reciprocal, beaten, *hits)]
        return LinkScore(means[0], dict(zip(self.hits, means[2:], strict=True)), means[1], int(count))
