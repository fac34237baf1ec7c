"""Tests of ``dataset_of``: a torch_geometric object becomes a ``Dataset`` that shares its tensors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from trainer import DistNeighborLoader
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.data.memory import dataset_of


def small() -> Data:
    return Data(
        x=torch.arange(8.0).reshape(4, 2),
        y=torch.tensor([0, 1, 1, 0]),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        edge_attr=torch.ones(3, 2, 2, dtype=torch.bfloat16),
        train_mask=torch.tensor([True, False, False, True]),
        time=torch.tensor([3, 1, 2, 0]),
        edge_label_index=torch.tensor([[0], [3]]),
        scale=torch.tensor(2.5),
        title="small",
    )


def test_data_shares_its_tensors_and_keeps_masks_as_attributes():
    data = small()
    dataset = dataset_of(data, "mine")
    nodes, edges = dataset.nodes[HOMO_NODE], dataset.edges[HOMO_EDGE]
    assert (dataset.name, dataset.hetero, nodes.num_nodes, nodes.num_classes) == ("mine", False, 4, 2)
    assert sorted(nodes.attrs) == ["time", "train_mask", "x", "y"] and nodes.splits["train"].tolist() == [0, 3]
    assert list(edges.attrs) == ["edge_attr"] and edges.bfloat16 == {"edge_attr"}
    assert sorted(dataset.graph_attrs) == ["edge_label_index", "scale"] and dataset.time_attrs == ("time",)
    data.x[2, 1] = -7.0
    data.edge_index[0, 0] = 3
    data.edge_attr[1, 0, 0] = 2.0
    assert nodes.attrs["x"][2, 1] == -7.0 and edges.edge_index[0, 0] == 3
    assert edges.attrs["edge_attr"][1, 0, 0] == 0x4000


@pytest.mark.parametrize("num_edges", [3, 4])
def test_node_and_edge_attributes_follow_torch_geometrics_rule(num_edges):
    ends = torch.arange(num_edges) % 4
    data = Data(edge_index=torch.stack((ends, ends)), num_nodes=4)
    data.edge_kind, data.kind = torch.zeros(num_edges), torch.zeros(4)
    data.odd, data.table = torch.zeros(5), torch.zeros(2, 4)
    dataset = dataset_of(data, "mine")
    assert list(dataset.edges[HOMO_EDGE].attrs) == [key for key in data.edge_attrs() if key != "edge_index"]
    assert list(dataset.nodes[HOMO_NODE].attrs) == ["kind"] and sorted(dataset.graph_attrs) == ["odd", "table"]


def test_heterodata_of_any_names():
    data = HeteroData(note=torch.tensor([1, 2]))
    data["my papers"].x = torch.rand(3)
    data["my papers"].y = torch.tensor([0.5, -3.0, 1.0])
    data["author"].num_nodes = 2
    of = ("author", "has written", "my papers")
    data[of].edge_index = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
    data[of].time = torch.tensor([5.0, 6.0])
    dataset = dataset_of(data, "mine")
    assert dataset.hetero and list(dataset.nodes) == ["my papers", "author"] and list(dataset.edges) == [of]
    assert dataset.nodes["author"].num_nodes == 2 and dataset.nodes["my papers"].num_classes == 0
    assert dataset.nodes["my papers"].attrs["y"].tolist() == [0.5, -3.0, 1.0]
    assert dataset.edges[of].edge_index.dtype == np.int32 and dataset.edges[of].attrs["time"].tolist() == [5, 6]
    assert dataset.graph_attrs["note"].tolist() == [1, 2] and dataset.time_attrs == ()


@pytest.mark.parametrize("change", [{"y": torch.zeros(4, 3)}, {"y": torch.tensor([0, -5, 1, 2])}, {"y": None}])
def test_labels_are_not_checked(change):
    data = small()
    data.update(change)
    assert dataset_of(data, "mine").nodes[HOMO_NODE].num_classes == 0


def test_times_of_other_names_and_kinds():
    data = small()
    data.year = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    data.time = data.time.float()
    assert dataset_of(data, "mine", time_attrs=("time", "year")).time_attrs == ("year",)


def test_tensors_that_numpy_cannot_represent_are_left_out():
    data = small()
    data.small, data.sparse = torch.zeros(4).to(torch.float8_e5m2), torch.eye(4).to_sparse()
    dataset = dataset_of(data, "mine")
    assert {"small", "sparse"}.isdisjoint({*dataset.nodes[HOMO_NODE].attrs, *dataset.graph_attrs})


def test_graphs_without_edges_or_without_nodes_of_a_type():
    empty = dataset_of(Data(x=torch.zeros(2, 1)), "mine")
    assert empty.nodes[HOMO_NODE].num_nodes == 2 and empty.edges[HOMO_EDGE].num_edges == 0
    data = HeteroData()
    data["a", "to", "b"].edge_index = torch.tensor([[0], [0]])
    with pytest.raises(DataError, match=r"ends at 'a', which has no nodes; set data\['a'\].num_nodes"):
        dataset_of(data, "mine")


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_edges_of_a_transposed_adjacency_matrix(layout):
    data = HeteroData(a={"num_nodes": 3}, b={"num_nodes": 2})
    entries = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])  # 1 -> 0, 0 -> 1, 2 -> 1
    data["a", "to", "b"].adj_t = entries.to_sparse(layout=layout)
    assert dataset_of(data, "mine").edges["a", "to", "b"].edge_index.tolist() == [[1, 0, 2], [0, 1, 1]]


def test_a_mask_of_another_length_is_reported():
    data = small()
    data.val_mask, data.edge_mask, data.masks = torch.ones(5).bool(), torch.ones(3).bool(), torch.ones(5).bool()
    with pytest.warns(
        UserWarning, match="mine: val_mask has 5 entries, but the graph has 4 nodes: it is not used"
    ) as warned:
        dataset = dataset_of(data, "mine")
    assert len(warned) == 1 and list(dataset.nodes[HOMO_NODE].splits) == ["train"]


def test_torch_geometric_warns_once_that_it_infers_the_number_of_nodes():
    data = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), kind=torch.zeros(4), length=torch.zeros(3), title="t")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in DistNeighborLoader(data, [1, 1], batch_size=2):
            assert len(batch.kind) == len(batch.n_id)
    assert sum("infer 'num_nodes'" in str(warning.message) for warning in warned) == 1
    assert "num_nodes" not in data
