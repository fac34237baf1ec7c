"""Tests of ``DistClusterLoader``: batches of whole clusters and all their edges, each cluster once per epoch."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch_geometric.loader import ClusterData, ClusterLoader
from torch_geometric.nn import GCN
from torch_geometric.utils import sort_edge_index

import graphs
from load_kit import hetero_data, homo_data, opened, parts_of
from partitions import store_of
from samplers_kit import TWO_HOSTS, edges_between, no_edges, odd_data, planted, small_data, triples
from trainer import DistClusterLoader
from trainer.core.errors import SettingsError
from trainer.partition.clusters import with_clusters
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.store.part_store import open_parts


def clustered(num_parts=4, per_part=3, edges=260):
    """Return (graph opened from parts with attribute ``cluster``, the same graph as Data, cluster of each node)."""
    data = homo_data(num_edges=edges)
    rng = np.random.default_rng(1)
    part = np.arange(data.num_nodes) % num_parts
    cluster = part * per_part + rng.integers(0, per_part, data.num_nodes)
    attrs = {"x": data.x.numpy(), "y": data.y.numpy(), "cluster": cluster.astype(np.int32)}
    edge_attrs = {"edge_attr": data.edge_attr.numpy()}
    store = store_of(
        data.edge_index.numpy(), data.num_nodes, num_parts, attrs=attrs, edge_attrs=edge_attrs, assignment=part
    )
    return opened(store), data, cluster


def nodes_of(clusters, numbers):
    """Return the nodes of the clusters ``numbers``: one cluster after the other, ids ascending within a cluster."""
    return [int(node) for number in numbers for node in np.flatnonzero(clusters == number)]


def assert_whole(batch, data):
    assert sorted(batch.e_id.tolist()) == edges_between(data, batch.n_id.tolist())
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_is_its_clusters_in_order_with_all_edges_between_them(threads):
    graph, data, cluster = clustered()
    batches = list(DistClusterLoader(graph, batch_size=5, threads=threads))
    assert [batch.n_id.tolist() for batch in batches] == [
        nodes_of(cluster, numbers) for numbers in (range(5), range(5, 10), range(10, 12))
    ]
    for batch in batches:
        assert_whole(batch, data)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 12, 40])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_cluster_comes_once_and_ranks_have_equally_many_steps(batch_size, drop_last):
    graph, _, cluster = clustered()
    loaders = [
        DistClusterLoader(graph, batch_size=batch_size, shuffle=True, drop_last=drop_last, rank=rank, layout=TWO_HOSTS)
        for rank in range(3)
    ]
    shares = [[np.unique(cluster[batch.n_id]) for batch in loader] for loader in loaders]
    assert {len(share) for share in shares} == {len(loaders[0])}
    taken = list(chain.from_iterable(chain.from_iterable(shares)))
    if drop_last:
        assert len(set(taken)) == len(taken) == 12 // (3 * batch_size) * 3 * batch_size
    else:
        assert sorted(taken) == list(range(12))
        assert all(len(batch) >= 1 for share in shares for batch in share)


def test_ranks_take_the_clusters_of_their_own_host_first():
    graph, _, cluster = clustered()  # 6 of 12 clusters lie on the host of ranks 0 and 1, 6 on the host of rank 2
    for epoch in range(3):
        own = {}
        for rank in range(3):
            loader = DistClusterLoader(graph, batch_size=1, shuffle=True, seed=epoch, rank=rank, layout=TWO_HOSTS)
            own[rank] = {int(c) for batch in loader for c in np.unique(cluster[batch.n_id])}
        assert own[2] <= {3, 4, 5, 9, 10, 11}
        assert len((own[0] | own[1]) & {0, 1, 2, 6, 7, 8}) == 6 and len(own[2]) == 4


def test_orders_differ_by_epoch_and_positions_can_be_chosen():
    graph, _, cluster = clustered()
    loader = DistClusterLoader(graph, batch_size=3, shuffle=True)
    first, second = ([batch.n_id.tolist() for batch in loader] for _ in range(2))
    loader.set_epoch(0)
    assert first != second and first == [batch.n_id.tolist() for batch in loader]
    assert loader(torch.tensor([4, 2])).n_id.tolist() == nodes_of(cluster, [4, 2])


def test_whole_parts_are_the_clusters_where_the_partition_has_none():
    data = homo_data()
    graph = parts_of(data, 4)
    for part, batch in enumerate(DistClusterLoader(graph)):
        begin, end = graph.store.books["node"].range_of(part)
        assert batch.n_id.tolist() == graph.store.parts[part].nodes["node"].orig_id.tolist() and end > begin
        assert_whole(batch, data)
    (batch,) = DistClusterLoader(graph, batch_size=4)
    assert len(batch.e_id) == data.num_edges


def test_clusters_of_the_partition(tmp_path):
    # Clusters are written as by `partition make --clusters 3`, for a heterogeneous graph.
    dataset = graphs.bipartite()
    assignment = assign_parts(dataset, 2, "metis", 0)
    write_partition(with_clusters(dataset, assignment, 3), assignment, tmp_path / "parts")
    loader = DistClusterLoader(opened(open_parts(tmp_path / "parts")))
    batches = list(loader)
    for of, nodes in dataset.nodes.items():
        assert sorted(node for batch in batches for node in batch[of].n_id.tolist()) == list(range(nodes.num_nodes))
        assert all(len(batch[of].cluster.unique()) <= 1 for batch in batches)
    cites = ("paper", "cites", "paper")
    whole = loader(torch.arange(len(loader)))
    assert sorted(whole[cites].e_id.tolist()) == list(range(5)) and 2 <= len(batches) <= 6
    assert torch.equal(whole[cites].edge_attr[:, 0], whole[cites].e_id * 2.0)


@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_graphs_in_memory_are_divided_by_metis(make):
    data = make()
    batches = list(DistClusterLoader(data, num_clusters=6, batch_size=2, seed=1))
    again = list(DistClusterLoader(data, num_clusters=6, batch_size=2, seed=1))
    stores = lambda batch: batch.node_stores if hasattr(batch, "node_types") else [batch]  # noqa: E731
    for place, store in enumerate(stores(data)):
        found = [stores(batch)[place].n_id for batch in batches]
        assert sorted(torch.cat(found).tolist()) == list(range(store.num_nodes)) and len(found) == 3
        assert all(torch.equal(a, stores(b)[place].n_id) for a, b in zip(found, again, strict=True))
    if make is homo_data:
        assert_whole(batches[0], data)


class GivenClusters(ClusterData):
    """torch_geometric's ``ClusterData`` with given clusters, which needs no torch-sparse or pyg-lib."""

    def __init__(self, data, cluster, num_parts):
        self._given = torch.from_numpy(cluster).long()
        super().__init__(data, num_parts, log=False)

    def _metis(self, edge_index, num_nodes):
        return self._given


