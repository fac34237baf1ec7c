"""Tests of ShaDow sampling, one subgraph per root, compared with plain Python and torch_geometric."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.loader import ShaDowKHopSampler
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import sort_edge_index

from load_kit import hetero_data, homo_data, parts_of
from samplers_kit import (
    TWO_HOSTS,
    assert_same_everywhere,
    edges_between,
    hub,
    no_edges,
    odd_data,
    planted,
    triples,
    with_empty_part,
)
from trainer import DistShaDowKHopSampler
from trainer.core.errors import SettingsError


def neighbourhood(data, root, depth):
    """Return the ids of all nodes within ``depth`` steps against the edge direction, ascending."""
    found = {root}
    for _ in range(depth):
        found |= {u for u, v in data.edge_index.T.tolist() if v in found}
    return sorted(found)


def subgraphs(batch):
    """Return (root id, node ids, edge ids) of each subgraph. Assert that no edge joins two subgraphs."""
    ends = batch.batch[batch.edge_index]
    assert torch.equal(ends[0], ends[1]) and torch.equal(batch.ptr.diff(), batch.batch.bincount(minlength=len(batch)))
    return [
        (
            int(batch.n_id[batch.root_n_id[place]]),
            batch.n_id[batch.batch == place].tolist(),
            sorted(batch.e_id[ends[0] == place].tolist()),
        )
        for place in range(len(batch))
    ]


@pytest.mark.parametrize("make", [homo_data, odd_data, no_edges])
@pytest.mark.parametrize("num_neighbors", [-1, 1000])
def test_whole_neighbourhoods_with_all_edges_inside_them(make, num_neighbors):
    data = make()
    graph = parts_of(data, 3)
    roots = [3, 0, 3, 5, 5]  # each repeat has its own subgraph
    (batch,) = DistShaDowKHopSampler(graph, 2, num_neighbors, torch.tensor(roots), batch_size=5)
    expected = [(root, nodes, edges_between(data, nodes)) for root in roots for nodes in [neighbourhood(data, root, 2)]]
    assert subgraphs(batch) == expected
    assert torch.equal(batch.edge_index[0], local(batch, data.edge_index[0])) and batch.num_graphs == 5
    assert torch.equal(batch.edge_index[1], local(batch, data.edge_index[1]))
    assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert torch.equal(batch.y, data.y[torch.tensor(roots)]) and isinstance(batch, Batch)


def local(batch, ends):
    """Return the sources or the targets of the batch's edges, as indices into ``batch.n_id``.

    ends: the sources or the targets of all edges of the graph, as node ids.
    """
    members = zip(batch.batch.tolist(), batch.n_id.tolist(), strict=True)
    place = {member: place for place, member in enumerate(members)}
    trees = batch.batch[batch.edge_index[1]].tolist()
    return torch.tensor([place[end] for end in zip(trees, ends[batch.e_id].tolist(), strict=True)]).long()


@pytest.mark.parametrize("replace", [False, True])
def test_drawn_neighbourhoods_are_bit_identical_everywhere(replace):
    arguments = {"replace": replace, "batch_size": 11, "shuffle": True, "seed": 4, "node_idx": homo_data().train_mask}
    batches = assert_same_everywhere(
        lambda graph, **more: DistShaDowKHopSampler(graph, 2, 2, **more), homo_data(), **arguments
    )
    for _, nodes, edges in (found for batch in batches for found in subgraphs(batch)):
        assert len(nodes) <= 7 and edges == edges_between(homo_data(), nodes)


@pytest.mark.parametrize("num_roots", [2, 21])
@pytest.mark.filterwarnings("ignore:2 roots for 3 ranks")
def test_the_subgraph_of_a_root_does_not_depend_on_the_number_of_ranks(num_roots):
    graph, options = parts_of(homo_data(), 4), {"shuffle": True, "seed": 2}
    roots = torch.arange(num_roots)
    whole = list(DistShaDowKHopSampler(graph, 2, 2, roots, batch_size=9, **options))
    shares = [
        list(DistShaDowKHopSampler(graph, 2, 2, roots, batch_size=3, rank=rank, layout=TWO_HOSTS, **options))
        for rank in range(3)
    ]
    for batch, *own in zip(whole, *shares, strict=True):
        assert sorted(subgraphs(batch)) == sorted(found for share in own for found in subgraphs(share))


def test_epochs_differ_and_set_epoch_repeats_one():
    loader = DistShaDowKHopSampler(homo_data(), 1, 2, [1, 2, 3], batch_size=3)
    first, second = (subgraphs(next(iter(loader))) for _ in range(2))
    loader.set_epoch(0)
    assert first != second and subgraphs(next(iter(loader))) == first
    assert len(loader(torch.tensor([2]))) == 1


def test_neighbours_are_drawn_uniformly():
    data, counts = hub(8), np.zeros(9)
    loader = DistShaDowKHopSampler(data, 1, 3, torch.zeros(4000, dtype=torch.int64), batch_size=500)
    for batch in loader:
        assert torch.equal(batch.ptr.diff(), torch.full((500,), 4))
        counts += np.bincount(batch.n_id, minlength=9)
    assert counts[0] == 4000
    statistic = float((((counts[1:] - 1500) ** 2) / 1500).sum())
    assert statistic < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_an_empty_part_a_hub_and_split_names():
    for data in (odd_data(), no_edges()):
        graph = with_empty_part(data)
        found = [item for batch in DistShaDowKHopSampler(graph, 1, -1, batch_size=4) for item in subgraphs(batch)]
        assert found == [
            (v, n, edges_between(data, n)) for v in range(len(data.y)) for n in [neighbourhood(data, v, 1)]
        ]
    (batch,) = DistShaDowKHopSampler(hub(), 2, -1, [5, 0], batch_size=2)
    assert [len(nodes) for _, nodes, _ in subgraphs(batch)] == [301, 301]
    (batch,) = DistShaDowKHopSampler(parts_of(odd_data(), 2), 1, 1, "train", batch_size=9)
    assert batch.y.tolist() == [0, 2, 4, 6, 8]
    (batch,) = DistShaDowKHopSampler(odd_data(), 1, 1, [], batch_size=9) or [None]
    assert batch is None


def test_invalid_settings_are_refused():
    with pytest.raises(SettingsError, match="ShaDow takes homogeneous graphs only.*to_homogeneous"):
        DistShaDowKHopSampler(hetero_data(), 2, 5)
    with pytest.raises(SettingsError, match="num_neighbors must be a whole number of at least -1, not \\[5, 5\\]"):
        DistShaDowKHopSampler(homo_data(), 2, [5, 5])
    with pytest.raises(SettingsError, match="depth must be a whole number of at least 1, not 0"):
        DistShaDowKHopSampler(homo_data(), 0, 5)


@pytest.mark.parametrize("make", [homo_data, odd_data])
def test_batches_with_all_neighbours_equal_torch_geometrics(make):
    pytest.importorskip("torch_sparse", reason="torch_geometric's ShaDow needs torch-sparse")
    data = make()
    theirs = ShaDowKHopSampler(data, 2, 1000, torch.tensor([4, 1, 4, 9]), batch_size=3)
    ours = DistShaDowKHopSampler(parts_of(data, 2), 2, 1000, torch.tensor([4, 1, 4, 9]), batch_size=3)
    for mine, other in zip(ours, theirs, strict=True):
        assert triples(mine) == triples(other) and torch.equal(mine.edge_index, other.edge_index)
        for name in other.keys():
            if name not in ("edge_index", *(key for key in data.keys() if data.is_edge_attr(key))):
                assert torch.equal(mine[name], other[name]), name


def test_edges_are_sorted_by_root_source_and_target():
    for data in (homo_data(), parts_of(homo_data(), 2)):
        for batch in DistShaDowKHopSampler(data, 2, 3, torch.tensor([4, 1, 4, 9]), batch_size=3):
            assert torch.equal(batch.edge_index, sort_edge_index(batch.edge_index)) and batch.num_edges
            assert torch.equal(batch.n_id[batch.edge_index], homo_data().edge_index[:, batch.e_id])
            assert (batch.batch[batch.edge_index[0]].diff() >= 0).all()


def test_a_model_deeper_than_its_subgraphs_learns():
    data = planted()
    torch.manual_seed(0)
    model = GraphSAGE(3, 16, 3, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    loader = DistShaDowKHopSampler(parts_of(data, 2), 1, 8, data.train_mask, batch_size=16, shuffle=True)
    for batch in (batch for _ in range(8) for batch in loader):
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[batch.root_n_id]
        torch.nn.functional.cross_entropy(out, batch.y).backward()
        optimizer.step()
    (batch,) = DistShaDowKHopSampler(data, 1, -1, ~data.train_mask, batch_size=999)
    correct = model(batch.x, batch.edge_index)[batch.root_n_id].argmax(1) == batch.y
    assert float(correct.float().mean()) > 0.85  # the roots' own features alone give about 0.6
