"""Chi-square tests of finite fanouts: neighbours are drawn with the right probabilities, as in torch_geometric.

Seeds are fixed, so that results are reproducible. The bound p < 1e-4 detects a bias of a few percent.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import scipy
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from fast_cases import fast_cases
from load_kit import opened
from partitions import store_of
from pyg_reference import node_loader
from trainer import DistLinkNeighborLoader, DistNeighborLoader

DRAWS, DEGREE = 6000, 6
WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 0.5, 4.0, 1.5])
TIMES = torch.tensor([3, 9, 1, 4, 12, 7])
ODDS = 1e-4


def star():
    """Return a graph in which node 0 has six in-edges. Edge i comes from node i + 1."""
    edge_index = torch.stack([torch.arange(1, DEGREE + 1), torch.zeros(DEGREE, dtype=torch.int64)])
    return Data(edge_index=edge_index, num_nodes=DEGREE + 1, weight=WEIGHTS, when=TIMES)


def partition():
    data = star()
    attrs = {"weight": WEIGHTS.numpy(), "when": TIMES.numpy()}
    return opened(store_of(data.edge_index.numpy(), data.num_nodes, 2, edge_attrs=attrs))


def in_trees(loader):
    """Return how often each set of neighbours of node 0 was sampled in the trees of one batch."""
    (batch,) = loader
    rows = [[] for _ in range(DRAWS)]
    for tree, edge in zip(batch.batch[batch.edge_index[1]].tolist(), batch.e_id.tolist(), strict=True):
        rows[tree].append(edge)
    return Counter(tuple(sorted(row)) for row in rows)


def ours_of(fanout, **how):
    seeds = torch.zeros(DRAWS, dtype=torch.int64)
    if "time_attr" in how:
        how["input_time"] = torch.full((DRAWS,), 8)
    return in_trees(DistNeighborLoader(partition(), [fanout], seeds, disjoint=True, batch_size=DRAWS, **how))


def epochs_of(fanout, epochs=400, **how):
    """Return how often each set of neighbours of node 0, the only seed, was sampled in ``epochs`` epochs."""
    loader, found = DistNeighborLoader(partition(), [fanout], torch.tensor([0]), **how), Counter()
    for _ in range(epochs):
        (batch,) = loader
        found[tuple(sorted(batch.e_id.tolist()))] += 1
    return found


def choices(fanout, weights, replace=False, over=range(DEGREE)):
    """Return the exact probability of each tuple of ``fanout`` edge ids from ``over``, by enumerating all draws."""
    found = Counter()
    for order in itertools.product(over, repeat=fanout):
        if not replace and len(set(order)) < fanout:
            continue
        chance, left = 1.0, sum(weights[e] for e in over)
        for edge in order:
            chance *= weights[edge] / left
            left -= 0 if replace else weights[edge]
        if chance > 0:
            found[tuple(sorted(order))] += chance
    return found


def p_value(seen, chances):
    assert seen.keys() <= chances.keys(), "a choice of probability zero was drawn"
    total = sum(seen.values())
    return scipy.stats.chisquare([seen[c] for c in chances], [chances[c] * total for c in chances]).pvalue


EVEN = [1.0] * DEGREE
CASES = {
    "uniform": ({}, choices(3, EVEN)),
    "replace": ({"replace": True}, choices(3, EVEN, replace=True)),
    "weighted": ({"weight_attr": "weight"}, choices(3, WEIGHTS.tolist())),
    "weighted replace": ({"weight_attr": "weight", "replace": True}, choices(3, WEIGHTS.tolist(), replace=True)),
}
TEMPORAL = {"time_attr": "when"}, choices(3, EVEN, over=(0, 2, 3, 5))


@pytest.mark.parametrize("how", [*CASES, "temporal"])
def test_every_choice_has_its_probability_over_the_trees_of_a_batch(how):
    arguments, chances = {**CASES, "temporal": TEMPORAL}[how]
    assert p_value(ours_of(3, **arguments), chances) > ODDS


@pytest.mark.parametrize("how", fast_cases(CASES, "weighted"))
def test_every_choice_has_its_probability_over_epochs(how):
    arguments, chances = CASES[how]
    assert p_value(epochs_of(3, **arguments), chances) > ODDS


def test_the_chi_square_test_detects_a_bias():
    # With weights that differ by a quarter, weighted draws are not uniform, and uniform draws are not weighted.
    near = [1.25, *EVEN[1:]]
    seen = ours_of(3)
    assert p_value(seen, choices(3, near)) < ODDS
    assert p_value(ours_of(3, weight_attr="weight"), choices(3, (WEIGHTS + 0.2).tolist())) < ODDS


@pytest.mark.parametrize("how", fast_cases([*CASES, "temporal"], "weighted", "temporal"))
def test_the_reference_sampler_agrees(how):
    # Two-sample test: gnnfleet's draws and those of torch_geometric's loader come from one distribution.
    arguments, chances = {**CASES, "temporal": TEMPORAL}[how]
    seeds, times = torch.zeros(DRAWS, dtype=torch.int64), torch.full((DRAWS,), 8)
    more = {"input_time": times} if how == "temporal" else {}
    theirs = in_trees(node_loader(star(), [3], seeds, batch_size=DRAWS, disjoint=True, **arguments, **more))
    ours = ours_of(3, **arguments)
    table = [[found[choice] for choice in chances] for found in (ours, theirs)]
    assert scipy.stats.chi2_contingency(table).pvalue > ODDS


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
def test_genuine_neighbor_loader_agrees():
    # With replacement only: without replacement torch_sparse 0.6.18 is biased, it never draws the last of six.
    pytest.importorskip("torch_sparse")
    torch.manual_seed(0)
    theirs, loader = Counter(), NeighborLoader(star(), [3], torch.tensor([0]), replace=True)
    for _ in range(1500):
        theirs[tuple(sorted(next(iter(loader)).e_id.tolist()))] += 1
    ours = epochs_of(3, replace=True)
    table = [[found[choice] for choice in CASES["replace"][1]] for found in (ours, theirs)]
    assert scipy.stats.chi2_contingency(table).pvalue > ODDS


def test_draws_of_two_hops_are_independent():
    # The draws of a node are independent of those of its neighbour.
    both = torch.tensor([[1, 2, 3, 4, 0, 2, 3, 4], [0, 0, 0, 0, 1, 1, 1, 1]])
    graph, found = opened(store_of(both.numpy(), 5, 2)), Counter()
    seeds = torch.tensor([0, 1]).repeat(DRAWS // 2)
    (batch,) = DistNeighborLoader(graph, [1], seeds, disjoint=True, batch_size=DRAWS)
    first = batch.e_id.view(-1, 2).tolist()
    found.update(map(tuple, first))
    assert scipy.stats.chi2_contingency([[found[a, b] for b in range(4, 8)] for a in range(4)]).pvalue > ODDS


def test_negatives_are_uniform_or_by_weight():
    data = Data(edge_index=torch.tensor([[0], [1]]).repeat(1, DRAWS), num_nodes=6)
    for mode in ("binary", "triplet"):
        weight = torch.tensor([1.0, 0.0, 3.0, 2.0, 2.0, 4.0])
        for dst_weight, share in ((None, torch.ones(6)), (weight, weight)):
            rule = {"mode": mode, "amount": 1, "dst_weight": dst_weight}
            rule |= {"src_weight": weight} if mode == "binary" and dst_weight is not None else {}
            (batch,) = DistLinkNeighborLoader(data, [0], neg_sampling=rule, batch_size=DRAWS)
            drawn = [batch.dst_neg_index] if mode == "triplet" else [end[DRAWS:] for end in batch.edge_label_index]
            for end in drawn:
                seen = torch.bincount(batch.n_id[end], minlength=6)
                assert seen[share == 0].sum() == 0
                expected = share[share > 0] / share.sum() * DRAWS
                assert scipy.stats.chisquare(seen[share > 0], expected.double(), sum_check=False).pvalue > ODDS
