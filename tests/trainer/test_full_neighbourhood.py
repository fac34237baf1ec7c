"""Tests of ``num_neighbors=[-1] * k``: all neighbours, also of a node with very many neighbours."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data

from load_kit import opened
from partitions import store_of
from trainer import DistNeighborLoader

LEAVES = 200_000


@pytest.fixture(scope="module")
def hub():
    """Return a star: node 0 with edges to and from ``LEAVES`` leaves.

    Leaf 1 has an edge to one more node, the last.
    """
    leaves = torch.arange(1, LEAVES + 1)
    zeros = torch.zeros_like(leaves)
    edges = torch.stack([torch.cat([leaves, zeros, leaves[:1]]), torch.cat([zeros, leaves, leaves[-1:] + 1])])
    return Data(edge_index=edges, num_nodes=LEAVES + 2)


@pytest.mark.parametrize("num_parts", [0, 3])
def test_all_neighbours_of_a_hub_come_once(hub, num_parts):
    data = opened(store_of(hub.edge_index.numpy(), hub.num_nodes, num_parts)) if num_parts else hub
    (batch,) = DistNeighborLoader(data, [-1] * 3, torch.tensor([LEAVES + 1, 0]), batch_size=2)
    assert batch.n_id[:3].tolist() == [LEAVES + 1, 0, 1] and batch.num_sampled_nodes == [2, LEAVES, 0, 0]
    assert batch.num_sampled_edges == [LEAVES + 1, LEAVES, 0]
    assert sorted(batch.n_id.tolist()) == list(range(LEAVES + 2))
    assert torch.equal(batch.n_id[batch.edge_index], hub.edge_index[:, batch.e_id])
    assert [block.num_src for block in batch.blocks] == [LEAVES + 2] * 3
