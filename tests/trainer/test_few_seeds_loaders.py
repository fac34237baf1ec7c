"""Tests of loaders with fewer seeds than ranks: each seed comes once, and all ranks make as many batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from load_kit import homo_data, parts_of
from test_clusters import clustered
from trainer import (
    DistClusterLoader,
    DistGraphSAINTEdgeSampler,
    DistGraphSAINTNodeSampler,
    DistGraphSAINTRandomWalkSampler,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    DistShaDowKHopSampler,
)
from trainer.graph.seed_order import RankLayout

DATA = homo_data()
LAYOUT = RankLayout(3, ((0,), (1,), (2,)))
BY_NODES: dict[str, Callable[..., Any]] = {
    "neighbours": lambda nodes, **how: DistNeighborLoader(parts_of(DATA, 3), [3, 2], input_nodes=nodes, **how),
    "shadow": lambda nodes, **how: DistShaDowKHopSampler(parts_of(DATA, 3), 2, 3, node_idx=nodes, **how),
    "links": lambda edges, **how: DistLinkNeighborLoader(
        parts_of(DATA, 3), [3, 2], edge_label_index=DATA.edge_index[:, edges], neg_sampling="binary", **how
    ),
}


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("name", BY_NODES)
def test_every_seed_comes_once(name: str, count: int) -> None:
    seeds = torch.arange(count) + 3
    how = {"batch_size": 3, "shuffle": True, "layout": LAYOUT}
    ranks = [list(BY_NODES[name](seeds, rank=rank, **how)) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1, "all ranks take part in each step"
    total = sum(len(batch.input_id) if name != "shadow" else len(batch.root_n_id) for each in ranks for batch in each)
    assert total == count


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: DistGraphSAINTNodeSampler(parts_of(DATA, 3), 2, 4, 0, log=False, **how),
        lambda **how: DistGraphSAINTEdgeSampler(parts_of(DATA, 3), 1, 4, 0, log=False, **how),
        lambda **how: DistGraphSAINTRandomWalkSampler(parts_of(DATA, 3), 1, 2, 4, 0, log=False, **how),
        lambda **how: DistClusterLoader(clustered(3, 1)[0], batch_size=2, **how),  # three clusters for steps of six
    ],
    ids=["saint nodes", "saint edges", "saint walks", "clusters"],
)
def test_steps_that_ranks_outnumber_are_shared(make: Callable[..., Any]) -> None:
    # Three ranks have four batches, or three clusters in steps of six.
    ranks = [list(make(rank=rank, layout=LAYOUT)) for rank in range(3)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(torch.isfinite(batch.x).all() for each in ranks for batch in each)
