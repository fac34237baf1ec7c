"""Small graphs as torch_geometric data and as opened parts, and a comparison of batches."""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from partitions import random_graph, store_of, typed_store
from trainer.graph.open import Graph
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph

WRITES, CITES, REV = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "rev_writes", "author")
COUNTS = {"author": 40, "paper": 70, "venue": 5}


def homo_data(num_nodes=60, num_edges=260, seed=5):
    edge_index, _ = random_graph(seed, num_nodes, num_edges)
    rng = np.random.default_rng(seed + 1)
    return Data(
        x=torch.from_numpy(rng.standard_normal((num_nodes, 4)).astype(np.float32)),
        y=torch.from_numpy(rng.integers(0, 5, num_nodes)),
        image=torch.from_numpy(rng.integers(0, 255, (num_nodes, 2, 3)).astype(np.uint8)),
        flag=torch.from_numpy(rng.random(num_nodes) < 0.5),
        half=torch.from_numpy(rng.standard_normal((num_nodes, 2)).astype(np.float16)),
        time=torch.from_numpy(rng.integers(0, 50, num_nodes)),
        edge_index=torch.from_numpy(edge_index),
        edge_attr=torch.from_numpy(rng.standard_normal((num_edges, 3)).astype(np.float32)),
        edge_weight=torch.from_numpy(rng.random(num_edges).astype(np.float32)),
        edge_time=torch.from_numpy(rng.integers(0, 50, num_edges)),
        train_mask=torch.from_numpy(rng.random(num_nodes) < 0.6),
    )


def hetero_data(seed=6):
    rng = np.random.default_rng(seed)
    data = HeteroData()
    for of, count in COUNTS.items():
        data[of].num_nodes = count
    data["paper"].x = torch.from_numpy(rng.standard_normal((COUNTS["paper"], 4)).astype(np.float32))
    data["paper"].y = torch.from_numpy(rng.integers(0, 3, COUNTS["paper"]))
    data["paper"].train_mask = torch.from_numpy(rng.random(COUNTS["paper"]) < 0.5)
    data["venue"].x = torch.from_numpy(rng.standard_normal((COUNTS["venue"], 2)))
    for of in ("paper", "author"):
        data[of].time = torch.from_numpy(rng.integers(0, 50, COUNTS[of]))
    for of, edges in ((WRITES, 150), (CITES, 200), (REV, 120)):
        ends = [torch.from_numpy(rng.integers(0, COUNTS[end], edges)) for end in (of[0], of[2])]
        data[of].edge_index = torch.stack(ends)
        data[of].edge_time = torch.from_numpy(rng.integers(0, 50, edges))
        data[of].edge_weight = torch.from_numpy(rng.random(edges))
    data[CITES].edge_attr = torch.from_numpy(rng.standard_normal((200, 2)).astype(np.float32))
    return data


def parts_of(data, num_parts=1, **options):
    """Open ``data`` as in-memory parts, with random nodes in each part."""
    rng = np.random.default_rng(num_parts)
    if isinstance(data, Data):
        masks = {"train": np.flatnonzero(data.train_mask.numpy())}
        n, e = data.num_nodes, data.num_edges
        attrs = {k: v.numpy() for k, v in data.items() if k != "edge_index" and len(v) == n}
        edge_attrs = {k: v.numpy() for k, v in data.items() if k != "edge_index" and len(v) == e}
        store = typed_store(
            {"node": n}, {("node", "to", "node"): data.edge_index.numpy()}, num_parts, hetero=False,
            node_attrs={"node": attrs}, edge_attrs={("node", "to", "node"): edge_attrs},
            splits={("node", "train"): masks["train"]}, assignment={"node": rng.integers(0, num_parts, n)}, **options,
        )  # fmt: skip
        return opened(store)
    counts = {of: data[of].num_nodes for of in data.node_types}
    store = typed_store(
        counts, {of: data[of].edge_index.numpy() for of in data.edge_types}, num_parts,
        node_attrs={of: {k: v.numpy() for k, v in data[of].items() if k != "num_nodes"} for of in counts},
        edge_attrs={of: {k: v.numpy() for k, v in data[of].items() if k != "edge_index"} for of in data.edge_types},
        splits={("paper", "train"): np.flatnonzero(data["paper"].train_mask.numpy())},
        assignment={of: rng.integers(0, num_parts, n) for of, n in counts.items()}, **options,
    )  # fmt: skip
    return opened(store)


def opened(store):
    return Graph(store, DistGraph(LocalGraph(store), {}))


def plain_graph(num_parts=1, **options):
    edge_index, num_nodes = random_graph(5, 60, 260)
    return opened(store_of(edge_index, num_nodes, num_parts, **options))


def content(batch):
    """Return all values of a batch except ``blocks``, by (type, attribute)."""
    stores = [(store._key, store) for store in batch.stores]
    return {(of, key): value for of, store in stores for key, value in store.items() if key != "blocks"}


def assert_same(ours, theirs, ignore=()):
    """Assert equal attributes with equal values, dtypes and shapes. None counts as absent."""
    mine, others = ({k: v for k, v in content(b).items() if v is not None} for b in (ours, theirs))
    drop = {key for key in mine.keys() ^ others.keys() if key[1] in ignore}
    assert mine.keys() - drop == others.keys() - drop
    for key in others.keys() - drop:
        if isinstance(others[key], torch.Tensor):
            assert mine[key].dtype == others[key].dtype, key
            assert torch.equal(mine[key], others[key]), key
        else:
            assert mine[key] == others[key], key
