"""Link prediction: decoders that score pairs of node rows, and their losses.

The arguments are named as the fields of torch_geometric's link batches: ``edge_label_index`` and ``edge_label`` (binary
negatives), or ``src_index``, ``dst_pos_index`` and ``dst_neg_index`` (triplets).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.nn.link_metrics import as_column


class Decoder(Protocol):
    """Scores pairs of node rows. A higher score means a likelier link."""

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        """Return the scores of pairs of rows: float [n] for two tensors of rows [n, f].

        Leading dimensions broadcast: [n, 1, f] and [n, k, f] give [n, k]. ``relation``: relation of each pair, int64
        [n], or one number for all pairs.
        """


class DotProduct(nn.Module):
    """Score a pair by the dot product of its rows, ``h_src · h_dst``. Has no parameters.

    Shapes:
        - **input:** rows [n, f] and [n, f]; leading dimensions broadcast.
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        scores = gf.nn.DotProduct().score(torch.randn(8, 32), torch.randn(8, 32))  # [8]
        ```
    """

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        """Return the scores of pairs. ``relation`` is ignored."""
        return (h_src * h_dst).sum(-1)


class MLPDecoder(nn.Module):
    """Score a pair by a two-layer perceptron on both rows. The score depends on the direction of the link.

    Args:
        in_dim: Width of the rows.
        hidden: Width of the hidden layer.
        dropout: Dropout probability of the hidden layer in training mode.

    Shapes:
        - **input:** rows [n, in_dim] and [n, in_dim]; leading dimensions broadcast.
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        decoder = gf.nn.MLPDecoder(32, 64)
        scores = decoder.score(torch.randn(8, 32), torch.randn(8, 32))  # [8]
        ```
    """

    def __init__(self, in_dim: int, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.lin_src, self.lin_dst = nn.Linear(in_dim, hidden), nn.Linear(in_dim, hidden, bias=False)
        self.out = nn.Linear(hidden, 1)
        self.dropout = dropout

    def score(self, h_src: Tensor, h_dst: Tensor, relation: Tensor | int | None = None) -> Tensor:
        """Return the scores of pairs. ``relation`` is ignored."""
        h = (self.lin_src(h_src) + self.lin_dst(h_dst)).relu()
        h = functional.dropout(h, self.dropout, self.training)
        return self.out(h).squeeze(-1)  # type: ignore[no-any-return]


def score_edges(
    decoder: Decoder, h_src: Tensor, h_dst: Tensor, edge_label_index: Tensor, relation: Tensor | int | None = None
) -> Tensor:
    """Score the pairs of a link batch with binary negatives.

    Args:
        decoder: Scores pairs of rows.
        h_src: Rows of source nodes.
        h_dst: Rows of target nodes; the same as ``h_src`` in a homogeneous graph.
        edge_label_index: Positions of each pair in ``h_src`` and ``h_dst``.
        relation: Relation of each pair, or one for all, passed to the decoder.

    Shapes:
        - **input:** h_src [num_src, f], h_dst [num_dst, f], edge_label_index int64 [2, n].
        - **output:** scores [n].

    Example:
        ```python
        import torch
        import gnnfleet as gf

        h = torch.randn(100, 32)
        pairs = torch.randint(100, (2, 8))
        scores = gf.nn.score_edges(gf.nn.DotProduct(), h, h, pairs)  # [8]
        ```
    """
    return decoder.score(h_src[edge_label_index[0]], h_dst[edge_label_index[1]], relation)


def score_triplets(
    decoder: Decoder, h_src: Tensor, h_dst: Tensor, src_index: Tensor, dst_pos_index: Tensor, dst_neg_index: Tensor,
    relation: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Score the positives and negatives of a triplet batch.

    Args:
        decoder: Scores pairs of rows.
        h_src: Rows of source nodes.
        h_dst: Rows of target nodes; the same as ``h_src`` in a homogeneous graph.
        src_index: Position of each pair's source in ``h_src``.
        dst_pos_index: Position of each pair's target in ``h_dst``.
        dst_neg_index: Positions of negative targets in ``h_dst``, k for each source.
        relation: Relation of each pair, or one for all, passed to the decoder.

    Shapes:
        - **input:** h_src [num_src, f], h_dst [num_dst, f], src_index and dst_pos_index int64 [n], dst_neg_index int64
          [n] or [n, k].
        - **output:** scores [n] and [n, k].

    Returns:
        Scores of the positives, and of the negatives.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        h = torch.randn(100, 32)
        src, dst, negatives = torch.randint(100, (8,)), torch.randint(100, (8,)), torch.randint(100, (8, 5))
        positive, negative = gf.nn.score_triplets(gf.nn.DotProduct(), h, h, src, dst, negatives)  # [8], [8, 5]
        loss = gf.nn.softmax_loss(positive, negative)
        ```
    """
    src, negatives = h_src[src_index], dst_neg_index if dst_neg_index.dim() > 1 else dst_neg_index[:, None]
    positive = decoder.score(src, h_dst[dst_pos_index], relation)
    return positive, decoder.score(src[:, None], h_dst[negatives], relation)