@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_batches_equal_those_of_torch_geometric(batch_size):
    graph, data, cluster = clustered()
    data.id = torch.arange(data.num_nodes)  # torch_geometric does not sort the nodes of a cluster
    theirs = ClusterLoader(GivenClusters(data, cluster, 12), batch_size=batch_size)
    for mine, other in zip(DistClusterLoader(graph, batch_size=batch_size), theirs, strict=True):
        order, to_id = mine.n_id.argsort(), other.id.argsort()
        assert torch.equal(mine.n_id[order], other.id[to_id]) and torch.equal(mine.x[order], other.x[to_id])
        assert torch.equal(torch.from_numpy(cluster)[mine.n_id], torch.from_numpy(cluster)[other.id])
        mine.edge_index, other.edge_index = mine.n_id[mine.edge_index], other.id[other.edge_index]
        assert triples(mine) == triples(other)


@pytest.mark.parametrize("sparse_format", ["csr", "csc"])
@pytest.mark.parametrize("source", ["memory", "parts"])
def test_edges_are_in_the_order_of_torch_geometrics_clusters(sparse_format, source):
    data = homo_data(num_edges=900)  # includes multi-edges
    graph = clustered(edges=900)[0] if source == "parts" else data
    num_clusters = None if source == "parts" else 5
    for batch in DistClusterLoader(graph, num_clusters, sparse_format=sparse_format, batch_size=3, shuffle=True):
        in_order = sort_edge_index(batch.edge_index, sort_by_row=sparse_format == "csr")
        assert torch.equal(batch.edge_index, in_order) and batch.num_edges
        assert_whole(batch, data)
    with pytest.raises(SettingsError, match="sparse_format 'coo'; expected 'csr' or 'csc'"):
        DistClusterLoader(graph, num_clusters, sparse_format="coo")
    with pytest.raises(SettingsError, match="keep_inter_cluster_edges: not supported, .* are not in the batch"):
        DistClusterLoader(graph, num_clusters, keep_inter_cluster_edges=True)


