"""Tests of link decoders, losses and metrics against values computed by hand, and of unsupervised GraphSAGE."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

from trainer.core.errors import SettingsError
from trainer.nn import link_metrics as metrics
from trainer.nn import links
from trainer.nn.links import UnsupervisedLoss, unsupervised_loss, walk_pairs
from trainer.nn.relation_decoders import DistMult

H = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]])


def test_dot_product_scores_edges() -> None:
    index = torch.tensor([[0, 1, 2], [1, 1, 0]])
    assert links.score_edges(links.DotProduct(), H, H, index).tolist() == [1.0, 10.0, 1.5]


def test_dist_mult_scales_by_relation() -> None:
    decoder = DistMult(2, 2)
    decoder.relation.data = torch.tensor([[1.0, 1.0], [2.0, -1.0]])
    index = torch.tensor([[0, 0], [1, 1]])
    assert links.score_edges(decoder, H, H, index, torch.tensor([0, 1])).tolist() == [1.0, 8.0]
    assert links.score_edges(decoder, H, H, index, 1).tolist() == [8.0, 8.0]
    assert links.score_edges(decoder, H, H, index).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("decoder", [links.DotProduct(), DistMult(3, 2), links.MLPDecoder(2, 4)])
@pytest.mark.parametrize("negatives", [torch.tensor([2, 0]), torch.tensor([[2, 0, 1], [1, 1, 2]])])
def test_a_triplet_scores_like_its_pairs(decoder: links.Decoder, negatives: Tensor) -> None:
    src, dst, relation = torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([2, 1])
    positive, negative = links.score_triplets(decoder, H, H, src, dst, negatives, relation)
    assert torch.allclose(positive, links.score_edges(decoder, H, H, torch.stack([src, dst]), relation))
    wide = negatives.view(2, -1)
    for column in range(wide.shape[1]):
        pairs = torch.stack([src, wide[:, column]])
        assert torch.allclose(negative[:, column], links.score_edges(decoder, H, H, pairs, relation))


def test_mlp_scores_depend_on_direction() -> None:
    decoder = links.MLPDecoder(2, 8)
    assert not torch.allclose(decoder.score(H[0], H[1]), decoder.score(H[1], H[0]))


def test_losses() -> None:
    positive, negative = torch.tensor([2.0, 0.0]), torch.tensor([[1.0, 2.5], [-3.0, 0.0]])
    assert links.margin_loss(positive, negative).item() == pytest.approx((0 + 1.5 + 0 + 1) / 4)
    bpr = [math.log1p(math.exp(d)) for d in (-1, 0.5, -3, 0)]
    assert links.bpr_loss(positive, negative).item() == pytest.approx(sum(bpr) / 4)
    first = math.exp(2) / (math.exp(2) + math.exp(1) + math.exp(2.5))
    second = 1 / (1 + math.exp(-3) + 1)
    assert links.softmax_loss(positive, negative).item() == pytest.approx(-(math.log(first) + math.log(second)) / 2)
    bce = links.bce_loss(torch.tensor([0.0, 2.0]), torch.tensor([1, 0]))
    assert bce.item() == pytest.approx((math.log(2) + math.log1p(math.exp(2))) / 2)


def test_ranks_and_metrics_derived_from_them() -> None:
    positive = torch.tensor([3.0, 1.0, 0.0, 5.0])
    negative = torch.tensor([[1.0, 2, 0], [2, 3, 0], [0, 0, 0], [5, 6, 7]])
    assert metrics.ranks(positive, negative).tolist() == [1, 3, 2.5, 3.5]
    assert metrics.mrr(positive, negative).item() == pytest.approx((1 + 1 / 3 + 1 / 2.5 + 1 / 3.5) / 4)
    assert [metrics.hits_at(k, positive, negative).item() for k in (1, 3, 4)] == [0.25, 0.75, 1]
    assert metrics.ranks(torch.tensor([math.nan]), torch.tensor([[1.0, 2.0]])).tolist() == [3]


@pytest.mark.parametrize(
    "positive,negative,expected",
    [
        ([2.0, 3.0], [0.0, 1.0], 1.0),
        ([0.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 2.0], (0.5 + 0 + 1 + 1) / 4),
        ([1.0, 1.0], [1.0, 1.0, 1.0], 0.5),
    ],
)
def test_auc_with_ties(positive: list[float], negative: list[float], expected: float) -> None:
    assert metrics.auc(torch.tensor(positive), torch.tensor(negative)).item() == pytest.approx(expected)


def test_auc_is_the_share_of_correctly_ordered_pairs() -> None:
    positive, negative = torch.randint(0, 9, (40,)).float() + 1, torch.randint(0, 9, (30, 2)).float()
    difference = positive[:, None] - negative.flatten()
    pairs = ((difference > 0).double() + (difference == 0).double() / 2).mean()
    torch.testing.assert_close(metrics.auc(positive, negative), pairs)


def test_rank_sums_can_be_added_over_processes() -> None:
    positive, negative = torch.randn(50), torch.randn(50, 20)
    whole, parts = metrics.LinkSums((1, 10)), [metrics.LinkSums((1, 10)) for _ in range(2)]
    whole.add(positive, negative)
    for part, rows in zip(parts, (slice(0, 13), slice(13, 50)), strict=True):
        part.add(positive[rows], negative[rows])
    parts[0].add(torch.empty(0), torch.empty(0, 20))
    result = whole.result()
    together = whole.result(parts[0].sums + parts[1].sums)
    assert (result.links, result.hits) == (together.links, together.hits) == (50, result.hits)
    assert (together.mrr, together.auc) == pytest.approx((result.mrr, result.auc))
    assert result.mrr == pytest.approx(metrics.mrr(positive, negative).item())
    assert result.hits[10] == pytest.approx(metrics.hits_at(10, positive, negative).item())
    own = [metrics.auc(positive[i], negative[i]).item() for i in range(50)]
    assert result.auc == pytest.approx(sum(own) / 50)
    assert math.isnan(metrics.LinkSums().result().mrr)


@pytest.mark.parametrize("seed", range(4))
def test_masked_negatives_are_counted_by_no_metric_and_no_loss(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    positive, negative = (torch.randint(0, 5, shape, generator=draw).float() for shape in ((30,), (30, 7)))
    masked = torch.rand(30, 7, generator=draw) < 0.5
    masked[0] = True  # a positive without negatives
    given = negative.masked_fill(masked, -torch.inf)
    ranks, areas, margins, bpr = [], [], [], []
    for own, others, out in zip(positive.tolist(), negative.tolist(), masked.tolist(), strict=True):
        kept = [score for score, left_out in zip(others, out, strict=True) if not left_out]
        ranks.append(1 + sum((score > own) + (score == own) / 2 for score in kept))
        areas += [(len(kept) + 1 - ranks[-1]) / len(kept)] if kept else []
        margins += [max(0, 1 - own + score) for score in kept]
        bpr += [math.log1p(math.exp(score - own)) for score in kept]
    assert metrics.ranks(positive, given).tolist() == ranks
    sums = metrics.LinkSums((1, 2))
    sums.add(positive, given)
    result = sums.result()
    assert result.mrr == pytest.approx(sum(1 / rank for rank in ranks) / 30)
    assert result.hits == pytest.approx({k: sum(rank <= k for rank in ranks) / 30 for k in (1, 2)})
    assert result.auc == pytest.approx(sum(areas) / len(areas)) and len(areas) < 30
    assert metrics.auc(positive, given).item() == pytest.approx(metrics.auc(positive, negative[~masked]).item())
    assert links.margin_loss(positive, given).item() == pytest.approx(sum(margins) / len(margins))
    assert links.bpr_loss(positive, given).item() == pytest.approx(sum(bpr) / len(bpr))


@pytest.mark.parametrize(
    "call", [metrics.ranks, metrics.mrr, metrics.LinkSums().add, links.margin_loss, links.bpr_loss, links.softmax_loss]
)
def test_a_column_of_positives_is_refused(call: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(SettingsError, match=r"positive: scores of shape \[2, 1\]; expected one for each positive"):
        call(torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0, 3.0], [1.0, 3.0]]))


def test_scores_of_nan_count_against_the_model() -> None:
    nan, sums = torch.tensor([math.nan, 1.0]), metrics.LinkSums((1,))
    sums.add(nan, torch.tensor([[0.0, -math.inf, 0.0], [math.nan, 0.0, -math.inf]]))
    assert metrics.ranks(nan, torch.tensor([[0.0, 0.0], [math.nan, 0.0]])).tolist() == [3, 2]
    assert (sums.result().mrr, sums.result().auc) == (pytest.approx((1 / 3 + 1 / 2) / 2), 0.25)
    assert metrics.auc(nan[:1], torch.tensor([0.0, 1.0])).item() == 0
    assert metrics.auc(nan[1:], nan[:1]).item() == 0


@pytest.mark.parametrize("loss", [links.margin_loss, links.bpr_loss, links.softmax_loss, unsupervised_loss])
def test_the_loss_of_no_links_is_0_and_has_gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    h, none = torch.randn(3, 2, requires_grad=True), torch.empty(0, dtype=torch.int64)
    decoder = DistMult(2, 2)
    scores = links.score_triplets(decoder, h, h, none, none, none.view(0, 5), none)
    assert [tuple(score.shape) for score in scores] == [(0,), (0, 5)]
    loss(*scores).backward()
    assert loss(*scores).item() == 0 and h.grad is not None and not h.grad.any()
    assert links.bce_loss(links.score_edges(decoder, h, h, none.view(2, 0)), none).item() == 0


def test_unsupervised_loss_equals_the_published_formula() -> None:
    positive, negative = torch.tensor([1.0, 2.0]), torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]])
    near = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-2))) / 2
    far = sum(math.log1p(math.exp(score)) for score in (0, 1, -1, 2, 0, 0)) / 6
    assert unsupervised_loss(positive, negative).item() == pytest.approx(near + 3 * far)
    assert unsupervised_loss(positive, negative, 10).item() == pytest.approx(near + 10 * far)
    assert unsupervised_loss(torch.empty(0), torch.empty(0, 3)).item() == 0


def test_pairs_of_a_random_walk() -> None:
    walks = torch.tensor([[0, 1, 2, 1], [5, 5, 5, 5]])
    pairs = walk_pairs(walks, 2)
    assert sorted(map(tuple, pairs.t().tolist())) == [(0, 1), (0, 2), (1, 2), (2, 1)]
    assert walk_pairs(walks, 0).shape == (2, 0)


def planted(num_nodes: int = 120, groups: int = 4) -> tuple[Tensor, Tensor]:
    """Return edges, int64 [2, e], and the community of each node: its id modulo ``groups``.

    About nine of ten edges join nodes of one community. Each edge is contained in both directions.
    """
    torch.manual_seed(0)
    src = torch.arange(num_nodes).repeat_interleave(6)
    inside = torch.rand(len(src)) < 0.9
    near = (src + groups * torch.randint(1, num_nodes // groups, src.shape)) % num_nodes
    dst = torch.where(inside, near, torch.randint(0, num_nodes, src.shape))
    edges = torch.stack([src, dst])
    return torch.cat([edges, edges.flip(0)], 1), torch.arange(num_nodes) % groups


@pytest.mark.parametrize("form", ["binary", "triplets"])
def test_unsupervised_graphsage_finds_planted_groups(form: str) -> None:
    # Trained from random features without labels, rows of one group become similar.
    edges, group = planted()
    x, model, loss = torch.randn(120, 16), GraphSAGE(16, 32, 2, 16), UnsupervisedLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = same_group_auc(model(x, edges), group)
    for _ in range(25):
        h = model(x, edges)
        negatives = torch.randint(0, 120, (edges.shape[1],))
        if form == "binary":
            pairs = torch.cat([edges, torch.stack([edges[0], negatives])], 1)
            value = loss.binary(h, pairs, torch.arange(pairs.shape[1]) < edges.shape[1])
        else:
            value = loss.triplets(h, edges[0], edges[1], negatives)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    after = same_group_auc(model(x, edges), group)
    assert before < 0.75 < 0.9 < after, (before, after)


def same_group_auc(h: Tensor, group: Tensor) -> float:
    """Return the AUC of scoring each pair of nodes by the dot product of their rows ``h``.

    Pairs within one group are the positives, all other pairs the negatives.
    """
    scores = h.detach() @ h.detach().t()
    same = (group[:, None] == group) & ~torch.eye(len(h), dtype=torch.bool)
    return metrics.auc(scores[same], scores[group[:, None] != group]).item()