def bce_loss(score: Tensor, label: Tensor) -> Tensor:
    """Compute the mean binary cross entropy, with scores as logits.

    Args:
        score: Scores of the pairs.
        label: 0 for a negative, greater than 0 for a positive.

    Shapes:
        - **input:** score float [n], label [n].
        - **output:** scalar; 0 without pairs.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        loss = gf.nn.bce_loss(torch.randn(8), torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]))
        ```
    """
    sums = functional.binary_cross_entropy_with_logits(score, (label > 0).to(score.dtype), reduction="sum")
    return sums / max(score.numel(), 1)


def margin_loss(positive: Tensor, negative: Tensor, margin: float = 1.0) -> Tensor:
    """Compute the mean of ``max(0, margin - positive + negative)`` over all negatives.

    Args:
        positive: Scores of the positives.
        negative: Scores of each positive's negatives; ``-inf`` for those that are left out.
        margin: The loss of a negative is 0 if the positive scores higher by at least this number.

    Shapes:
        - **input:** positive float [n], negative float [n, k].
        - **output:** scalar; 0 without pairs.

    Raises:
        SettingsError: ``positive`` has another shape.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        loss = gf.nn.margin_loss(torch.randn(8), torch.randn(8, 5))
        ```
    """
    return _mean_counted((margin - as_column(positive) + negative).relu(), negative)


