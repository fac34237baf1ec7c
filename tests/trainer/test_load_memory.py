"""Tests of loaders on data in memory and on torch_geometric's feature and graph stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import LocalFeatureStore, LocalGraphStore
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from load_kit import CITES, REV, WRITES, assert_same, hetero_data, homo_data
from pyg_reference import node_loader
from trainer import DistNeighborLoader
from trainer.core.errors import DataError, SettingsError
from trainer.graph.in_memory import as_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.sampler.types import RowRequest


def stores_of(data, layout="coo", times=("time",)):
    features, graph = MyFeatureStore(), MyGraphStore()
    if isinstance(data, Data):
        nodes, edges = {None: data}, {None: data}
    else:
        nodes = {of: data[of] for of in data.node_types}
        edges = {of: data[of] for of in data.edge_types}
    for of, store in nodes.items():
        for name in ("x", "y", *times):
            if name in store:
                features.put_tensor(store[name], group_name=of, attr_name=name, index=None)
    for of, store in edges.items():
        size = (data.num_nodes,) * 2 if of is None else (data[of[0]].num_nodes, data[of[2]].num_nodes)
        graph.put_edge_index(tuple(store.edge_index), edge_type=of, layout=layout, size=size)
    return features, graph


@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_stores_give_the_batches_of_the_data_they_hold(make):
    data = make()
    seeds = torch.arange(20) if make is homo_data else ("paper", torch.arange(20))
    ours = DistNeighborLoader(stores_of(data), [3, 2], seeds, batch_size=6, shuffle=True)
    theirs = DistNeighborLoader(data, [3, 2], seeds, batch_size=6, shuffle=True)
    edge_and_more = ("edge_attr", "edge_time", "edge_weight", "train_mask", "image", "flag", "half", "num_nodes")
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other, ignore=edge_and_more)


@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_temporal_sampling_on_stores_reads_times_from_the_feature_store(make):
    data = make()
    seeds = torch.arange(20) if make is homo_data else ("paper", torch.arange(20))
    how = {"batch_size": 5, "time_attr": "time"}
    ours = DistNeighborLoader(stores_of(data), [-1, -1], seeds, **how)
    theirs = node_loader(data, [-1, -1], seeds, **how)
    for mine, other in zip(ours, theirs, strict=True):
        stores = [(mine, other)] if make is homo_data else [(mine[of], other[of]) for of in ("paper", "author")]
        for a, b in stores:
            assert torch.equal(a.n_id, b.n_id) and torch.equal(a.time, b.time) and torch.equal(a.batch, b.batch)


def test_custom_cls_makes_the_batch_of_stores():
    class Mine(Data):
        pass

    data = homo_data()
    batch = DistNeighborLoader(stores_of(data), [2], [4, 5], custom_cls=Mine)([0, 1])
    assert isinstance(batch, Mine) and torch.equal(batch.x, data.x[batch.n_id])


def test_stores_that_hold_one_partition_are_refused_by_name():
    data = homo_data()
    edges = LocalGraphStore.from_data(torch.arange(data.num_edges), data.edge_index, data.num_nodes)
    local = LocalFeatureStore(), edges
    local[0].put_tensor(data.x, group_name=None, attr_name="x")
    whole = stores_of(data)
    for pair, name in ((local, "LocalFeatureStore"), ((whole[0], local[1]), "LocalGraphStore")):
        with pytest.raises(SettingsError, match=f"{name} .* holds one partition"):
            DistNeighborLoader(pair, [2])


def test_unsupported_uses_of_stores_are_refused():
    data = homo_data()
    with pytest.raises(SettingsError, match=r"a \(feature store, graph store\) pair has no edge weights"):
        DistNeighborLoader(stores_of(data), [2], weight_attr="edge_weight")
    with pytest.raises(SettingsError, match="time_attr 'when': the feature store has no attribute of that name"):
        DistNeighborLoader(stores_of(data), [2], time_attr="when")
    with pytest.raises(DataError, match="the graph store holds no edges"):
        DistNeighborLoader((MyFeatureStore(), MyGraphStore()), [2])
    features, graph = stores_of(data)
    graph = MyGraphStore()
    graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=None)
    with pytest.raises(DataError, match="pass size= with its edges"):
        DistNeighborLoader((features, graph), [2])


def test_custom_attributes_are_handled_as_in_torch_geometric():
    data = homo_data()
    data.title, data.scale, data.names = "a graph", torch.tensor([1.0, 2.0]), ["a", "b"]
    data.face_index = torch.arange(120).view(2, 60)  # rows along the last dimension
    data.array = np.arange(60)
    ours = DistNeighborLoader(data, [-1], torch.arange(9), batch_size=9)
    theirs = node_loader(data, [-1], torch.arange(9), batch_size=9)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.title == "a graph" and mine.scale.tolist() == [1, 2]
        assert_same(mine, other)


def test_data_in_memory_is_shared_not_copied_and_not_changed():
    data = homo_data()
    keys, graph = sorted(data.keys()), as_graph(data)
    part = graph.store.parts[0]
    assert np.shares_memory(part.nodes["node"].attrs["x"], data.x.numpy())
    list(DistNeighborLoader(data, [3], batch_size=30, num_workers=2))
    assert sorted(data.keys()) == keys and data.num_nodes == 60


def test_edge_rows_of_a_graph_in_memory_can_be_gathered():
    data = hetero_data()
    ((rows),) = as_graph(data).access.gather([RowRequest(CITES, np.arange(200), ("orig_id", "edge_attr"))])
    assert np.array_equal(rows["edge_attr"], data[CITES].edge_attr.numpy()[rows["orig_id"]])


def test_the_bundled_loader_reads_data_in_memory_too():
    data = hetero_data()
    graph = as_graph(data)
    loader = BatchLoader(graph, LoaderSettings("train", (3, 2), 16, target="paper"), 0, RankLayout.single(1))
    for batch in loader.epoch(0):
        assert torch.equal(batch.x["paper"], data["paper"].x[batch.n_id["paper"]])
        assert torch.equal(batch.y, data["paper"].y[batch.n_id["paper"][: batch.num_seeds]])


def test_adversarial_graphs_in_memory():
    empty = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=5)
    (batch,) = DistNeighborLoader(empty, [3, 3], [4, 1, 4], batch_size=3)
    assert batch.n_id.tolist() == [4, 1, 4] and batch.edge_index.shape == (2, 0) and batch.num_sampled_edges == [0, 0]
    hub = Data(edge_index=torch.stack([torch.arange(1000), torch.zeros(1000, dtype=torch.long)]), num_nodes=1000)
    (batch,) = DistNeighborLoader(hub, [-1], [0])
    assert batch.num_sampled_edges == [1000]  # including a self loop of node 0
    wrong = Data(edge_index=torch.tensor([[0, 9], [1, 2]]), num_nodes=5)
    with pytest.raises(DataError, match="9 at position 1, but 'node' has 5 nodes"):
        DistNeighborLoader(wrong, [2])


def test_a_node_type_without_nodes_is_refused():
    data = HeteroData()
    data["paper"].num_nodes = 3
    data["author", "writes", "paper"].edge_index = torch.tensor([[0], [1]])
    with pytest.raises(DataError, match="'author', which has no nodes"):
        DistNeighborLoader(data, [2], "paper")


def test_relations_of_any_name_work_in_memory():
    data = HeteroData()
    data["a paper"].num_nodes = data["author__x"].num_nodes = 4
    data["author__x", "wrote (first)", "a paper"].edge_index = torch.tensor([[0, 1, 2], [1, 1, 3]])
    (batch,) = DistNeighborLoader(data, [-1], "a paper", batch_size=4)
    assert (
        batch["author__x"].n_id.tolist() == [0, 1, 2] and WRITES not in batch.edge_types and REV not in batch.edge_types
    )


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
def test_data_with_adj_t_gives_the_batches_of_its_edges(subgraph_type):
    data = homo_data()
    edge_index = data.edge_index.unique(dim=1)
    edge_attr = torch.arange(float(edge_index.shape[1]))
    edges = Data(x=data.x, edge_index=edge_index, edge_attr=edge_attr)
    sparse = T.ToSparseTensor(attr="edge_attr")(edges.clone())
    values = sparse.adj_t.values()
    how = {"batch_size": 5, "subgraph_type": subgraph_type}
    loaders = [DistNeighborLoader(of, [-1, -1], torch.arange(12), **how) for of in (sparse, edges)]
    for mine, other in zip(*loaders, strict=True):
        size = len(mine.n_id)
        assert "edge_index" not in mine and mine.adj_t.shape == (size, size) == (mine.num_nodes,) * 2
        torch._validate_sparse_csr_tensor_args(*parts_of_csr(mine.adj_t))
        coo = mine.adj_t.to_sparse_coo()
        found = mine.n_id[coo.indices().flip(0)].tolist()
        assert sorted(zip(*found, strict=True)) == sorted(zip(*other.n_id[other.edge_index].tolist(), strict=True))
        assert torch.equal(coo.values(), values[mine.e_id])
        if subgraph_type != "bidirectional":
            value = dict(zip(map(tuple, edge_index.T.tolist()), edge_attr.tolist(), strict=True))
            assert coo.values().tolist() == [value[ends] for ends in zip(*found, strict=True)]


def parts_of_csr(adj_t):
    return adj_t.crow_indices(), adj_t.col_indices(), adj_t.values(), adj_t.shape


def test_adj_t_of_edge_types():
    data = hetero_data()
    for of in data.edge_types:
        data[of].edge_index = data[of].edge_index.unique(dim=1)
        del data[of].edge_time, data[of].edge_weight
    del data[CITES].edge_attr
    sparse = T.ToSparseTensor(attr=None)(data.clone())
    (mine,), (other,) = (DistNeighborLoader(of, [-1, -1], ("paper", torch.arange(9)), batch_size=9)
                         for of in (sparse, data))  # fmt: skip
    for of in (WRITES, CITES, REV):
        assert mine[of].adj_t.shape == (mine[of[2]].num_nodes, mine[of[0]].num_nodes)
        rows, columns = mine[of].adj_t.to_sparse_coo()._indices()
        ends = mine[of[0]].n_id[columns].tolist(), mine[of[2]].n_id[rows].tolist()
        theirs = [other[end].n_id[other[of].edge_index[k]].tolist() for k, end in ((0, of[0]), (1, of[2]))]
        assert sorted(zip(*ends, strict=True)) == sorted(zip(*theirs, strict=True)) and len(ends[0])


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_neighbours_come_in_order_of_time_however_the_edges_are_listed(strategy):
    data = homo_data()
    data.time = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(2))
    target_then_time = np.lexsort((data.time[data.edge_index[0]], data.edge_index[1]))
    in_time = Data(x=data.x, time=data.time, edge_index=data.edge_index[:, target_then_time])
    how = {"batch_size": 9, "time_attr": "time", "temporal_strategy": strategy}
    ours, listed = (DistNeighborLoader(of, [-1, -1], **how) for of in (data, in_time))
    for mine, other in zip(ours, listed, strict=True):
        assert torch.equal(mine.n_id, other.n_id) and torch.equal(mine.time, other.time)
        assert torch.equal(mine.edge_index, other.edge_index)
