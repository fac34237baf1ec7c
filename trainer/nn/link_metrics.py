"""Ranking metrics of links against given negatives: MRR, Hits@k, AUC.

A positive with the same score as some negatives gets the mean of the ranks it could have; the AUC counts equal scores
as half. A negative with score ``-inf`` is masked: no metric counts it, neither as beaten nor as a candidate. A score of
NaN counts against the model: a positive is then last, and a negative first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.core.errors import SettingsError

_HITS = (1, 3, 10, 50)


def as_column(positive: Tensor) -> Tensor:
    """Return scores [n] as [n, 1]. Raises ``SettingsError`` for other shapes: with [n, 1], scores would be mixed up."""
    if positive.dim() != 1:
        raise SettingsError(f"positive: scores of shape {list(positive.shape)}; expected one for each positive, [n]")
    return positive[:, None]


def ranks(positive: Tensor, negative: Tensor) -> Tensor:
    """Rank each positive among its own negatives, from 1.

    Equal scores give the mean of the possible ranks. A positive with score NaN gets the last rank.

    Args:
        positive: Scores of the positives.
        negative: Scores of each positive's negatives; ``-inf`` for those that are left out.

    Shapes:
        - **input:** positive float [n], negative float [n, k].
        - **output:** float64 [n].

    Raises:
        SettingsError: ``positive`` has another shape.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        print(gf.nn.ranks(torch.tensor([2.0]), torch.tensor([[3.0, 1.0]])))  # tensor([2.], dtype=torch.float64)
        ```
    """
    own, counted = as_column(positive), negative != -torch.inf
    not_beaten, level = ~(negative < own) & counted, (negative == own) & counted
    return 1 + not_beaten.sum(1) - level.sum(1).double() / 2


def mrr(positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the mean reciprocal rank of the positives among their own negatives.

    Args:
        positive: Scores of the positives.
        negative: Scores of each positive's negatives.

    Shapes:
        - **input:** positive float [n], negative float [n, k].
        - **output:** scalar, float64.

    Raises:
        SettingsError: ``positive`` has another shape.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        print(gf.nn.mrr(torch.tensor([2.0]), torch.tensor([[3.0, 1.0]])))  # tensor(0.5000, dtype=torch.float64)
        ```
    """
    return ranks(positive, negative).reciprocal().mean()


def hits_at(k: int, positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the share of positives whose rank among their own negatives is at most k.

    Args:
        k: Largest rank that counts.
        positive: Scores of the positives.
        negative: Scores of each positive's negatives.

    Shapes:
        - **input:** positive float [n], negative float [n, num_negatives].
        - **output:** scalar, float64.

    Raises:
        SettingsError: ``positive`` has another shape.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        share = gf.nn.hits_at(10, torch.randn(8), torch.randn(8, 50))
        ```
    """
    return (ranks(positive, negative) <= k).double().mean()


def auc(positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the area under the ROC curve: the probability that a positive scores above a negative.

    Every positive is compared with every negative.

    Args:
        positive: Scores of the positives.
        negative: Scores of the negatives; ``-inf`` for those that are left out.

    Shapes:
        - **input:** two float tensors of any shapes.
        - **output:** scalar, float64; NaN without positives or without negatives.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        area = gf.nn.auc(torch.randn(8), torch.randn(8, 50))
        ```
    """
    negative = negative[negative != -torch.inf]
    # ``unique`` sorts NaN last, which is right for negatives only
    scores = torch.cat([torch.where(positive.isnan(), -torch.inf, positive).flatten(), negative])
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    middle = count.cumsum(0).double() - (count.double() - 1) / 2  # mean of the ranks 1 … n that equal scores share
    num_pos, num_neg = positive.numel(), negative.numel()
    rank_sum = middle[place[:num_pos]].sum()
    return (rank_sum - num_pos * (num_pos + 1) / 2) / (num_pos * num_neg)


@dataclass(frozen=True)
class LinkScore:
    """Ranking metrics of a model on a set of links. ``LinkSums.result`` returns it.

    Args:
        mrr: Mean reciprocal rank.
        hits: For each k, the share of positives with rank at most k.
        auc: Area under the ROC curve, each positive against its own negatives; NaN if no positive has negatives.
        links: Number of positives.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        sums = gf.nn.LinkSums(hits=(1, 10))
        sums.add(torch.randn(8), torch.randn(8, 50))
        score = sums.result()
        print(f"MRR {score.mrr:.3f}, Hits@10 {score.hits[10]:.3f} of {score.links} links")
        ```
    """

    mrr: float
    hits: dict[int, float]  #: k -> share of positives with rank <= k
    auc: float  #: mean over the positives that have negatives, each against its own
    links: int  #: number of positives


class LinkSums:
    """Accumulate MRR, Hits@k and AUC over batches, as sums that can be added over processes.

    The AUC compares each positive with its own negatives only and is averaged over the positives that have some.

    Args:
        hits: Values of k for Hits@k.
        device: Device of the sums; default CPU.

    Shapes:
        - ``sums``: float64 [4 + len(hits)].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        sums = gf.nn.LinkSums()
        for _ in range(3):  # batches
            sums.add(torch.randn(8), torch.randn(8, 50))
        # with several ranks: torch.distributed.all_reduce(sums.sums)
        print(sums.result().mrr)
        ```
    """

    def __init__(self, hits: Sequence[int] = _HITS, device: torch.device | None = None):
        self.hits = tuple(hits)
        self.sums = torch.zeros(4 + len(self.hits), dtype=torch.float64, device=device)

    def add(self, positive: Tensor, negative: Tensor) -> None:
        """Add the links of a batch.

        Args:
            positive: Scores of the positives.
            negative: Scores of each positive's negatives; ``-inf`` for those that are left out.

        Shapes:
            - **input:** positive float [n], negative float [n, k].
        """
        rank, count = ranks(positive, negative), (negative != -torch.inf).sum(1)
        beaten = (count + 1 - rank) / count.clamp(min=1)  # 0 without negatives
        values = [torch.ones_like(rank), (count > 0).double(), beaten, rank.reciprocal()]
        values += [(rank <= k).double() for k in self.hits]
        self.sums += torch.stack(values).sum(1).to(self.sums.device)

    def result(self, sums: Tensor | None = None) -> LinkScore:
        """Compute the metrics of all links added so far.

        Args:
            sums: Sum of ``self.sums`` over all processes. Default: ``self.sums``.

        Returns:
            The metrics; NaN without links.
        """
        count, contested, beaten, *sums_ = (self.sums if sums is None else sums).tolist()
        reciprocal, *hits = [value / count if count else float("nan") for value in sums_]
        area = beaten / contested if contested else float("nan")
        return LinkScore(reciprocal, dict(zip(self.hits, hits, strict=True)), area, int(count))
