"""Test kit: the graphs in tests/trainer/samples, and partitions made by torch_geometric's ``Partitioner``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from trainer.data.build import build_dataset
from trainer.data.options import SourceOptions
from trainer.sources.pyg import raw_graph

SAMPLES = Path(__file__).with_name("samples")  #: README.md there says how they were made

CITES, WRITES, BACK = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author")


def homo(num_nodes=24, num_edges=90):
    """Return a fixed graph with features, labels, a split, edge features and edge weights."""
    at = torch.arange(num_edges)
    return Data(
        x=rows(num_nodes, 3),
        y=torch.arange(num_nodes) % 4,
        train_mask=torch.arange(num_nodes) % 3 == 0,
        edge_index=torch.stack([(7 * at + 3) % num_nodes, (5 * at * at + at // 9 + 1) % num_nodes]),
        edge_attr=rows(num_edges, 2) + 0.5,
        edge_weight=(at % 7 + 1) / 8,
    )


def hetero():
    at = torch.arange(40)
    data = HeteroData()
    data["paper"].x, data["author"].x = rows(15, 3), rows(8, 3) * 2
    data["paper"].y = torch.arange(15) % 3
    data[CITES].edge_index = torch.stack([(4 * at + 1) % 15, (at * at + 2) % 15])
    data[WRITES].edge_index = torch.stack([at % 8, (11 * at + at // 15) % 15])
    data[BACK].edge_index = data[WRITES].edge_index.flip(0)
    for k, of in enumerate(data.edge_types):
        data[of].edge_attr = rows(40, 2) + k
    return data


def rows(count, width):
    return torch.arange(count * width, dtype=torch.float32).reshape(count, width) / 16


def dataset_of(data, name="graph"):
    return build_dataset(raw_graph(name, data.to_dict(), name), SourceOptions(), "fingerprint")


def partition_by_pyg(data, num_parts, folder, monkeypatch):
    # a fixed assignment in place of METIS, which needs pyg-lib or torch-sparse
    from torch_geometric.distributed import Partitioner
    from torch_geometric.loader import ClusterData

    def assigned(self, edge_index, num_nodes):
        return (torch.arange(num_nodes) * 7 // 3) % self.num_parts

    monkeypatch.setattr(ClusterData, "_metis", assigned)
    Partitioner(data, num_parts, str(folder)).generate_partition()
    return folder


def assert_same_graph(found, expected, *, without=()):
    assert set(found.nodes) == set(expected.nodes) and set(found.edges) == set(expected.edges)
    for of, nodes in expected.nodes.items():
        assert found.nodes[of].num_nodes == nodes.num_nodes
        assert_same_attrs(found.nodes[of], nodes, without)
    for of, edges in expected.edges.items():
        np.testing.assert_array_equal(found.edges[of].edge_index, edges.edge_index)
        assert_same_attrs(found.edges[of], edges, without)


def assert_same_attrs(found, expected, without):
    assert set(found.attrs) - set(without) == set(expected.attrs) - set(without)
    for name in set(expected.attrs) - set(without):
        assert found.attrs[name].dtype == expected.attrs[name].dtype, name
        np.testing.assert_array_equal(found.attrs[name], expected.attrs[name])
