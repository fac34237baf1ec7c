"""Tests of the transforms that add structural encodings to batches: equal to torch_geometric's, and to matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import AddRandomWalkPE as PyGAddRandomWalkPE
from torch_geometric.utils import to_undirected

from load_kit import hetero_data, homo_data
from trainer import DistLinkNeighborLoader, DistNeighborLoader
from trainer.core.errors import SettingsError
from trainer.loader.encodings import AddHopDistance, AddRandomWalkPE


@pytest.mark.parametrize("length", [1, 6, 7])
def test_return_probabilities_equal_torch_geometric(length: int) -> None:
    torch.manual_seed(0)
    edges = torch.randint(0, 40, (2, 70))  # the last 10 of 50 nodes have none
    edges = to_undirected(edges[:, edges[0] != edges[1]])
    theirs = PyGAddRandomWalkPE(length)(Data(edge_index=edges, num_nodes=50)).random_walk_pe
    ours = AddRandomWalkPE(length)(Data(edge_index=edges, num_nodes=50)).random_walk_pe
    torch.testing.assert_close(ours, theirs)


def test_walks_go_over_all_types_in_both_directions() -> None:
    loader = DistNeighborLoader(hetero_data(), [4, 3], ("paper", None), batch_size=7, transform=AddRandomWalkPE(5))
    batch = next(iter(loader))
    first = dict(zip(batch.node_types, np.cumsum([0, *(batch[of].num_nodes for of in batch.node_types)]), strict=False))
    adjacent = np.zeros((batch.num_nodes, batch.num_nodes))
    for source, _, target in batch.edge_types:
        index = batch[source, _, target].edge_index.numpy()
        adjacent[index[0] + first[source], index[1] + first[target]] = 1
    adjacent = np.maximum(adjacent, adjacent.T) * (1 - np.eye(len(adjacent)))
    walk = adjacent / np.maximum(1, adjacent.sum(1, keepdims=True))
    wanted = np.stack([np.diag(np.linalg.matrix_power(walk, step)) for step in range(1, 6)], 1)
    found = np.concatenate([batch[of].random_walk_pe.numpy() for of in batch.node_types])
    assert wanted.any(0)[1:4].all()
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_distance_is_the_hop_that_found_a_node() -> None:
    batch = next(iter(DistNeighborLoader(homo_data(), [3, 2], range(9), batch_size=9, transform=AddHopDistance())))
    near, far = batch.hop_distance[batch.edge_index]
    assert batch.hop_distance.bincount().tolist() == batch.num_sampled_nodes and (near <= far + 1).all()
    links = (("paper", "cites", "paper"), None)
    typed = next(
        iter(DistLinkNeighborLoader(hetero_data(), [3, 2], links, batch_size=9, transform=AddHopDistance(None)))
    )
    for store in typed.node_stores:
        far = store.x[:, -1]
        assert far.long().bincount(minlength=3).tolist() == store.num_sampled_nodes
    whole = DistNeighborLoader(homo_data(), [3], batch_size=9, subgraph_type="induced", transform=AddHopDistance())
    with pytest.raises(SettingsError, match="num_sampled_nodes"):
        next(iter(whole))