def bpr_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the mean of ``-log sigmoid(positive - negative)`` over all negatives.

    Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit Feedback" (2009).

    Args:
        positive: Scores of the positives.
        negative: Scores of each positive's negatives; ``-inf`` for those that are left out.

    Shapes:
        - **input:** positive float [n], negative float [n, k].
        - **output:** scalar; 0 without pairs.

    Raises:
        SettingsError: ``positive`` has another shape.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        loss = gf.nn.bpr_loss(torch.randn(8), torch.randn(8, 5))
        ```
    """
    return _mean_counted(functional.softplus(negative - as_column(positive)), negative)


def softmax_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the mean cross entropy of choosing each positive among itself and its negatives.

    Args:
        positive: Scores of the positives.
        negative: Scores of each positive's negatives; ``-inf`` for those that are left out.

    Shapes:
        - **input:** positive float [n], negative float [n, k].
        - **output:** scalar; 0 without pairs.

    Raises:
        SettingsError: ``positive`` has another shape.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        loss = gf.nn.softmax_loss(torch.randn(8), torch.randn(8, 5))
        ```
    """
    scores = torch.cat([as_column(positive), negative], 1)
    return (scores.logsumexp(1) - positive).sum() / max(len(positive), 1)


def _mean_counted(losses: Tensor, negative: Tensor) -> Tensor:
    """Return the mean of ``losses`` over the negatives that are not left out (``-inf``); 0 if there are none."""
    counted = negative != -torch.inf
    return torch.where(counted, losses, 0).sum() / counted.sum().clamp(min=1)


def unsupervised_loss(positive: Tensor, negative: Tensor, num_negatives: float | None = None) -> Tensor:
    """Compute GraphSAGE's loss: mean of ``-log s(positive)`` plus Q times the mean of ``-log s(-negative)``.

    s is the logistic function. Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs" (2017),
    equation 1.

    Args:
        positive: Scores of the positives.
        negative: Scores of the negatives, drawn from one distribution for all positives; ``-inf`` for those that are
          left out.
        num_negatives: Q; default: the number of negatives per positive.

    Shapes:
        - **input:** positive float [n], negative float of any shape.
        - **output:** scalar; 0 without pairs.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        loss = gf.nn.unsupervised_loss(torch.randn(8), torch.randn(8, 5))
        ```
    """
    per_positive: float | Tensor = 0.0 if num_negatives is None else num_negatives
    if num_negatives is None:
        per_positive = (negative != -torch.inf).sum() / max(positive.numel(), 1)
    near = functional.softplus(-positive).sum() / max(positive.numel(), 1)
    return near + per_positive * _mean_counted(functional.softplus(negative), negative)


class UnsupervisedLoss(nn.Module):
    """Module that computes ``unsupervised_loss`` of a link batch from the rows of its nodes.

    Args:
        decoder: Scores pairs of rows; default ``DotProduct``.
        num_negatives: Q of ``unsupervised_loss``; default: the batch's number of negatives per positive.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        loss_of = gf.nn.UnsupervisedLoss()
        h = torch.randn(100, 32, requires_grad=True)  # rows that a model computes from the batch
        pairs = torch.randint(100, (2, 8))
        loss_of.binary(h, pairs, torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])).backward()
        ```
    """

    def __init__(self, decoder: Decoder | None = None, num_negatives: float | None = None):
        super().__init__()
        self.decoder = DotProduct() if decoder is None else decoder
        self.num_negatives = num_negatives

    def binary(self, h: Tensor, edge_label_index: Tensor, edge_label: Tensor) -> Tensor:
        """Compute the loss of a batch with binary negatives.

        Args:
            h: Rows of the batch's nodes.
            edge_label_index: Positions of each pair in ``h``.
            edge_label: 0 for a negative, greater than 0 for a positive.

        Shapes:
            - **input:** h [n, f], edge_label_index int64 [2, m], edge_label [m].
            - **output:** scalar.
        """
        scores = score_edges(self.decoder, h, h, edge_label_index)
        near = edge_label > 0
        return unsupervised_loss(scores[near], scores[~near], self.num_negatives)

    def triplets(self, h: Tensor, src_index: Tensor, dst_pos_index: Tensor, dst_neg_index: Tensor) -> Tensor:
        """Compute the loss of a triplet batch.

        Args:
            h: Rows of the batch's nodes.
            src_index: Position of each pair's source in ``h``.
            dst_pos_index: Position of each pair's target in ``h``.
            dst_neg_index: Positions of negative targets in ``h``, k for each source.

        Shapes:
            - **input:** h [n, f], src_index and dst_pos_index int64 [m], dst_neg_index int64 [m] or [m, k].
            - **output:** scalar.
        """
        scores = score_triplets(self.decoder, h, h, src_index, dst_pos_index, dst_neg_index)
        return unsupervised_loss(*scores, self.num_negatives)


def walk_pairs(walks: Tensor, context: int) -> Tensor:
    """List the pairs of nodes that are at most ``context`` steps apart on a random walk.

    Args:
        walks: Node ids of each walk, start node first.
        context: Largest number of steps between the nodes of a pair.

    Shapes:
        - **input:** walks int64 [num_walks, steps + 1].
        - **output:** int64 [2, n].

    Returns:
        Pairs (earlier node, later node), without pairs of a node with itself. A pair may occur repeatedly.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        print(gf.nn.walk_pairs(torch.tensor([[0, 5, 2]]), context=2))  # [[0, 5, 0], [5, 2, 2]]
        ```
    """
    steps = range(1, min(context, walks.shape[1] - 1) + 1)
    pairs = [torch.stack([walks[:, :-step].flatten(), walks[:, step:].flatten()]) for step in steps]
    found = torch.cat(pairs, 1) if pairs else walks.new_empty(2, 0)
    return found[:, found[0] != found[1]]
