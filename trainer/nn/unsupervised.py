"""Unsupervised GraphSAGE: rows of nodes that lie close together become alike, those of drawn nodes differ.

Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs" (2017), equation 1. Positives are
the pairs of a link batch: edges, or pairs from random walks (``walk_pairs``); negatives are drawn by the loader.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.nn.links import Decoder, DotProduct, score_edges, score_triplets


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
