"""Extreme graphs for tests of samplers: without edges, complete, or with all edges at one node."""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from load_kit import opened
from partitions import typed_store

TO, BACK, NONE = ("user", "to", "item"), ("item", "back", "user"), ("item", "none", "item")


def homo(edges, num_nodes):
    edges = torch.tensor(edges, dtype=torch.int64).view(-1, 2).t().contiguous()
    count = edges.shape[1]
    return Data(
        x=torch.arange(num_nodes * 2.0).view(num_nodes, 2),
        y=torch.arange(num_nodes) % 3,
        time=torch.arange(num_nodes) % 5,
        edge_index=edges,
        edge_weight=(torch.arange(count) % 4).double(),
        edge_time=torch.arange(count) % 7,
        edge_attr=torch.arange(count * 1.0).view(count, 1),
    )


def hetero(edges, counts):
    """Return heterogeneous data.

    edges: (source, target) pairs by edge type. counts: number of nodes by type.
    """
    data = HeteroData()
    for of, count in counts.items():
        data[of].num_nodes = count
        data[of].x = torch.arange(count * 2.0).view(count, 2)
        data[of].time = torch.arange(count) % 5
    for of, pairs in edges.items():
        data[of].edge_index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t().contiguous()
        data[of].edge_weight = (torch.arange(len(pairs)) % 4).double()
        data[of].edge_time = torch.arange(len(pairs)) % 7
    return data


def hub(size):
    """Return edges (source, target): from nodes 1 to ``size`` to node 0, and from node 0 to nodes 0, 1 and 2."""
    return [(i, 0) for i in range(1, size + 1)] + [(0, 1), (0, 2), (0, 0)]


GRAPHS = {
    "no edges": lambda: homo([], 6),
    "one node": lambda: homo([], 1),
    "isolated nodes": lambda: homo([(0, 1), (1, 0), (2, 0)], 12),
    "self loops": lambda: homo([(i, i) for i in range(6)] * 2, 6),
    "multi-edges": lambda: homo([(0, 1)] * 20 + [(1, 0)] * 20 + [(2, 1)] * 15, 5),
    "complete": lambda: homo([(i, j) for i in range(9) for j in range(9)], 9),
    "hub": lambda: homo(hub(300), 301),
    "as many edges as nodes": lambda: homo([(i, (i * 3 + 1) % 7) for i in range(7)], 7),
    "hetero, no edges": lambda: hetero({TO: [], BACK: []}, {"user": 4, "item": 5}),
    "hetero, a type without edges": lambda: hetero(
        {TO: [(0, 1), (2, 1), (2, 2)], NONE: []}, {"user": 4, "item": 5, "bare": 3}
    ),
    "hetero, hub and multi-edges": lambda: hetero(
        {TO: [(i % 40, 0) for i in range(90)], BACK: [(0, i) for i in range(40)], NONE: [(1, 1)] * 9},
        {"user": 40, "item": 3},
    ),
}


def seeds_of(data):
    """Return (loader arguments, number of node seeds). The arguments are node seeds, links and times of the links."""
    count = data.num_nodes if isinstance(data, Data) else data["item"].num_nodes
    ids = torch.tensor([*range(min(count, 9)), 0, 0, count - 1, 0])
    src = data.num_nodes if isinstance(data, Data) else data["user"].num_nodes
    links = torch.stack([torch.tensor([0, 0, src - 1, 0, min(2, src - 1)]), torch.tensor([0, 0, 0, count - 1, 0])])
    typed = isinstance(data, HeteroData)
    return {
        "input_nodes": ("item", ids) if typed else ids,
        "edge_label_index": (TO, links) if typed else links,
        "edge_label_time": torch.tensor([6, 0, 3, 4, 2]),
    }, len(ids)


def cut(data, num_parts, only=None, empty=()):
    """Partition ``data`` and open the parts ``only`` (None: all). Parts in ``empty`` get no nodes."""
    full = [part for part in range(num_parts) if part not in empty]
    nodes = {"node": data} if isinstance(data, Data) else {of: data[of] for of in data.node_types}
    edges = {("node", "to", "node"): data} if isinstance(data, Data) else {of: data[of] for of in data.edge_types}
    counts = {of: store.num_nodes for of, store in nodes.items()}
    node_attrs = {of: {k: s[k].numpy() for k in ("x", "y", "time") if k in s} for of, s in nodes.items()}
    edge_attrs = {of: {k: v.numpy() for k, v in s.items() if k.startswith("edge_") and k != "edge_index"}
                  for of, s in edges.items()}  # fmt: skip
    return opened(typed_store(
        counts, {of: s.edge_index.numpy() for of, s in edges.items()}, num_parts, hetero=isinstance(data, HeteroData),
        node_attrs=node_attrs, edge_attrs=edge_attrs, only=only,
        splits={(of, "train"): np.r_[: min(n, 5), 0, 0, n - 1] for of, n in counts.items()},
        assignment={of: np.array(full)[np.arange(n) % len(full)] for of, n in counts.items()},
    ))  # fmt: skip
