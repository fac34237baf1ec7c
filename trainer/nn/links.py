"""Models of links: decoders that score pairs of node rows, and the losses they are trained with.

Works on what torch_geometric's link batches hold: ``edge_label_index`` with ``edge_label`` (binary negatives), or
``src_index``, ``dst_pos_index`` and ``dst_neg_index`` (triplets).

Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs" (2017), equation 1. Positives are
the pairs of a link batch: edges, or pairs from random walks (``walk_pairs``); negatives are drawn by the loader.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Decoder(Protocol):
    """Scores of pairs; the higher, the likelier the link."""

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        """float [n] from rows [n, f] each; leading dimensions broadcast, so [n, 1, f] and [n, k, f] give [n, k].

        relation: number of each pair's relation, int64 [n] or one for all, where the decoder tells them apart.
        """


class DotProduct(nn.Module):
    """``h_src · h_dst``; no parameters."""

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        return (h_src * h_dst).sum(-1)


class MLPDecoder(nn.Module):
    """A two-layer perceptron on both rows side by side: the direction of a link counts."""

    def __init__(self, in_dim: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.lin_src, self.lin_dst = nn.Linear(in_dim, hidden), nn.Linear(in_dim, hidden, bias=False)
        self.out = nn.Linear(hidden, 1)
        self.dropout = dropout

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        h = (self.lin_src(h_src) + self.lin_dst(h_dst)).relu()
        h = functional.dropout(h, self.dropout, self.training)
        return self.out(h).squeeze(-1)  # type: ignore[no-any-return]


class DistMult(nn.Module):
    """``sum of h_src * r * h_dst`` with a learnt row r per relation.

    Yang et al., "Embedding Entities and Relations for Learning and Inference in Knowledge Bases" (2015).
    """

    def __init__(self, num_relations: int, dim: int):
        super().__init__()
        self.relation = nn.Parameter(torch.empty(num_relations, dim))
        nn.init.xavier_uniform_(self.relation)

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        """Without ``relation`` all pairs are of the first."""
        row = self.relation[0 if relation is None else relation]
        if row.dim() > 1:  # one relation per pair: pairs may have candidates in a second dimension
            row = row.view(len(row), *[1] * (h_dst.dim() - 2), -1)
        return (h_src * row * h_dst).sum(-1)


def score_edges(
    decoder: Decoder, h_src: Tensor, h_dst: Tensor, edge_label_index: Tensor, relation: Tensor | int | None = None
) -> Tensor:
    """Scores [n] of the pairs of a binary batch; ``edge_label_index``: int64 [2, n], rows of h_src and of h_dst."""
    return decoder.score(h_src[edge_label_index[0]], h_dst[edge_label_index[1]], relation)


def score_triplets(
    decoder: Decoder, h_src: Tensor, h_dst: Tensor, src_index: Tensor, dst_pos_index: Tensor, dst_neg_index: Tensor,
    relation: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores of a triplet batch: positives [n] and negatives [n, k].

    src_index, dst_pos_index: int64 [n]; dst_neg_index: [n] or [n, k].
    """
    src, negatives = h_src[src_index], dst_neg_index.view(len(src_index), -1)
    positive = decoder.score(src, h_dst[dst_pos_index], relation)
    return positive, decoder.score(src[:, None], h_dst[negatives], relation)


def bce_loss(score: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross entropy of scores as logits; label: [n], 0 for a negative, more for a positive."""
    return functional.binary_cross_entropy_with_logits(score, (label > 0).to(score.dtype))


def margin_loss(positive: Tensor, negative: Tensor, margin: float = 1.0) -> Tensor:
    """Mean of ``max(0, margin - positive + negative)``; positive [n], negative [n, k]."""
    return (margin - positive[:, None] + negative).relu().mean()


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Mean of ``-log sigmoid(positive - negative)``: Rendle et al., "BPR" (2009); positive [n], negative [n, k]."""
    return functional.softplus(negative - positive[:, None]).mean()


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Mean cross entropy of choosing the positive among itself and its negatives; positive [n], negative [n, k]."""
    scores = torch.cat([positive[:, None], negative], 1)
    return (scores.logsumexp(1) - positive).mean()


def unsupervised_loss(positive: Tensor, negative: Tensor, num_negatives: float | None = None) -> Tensor:
    """``-log s(positive) - Q * mean of log s(-negative)``, s the logistic function, averaged over positives.

    positive: [n]; negative: any shape, drawn from one distribution for all; num_negatives: Q, by default negatives
    per positive. 0 without pairs.
    """
    if num_negatives is None:
        num_negatives = negative.numel() / max(positive.numel(), 1)
    near, far = functional.softplus(-positive), functional.softplus(negative)
    return near.sum() / max(near.numel(), 1) + num_negatives * far.sum() / max(far.numel(), 1)


class UnsupervisedLoss(nn.Module):
    """The loss of a batch of links from the rows of its nodes."""

    def __init__(self, decoder: Decoder | None = None, num_negatives: float | None = None):
        super().__init__()
        self.decoder = DotProduct() if decoder is None else decoder
        self.num_negatives = num_negatives

    def binary(self, h: Tensor, edge_label_index: Tensor, edge_label: Tensor) -> Tensor:
        """h: rows [n, f] of the batch's nodes; edge_label_index: int64 [2, m]; edge_label: [m], 0 for negatives."""
        scores = score_edges(self.decoder, h, h, edge_label_index)
        near = edge_label > 0
        return unsupervised_loss(scores[near], scores[~near], self.num_negatives)

    def triplets(self, h: Tensor, src_index: Tensor, dst_pos_index: Tensor, dst_neg_index: Tensor) -> Tensor:
        """src_index, dst_pos_index: int64 [n]; dst_neg_index: [n] or [n, k]."""
        scores = score_triplets(self.decoder, h, h, src_index, dst_pos_index, dst_neg_index)
        return unsupervised_loss(*scores, self.num_negatives)


def walk_pairs(walks: Tensor, context: int) -> Tensor:
    """Pairs of nodes at most ``context`` steps apart on a walk, without those of a node with itself: int64 [2, n].

    walks: int64 [num_walks, steps + 1] node ids, the start first. A pair is (earlier, later), and may come repeatedly.
    """
    steps = range(1, min(context, walks.shape[1] - 1) + 1)
    pairs = [torch.stack([walks[:, :-step].flatten(), walks[:, step:].flatten()]) for step in steps]
    found = torch.cat(pairs, 1) if pairs else walks.new_empty(2, 0)
    return found[:, found[0] != found[1]]
