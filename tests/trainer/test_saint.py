"""Tests of GraphSAINT's draws and normalisation, compared with torch_geometric's."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from torch_geometric.loader import GraphSAINTEdgeSampler, GraphSAINTNodeSampler, GraphSAINTRandomWalkSampler
from torch_geometric.nn import GraphConv

from load_kit import content, hetero_data, homo_data, parts_of
from samplers_kit import (
    TWO_HOSTS,
    assert_same_everywhere,
    edges_between,
    hub,
    no_edges,
    odd_data,
    over_the_wire,
    planted,
    small_data,
    with_empty_part,
)
from trainer import DistGraphSAINTEdgeSampler, DistGraphSAINTNodeSampler, DistGraphSAINTRandomWalkSampler
from trainer.core.errors import SettingsError
from trainer.loader.edge_endpoints import HeldEndpoints
from trainer.loader.saint_draws import SaintEdgeDraw
from trainer.service.messages import Stats

KINDS = {
    "node": (DistGraphSAINTNodeSampler, GraphSAINTNodeSampler, ()),
    "edge": (DistGraphSAINTEdgeSampler, GraphSAINTEdgeSampler, ()),
    "walk": (DistGraphSAINTRandomWalkSampler, GraphSAINTRandomWalkSampler, (3,)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def sampler(kind, graph, batch_size=6, **options):
    ours, _, more = KINDS[kind]
    return ours(graph, batch_size, *more, log=False, **options)


def nodes_of(loader):
    return [batch.n_id.tolist() for batch in loader]


@kinds
def test_batches_are_induced_subgraphs_the_same_everywhere(kind):
    data = homo_data()
    batches = assert_same_everywhere(
        lambda graph, **more: sampler(kind, graph, **more), data, num_steps=5, sample_coverage=3, seed=7
    )
    assert len(batches) == 5 and len({tuple(batch.n_id.tolist()) for batch in batches}) == 5
    for batch in batches:
        nodes = batch.n_id.tolist()
        assert nodes == sorted(set(nodes)) and sorted(batch.e_id.tolist()) == edges_between(data, nodes)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert batch.node_norm.dtype == batch.edge_norm.dtype == torch.float32


@kinds
def test_one_rank_gets_the_batches_of_several_ranks(kind):
    graph = parts_of(homo_data(), 4)
    options = {"sample_coverage": 2, "seed": 3}
    alone = sampler(kind, graph, num_steps=12, **options)
    ranks = [sampler(kind, graph, num_steps=4, rank=rank, layout=TWO_HOSTS, **options) for rank in range(3)]
    for _ in range(2):  # two epochs
        expected, shares = list(alone), [list(loader) for loader in ranks]
        assert [len(share) for share in shares] == [4, 4, 4]
        for mine, other in zip(chain.from_iterable(zip(*shares, strict=True)), expected, strict=True):
            assert all(torch.equal(value, content(other)[key]) for key, value in content(mine).items() if
                       isinstance(value, torch.Tensor))  # fmt: skip


@kinds
def test_epochs_differ_and_set_epoch_repeats_one(kind):
    loader = sampler(kind, homo_data(), num_steps=3)
    first, second = nodes_of(loader), nodes_of(loader)
    loader.set_epoch(0)
    assert first != second and nodes_of(loader) == first
    assert first != nodes_of(sampler(kind, homo_data(), num_steps=3, seed=1))


def chi_square(counts, others):
    """Return the chi-square statistic of two histograms, and its approximate critical value at p = 0.001."""
    seen = counts + others > 0
    a, b = counts[seen], others[seen]
    ratio = np.sqrt(b.sum() / a.sum())
    statistic = float((((ratio * a - b / ratio) ** 2) / (a + b)).sum())
    freedom = len(a) - 1
    return statistic, freedom + 3.1 * np.sqrt(2 * freedom) + 6.4


@kinds
def test_nodes_come_as_often_as_in_torch_geometric(kind):
    pytest.importorskip("torch_sparse", reason="torch_geometric's GraphSAINT needs torch-sparse")
    data = homo_data(num_nodes=40, num_edges=90)
    both = torch.cat([data.edge_index, data.edge_index.flip(0)], 1)  # torch_geometric walks in the other direction
    data = type(data)(x=data.x, y=torch.arange(40), train_mask=data.train_mask, edge_index=both,
                      edge_attr=torch.arange(180.0), num_nodes=40)  # fmt: skip
    _, theirs, more = KINDS[kind]
    torch.manual_seed(1)
    steps = 1500
    loader = sampler(kind, data, 4)
    mine = np.bincount(np.concatenate([loader.draw_nodes(loader.key(0, k)) for k in range(steps)]), minlength=40)
    other = Counter(v for batch in theirs(data, 4, *more, num_steps=steps, log=False) for v in batch.y.tolist())
    statistic, limit = chi_square(mine, np.array([other[v] for v in range(40)]))
    assert statistic < limit


def test_nodes_are_drawn_by_out_degree():
    data = odd_data()
    sources = np.bincount(data.edge_index[0], minlength=10) / data.num_edges
    counts = np.zeros(10)
    graph = parts_of(data, 2)
    loader, orig_id = sampler("node", graph, 1), np.argsort(graph.store.global_ids["node"])
    for number in range(4000):
        (node,) = loader.draw_nodes(loader.key(0, number))
        counts[orig_id[node]] += 1
    assert (counts[sources == 0] == 0).all()
    expected = sources[sources > 0] * 4000
    assert float(((counts[sources > 0] - expected) ** 2 / expected).sum()) < 24.3  # 5 classes, p < 0.001


def test_edges_are_drawn_by_the_degrees_of_their_ends():
    src, dst = np.array([0, 1, 1, 2, 4]), np.array([1, 2, 2, 3, 5])  # no edge ends at 4 or starts at 5
    counts = np.bincount(SaintEdgeDraw.of(HeldEndpoints(src, dst), 6).edges(3, 20_000), minlength=5)
    weights = np.array([0 + 2, 1 + 1, 1 + 1, 2 + 0, 0 + 0])  # in-degree of the source + out-degree of the target
    expected = weights[:4] / weights.sum() * 20_000
    assert counts[4] == 0 and float(((counts[:4] - expected) ** 2 / expected).sum()) < 16.3  # 4 classes, p < 0.001
    skewed = SaintEdgeDraw.of(HeldEndpoints(np.array([0, 1, 1, 1]), np.array([1, 0, 2, 0])), 3).edges(1, 20_000)
    expected = np.array([5, 2, 1, 2]) / 10 * 20_000
    assert float(((np.bincount(skewed) - expected) ** 2 / expected).sum()) < 16.3
    only = SaintEdgeDraw.of(HeldEndpoints(np.array([0, 1]), np.array([2, 3])), 4)  # weights are 0: all equally likely
    assert 4700 < only.edges(1, 10_000).sum() < 5300


def test_walks_follow_edges_backwards_and_stay_at_dead_ends():
    path = parts_of(small_data([(v, v + 1) for v in range(7)], 8), 2)
    for batch in DistGraphSAINTRandomWalkSampler(path, 1, 3, num_steps=20):
        start = int(batch.n_id.max())
        assert batch.n_id.tolist() == list(range(max(0, start - 3), start + 1))
    lonely = nodes_of(DistGraphSAINTRandomWalkSampler(no_edges(), 2, 5, num_steps=10))
    assert {len(nodes) for nodes in lonely} <= {1, 2}
    (batch,) = DistGraphSAINTRandomWalkSampler(hub(), 50, 2)
    assert 0 in batch.n_id and len(batch.n_id) <= 101


def counted_norm(kind, data, coverage, steps, seed):
    """Compute GraphSAINT's node and edge normalisation in plain Python, with torch_geometric's formulas."""
    loader = sampler(kind, data, num_steps=steps, seed=seed)
    nodes, edges, total, number = Counter(), Counter(), 0, 0
    while total < data.num_nodes * coverage:
        for _ in range(steps):
            found = sorted(loader.draw_nodes(loader.key(-1, number)).tolist())
            number, total = number + 1, total + len(found)
            nodes.update(found)
            edges.update(edges_between(data, found))
    node_norm = [number / (nodes[v] or 0.1) / data.num_nodes for v in range(data.num_nodes)]
    edge_norm = []
    for e, u in enumerate(data.edge_index[0].tolist()):
        never = 1e4 if nodes[u] else 0.1
        edge_norm.append(min(nodes[u] / edges[e], 1e4) if edges[e] else never)
    return torch.tensor(node_norm), torch.tensor(edge_norm)


@kinds
@pytest.mark.parametrize("make", [homo_data, odd_data])
def test_normalisation_equals_torch_geometrics_formula(kind, make):
    data = make()
    node_norm, edge_norm = counted_norm(kind, data, 4, 2, 5)
    for batch in sampler(kind, parts_of(data, 2), num_steps=2, sample_coverage=4, seed=5):
        torch.testing.assert_close(batch.node_norm, node_norm[batch.n_id])
        torch.testing.assert_close(batch.edge_norm, edge_norm[batch.e_id])
    assert "node_norm" not in next(iter(sampler(kind, data)))


@kinds
def test_normalisation_is_close_to_torch_geometrics_estimate(kind):
    pytest.importorskip("torch_sparse", reason="torch_geometric's GraphSAINT needs torch-sparse")
    data = planted(2, 15)
    _, theirs, more = KINDS[kind]
    other = theirs(data, 5, *more, num_steps=20, sample_coverage=300, log=False)
    ours = sampler(kind, data, 5, num_steps=20, sample_coverage=300)
    torch.testing.assert_close(ours._norm.node, other.node_norm, rtol=0.25, atol=0)
    both = (ours._norm.edge < 100) & (other.edge_norm < 100)
    torch.testing.assert_close(ours._norm.edge[both].mean(), other.edge_norm[both].mean(), rtol=0.1, atol=0)


@kinds
def test_saved_normalisation_is_used_only_for_equal_graph_and_settings(kind, tmp_path, monkeypatch):
    data, options = homo_data(), {"num_steps": 2, "sample_coverage": 3, "save_dir": tmp_path / "norm"}
    made = sampler(kind, data, **options)
    (path,) = (tmp_path / "norm").iterdir()
    assert path.name.startswith(type(made).__name__.lower() + "_3_") and path.suffix == ".pt"
    with monkeypatch.context() as patch:
        patch.setattr("trainer.loader.graph_saint._estimate", lambda *_: pytest.fail("was to be read"))
        kept = sampler(kind, parts_of(data, 3), **options)  # the number of parts does not matter
    assert torch.equal(kept._norm.node, made._norm.node) and torch.equal(kept._norm.edge, made._norm.edge)
    changes = [{"seed": 1}, {"batch_size": 7}, {"sample_coverage": 4}, {"num_steps": 3}]
    others = [(homo_data(seed=8), {}), *((data, changed) for changed in changes)]
    for count, (graph, changed) in enumerate(others, 2):
        sampler(kind, graph, **options | changed)
        assert len(list((tmp_path / "norm").iterdir())) == count


def test_a_damaged_or_foreign_file_of_statistics_is_refused(tmp_path):
    options = {"sample_coverage": 2, "save_dir": tmp_path}
    sampler("walk", homo_data(), **options)
    (path,) = tmp_path.iterdir()
    torch.save({"other": 1}, path)
    with pytest.raises(SettingsError, match=r"save_dir: .* is not a normalisation for this graph and these settings"):
        sampler("walk", homo_data(), **options)
    path.write_bytes(b"PK broken")
    with pytest.raises(SettingsError, match=r"save_dir: .* cannot be read \(.*\); delete it"):
        sampler("walk", homo_data(), **options)
    with pytest.raises(SettingsError, match=r"save_dir: .* cannot be written: "):
        sampler("walk", homo_data(), sample_coverage=2, save_dir=path / "below a file")


def test_walks_over_the_wire_send_one_request_per_owner_and_step():
    with over_the_wire(homo_data()) as graph:
        (client,) = graph.access.remotes.values()
        loader = DistGraphSAINTRandomWalkSampler(graph, 30, 4)
        before = client.ask(Stats()).requests
        next(iter(loader))
        asked = client.ask(Stats()).requests - before - 1
    assert asked == 4 + 1 + 1 + 1  # steps; original ids; edges between them; rows


@kinds
def test_odd_graphs(kind):
    for graph, data in ((with_empty_part(odd_data()), odd_data()), (hub(), hub())):
        for batch in sampler(kind, graph, 3, num_steps=4, sample_coverage=1):
            assert sorted(batch.e_id.tolist()) == edges_between(data, batch.n_id.tolist())
            assert batch.node_norm.isfinite().all() and batch.edge_norm.isfinite().all()


def test_invalid_settings_are_refused():
    for kind in KINDS:
        with pytest.raises(SettingsError, match="GraphSAINT takes homogeneous graphs only"):
            sampler(kind, hetero_data())
        with pytest.raises(SettingsError, match="batch_size must be a whole number of at least 1, not 0"):
            sampler(kind, homo_data(), 0)
        with pytest.raises(SettingsError, match="draws its own nodes"):
            sampler(kind, homo_data())(torch.tensor([0]))
    for kind in ("node", "edge"):
        with pytest.raises(SettingsError, match="draws edges, but the graph has none; use DistGraphSAINTRandomWalk"):
            sampler(kind, no_edges())
    assert len(nodes_of(sampler("edge", odd_data(), 50))[0]) > 4  # more draws than edges
    data = homo_data()
    data.node_norm = torch.ones(60)
    with pytest.raises(SettingsError, match="GraphSAINT sets 'node_norm' in every batch"):
        sampler("walk", data)


@kinds
def test_a_model_learns_with_normalised_messages_and_loss(kind):
    data = planted()
    torch.manual_seed(0)
    first, second = GraphConv(3, 16, aggr="add"), GraphConv(16, 3, aggr="add")
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], 0.02)

    def out(batch, weight=None):
        return second(first(batch.x, batch.edge_index, weight).relu(), batch.edge_index, weight)

    degree = data.edge_index[1].bincount(minlength=data.num_nodes).clamp(min=1)
    data.edge_weight = 1.0 / degree[data.edge_index[1]]
    for batch in sampler(kind, parts_of(data, 2), 40, num_steps=80, sample_coverage=20):
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(
            out(batch, batch.edge_norm.clamp(max=10) * batch.edge_weight).log_softmax(1), batch.y, reduction="none"
        )
        (loss * batch.node_norm)[batch.train_mask].sum().backward()
        optimizer.step()
    correct = out(data, data.edge_weight).argmax(1) == data.y
    assert float(correct[~data.train_mask].float().mean()) > 0.8
