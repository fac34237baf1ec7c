"""Test kit for subgraph samplers: graphs in memory, in parts and behind a server."""

from __future__ import annotations

import contextlib
from itertools import zip_longest

import numpy as np
import torch
from torch_geometric.data import Data

from load_kit import assert_same, opened, parts_of
from partitions import store_of
from service_kit import client_of, serving
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph

TWO_HOSTS = RankLayout(3, ((0, 1), (2,), (0, 1), (2,)))  #: ranks 0 and 2 hold parts 0 and 2


def small_data(pairs, num_nodes):
    """Return ``Data`` with one edge per (source, target) pair.

    Row v of x is (v,), the label of node v is v, and the attribute of edge e is e + 0.5.
    """
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    ids = torch.arange(num_nodes)
    return Data(
        x=ids[:, None].float(), y=ids, train_mask=ids % 2 == 0, edge_index=edge_index,
        edge_attr=torch.arange(edge_index.shape[1]) + 0.5,
    )  # fmt: skip


def odd_data():
    """Return a graph with self loops, a triple edge, and an edge in both directions. Nodes 5, 6 and 9 have no edge."""
    return small_data([(0, 0), (1, 2), (1, 2), (2, 1), (1, 2), (3, 4), (4, 4), (8, 7), (7, 3), (0, 1), (3, 8)], 10)


def no_edges():
    return small_data([], 6)


def hub(leaves=300):
    """Return a star: edges from the leaves to hub 0 and back."""
    return small_data([pair for v in range(1, leaves + 1) for pair in ((v, 0), (0, v))], leaves + 1)


def planted(num_classes=3, size=40, seed=0):
    """Return a graph in which the neighbours of a node predict its class better than its own features."""
    rng = np.random.default_rng(seed)
    n = num_classes * size
    label = np.arange(n) % num_classes
    chance = np.where(label[:, None] == label, 0.2, 0.01)
    edge_index = np.argwhere(np.triu(rng.random((n, n)) < chance, 1)).T
    x = np.eye(num_classes)[label] * 0.8 + rng.standard_normal((n, num_classes))
    return Data(
        x=torch.from_numpy(x).float(), y=torch.from_numpy(label), train_mask=torch.from_numpy(rng.random(n) < 0.5),
        edge_index=torch.from_numpy(np.concatenate([edge_index, edge_index[::-1]], axis=1)),
    )  # fmt: skip


def with_empty_part(data):
    attrs = {name: data[name].numpy() for name in ("x", "y", "train_mask")}
    return opened(
        store_of(
            data.edge_index.numpy(), data.num_nodes, 3, attrs=attrs, edge_attrs={"edge_attr": data.edge_attr.numpy()},
            assignment=np.arange(data.num_nodes) % 2 * 2,
        )
    )  # fmt: skip


@contextlib.contextmanager
def over_the_wire(data):
    """Yield a graph of four parts: 0 and 2 opened in this process, 1 and 3 behind a server."""
    theirs, mine = (parts_of(data, 4, only=parts) for parts in ((1, 3), (0, 2)))
    with serving(LocalGraph(theirs.store)) as server, client_of(server.endpoint) as client:
        yield Graph(mine.store, DistGraph(mine.access.local, {1: client}))


def assert_same_everywhere(make, data, **arguments):
    """Assert that ``make(graph, threads=…)`` gives equal batches from memory, from parts, with threads and from a
    server."""
    expected = list(make(data, **arguments))
    assert expected
    sources = [(parts_of(data, count), threads) for count, threads in ((1, 1), (2, 3), (4, 1))]
    with over_the_wire(data) as wired:
        for graph, threads in (*sources, (wired, 2)):
            for mine, other in zip_longest(make(graph, threads=threads, **arguments), expected):
                assert_same(mine, other, ignore=("num_nodes",))
    return expected


def triples(batch, attr="edge_attr"):
    """Return the edges as sorted (source, target, attribute). Nodes are positions in the batch."""
    values = batch[attr]
    return sorted(zip(*batch.edge_index.tolist(), (values[:, 0] if values.dim() > 1 else values).tolist(), strict=True))


def edges_between(data, nodes):
    members = set(nodes)
    return [e for e, (u, v) in enumerate(data.edge_index.T.tolist()) if u in members and v in members]