def test_odd_graphs_and_clusters_without_nodes():
    for data in (odd_data(), no_edges(), small_data([(0, 0), (0, 0)], 2)):
        cluster = np.where(np.arange(data.num_nodes) < 2, 9, 4)  # clusters 0 to 3 and 5 to 8 have no nodes
        attrs = {"x": data.x.numpy(), "cluster": cluster}
        store = store_of(data.edge_index.numpy(), data.num_nodes, 3, attrs=attrs,
                         edge_attrs={"edge_attr": data.edge_attr.numpy()},
                         assignment=np.arange(data.num_nodes) % 2 * 2)  # fmt: skip
        batches = list(DistClusterLoader(opened(store)))
        assert [b.n_id.tolist() for b in batches] == [n for c in (4, 9) if (n := nodes_of(cluster, [c]))]
        for batch in batches:
            assert_whole(batch, data)


def test_fewer_clusters_than_ranks_leave_some_without_nodes():
    graph, data = parts_of(homo_data(), 2), homo_data()
    layout = TWO_HOSTS.__class__(3, ((0, 1), (2,)))
    with pytest.warns(UserWarning, match="2 clusters for 3 ranks"):
        loaders = [DistClusterLoader(graph, rank=rank, layout=layout) for rank in range(3)]
    (found,) = zip(*loaders, strict=True)
    assert sorted(node for batch in found for node in batch.n_id.tolist()) == list(range(data.num_nodes))
    assert [batch.num_nodes for batch in found].count(0) == 1


def test_invalid_arguments_are_refused():
    with pytest.raises(SettingsError, match="num_clusters is not set: for a graph in memory, pass"):
        DistClusterLoader(homo_data())
    with pytest.raises(SettingsError, match="num_clusters is for graphs in memory.*partition make --clusters K"):
        DistClusterLoader(parts_of(homo_data(), 2), num_clusters=4)
    with pytest.raises(SettingsError, match="num_clusters must be a whole number of at least 1, not 0"):
        DistClusterLoader(homo_data(), num_clusters=0)
    data = homo_data()
    store = store_of(data.edge_index.numpy(), 60, 2, attrs={"cluster": np.random.default_rng(0).random(60)})
    with pytest.raises(SettingsError, match="'node' nodes have no attribute 'cluster' with one integer per node"):
        DistClusterLoader(opened(store))


def test_a_gcn_learns_on_joined_clusters():
    data = planted()
    torch.manual_seed(0)
    model = GCN(3, 16, 2, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    loader = DistClusterLoader(data, num_clusters=6, batch_size=2, shuffle=True)
    for batch in (batch for _ in range(20) for batch in loader):
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[batch.train_mask]
        torch.nn.functional.cross_entropy(out, batch.y[batch.train_mask]).backward()
        optimizer.step()
    correct = model(data.x, data.edge_index).argmax(1) == data.y
    assert float(correct[~data.train_mask].float().mean()) > 0.85
