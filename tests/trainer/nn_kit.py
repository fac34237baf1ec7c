"""Blocks and typed batches for tests of models, built from edge lists in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch_geometric.data import HeteroData

from trainer.core.batch import Block, HeteroBatch
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.nn.graph_facts import GraphFacts

#: Authors write papers, papers cite papers, papers have topics, and boards point to topics.
WRITES, CITES, HAS, WROTE, ON = (
    ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "has", "topic"),
    ("paper", "by", "author"), ("board", "on", "topic"),
)  # fmt: skip
NUM_NODES = {"paper": 30, "author": 20, "topic": 6, "board": 3}
DIMS = {"paper": 7, "topic": 4, "board": 5}  #: authors have no features


@dataclass(frozen=True)
class Config:
    model: str = "sage"
    hidden: int = 16
    heads: int = 4
    output_heads: int | None = None
    activation: str = "relu"
    dropout: float = 0.3
    input_dropout: float = 0.0
    attention_dropout: float = 0.0
    fanouts: tuple[int, ...] = (15, 10, 5)
    layers: int | None = None
    max_tokens: int = 128
    seed: int = 0
    precision: str = "float32"


def homogeneous(in_dim=5, num_classes=4):
    return GraphFacts(False, HOMO_NODE, (HOMO_NODE,), (HOMO_EDGE,), {HOMO_NODE: in_dim}, num_classes)


def whole_graph_block(num_nodes, edge_index):
    """Return a block in which every node is a target with all of its in-edges."""
    order = torch.argsort(edge_index[1], stable=True)
    counts = torch.bincount(edge_index[1], minlength=num_nodes)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return Block(indptr, edge_index[0][order].int(), num_nodes)


def typed_edges(seed=0, num_nodes=None, per_type=90):
    """Return random edges of five types, int64 [2, e] each, including multi-edges and self loops."""
    rng, counts = np.random.default_rng(seed), num_nodes or NUM_NODES
    ends = {of: (counts[of[0]], counts[of[2]]) for of in (WRITES, CITES, HAS, WROTE, ON)}
    return {of: np.stack([rng.integers(0, n, per_type) for n in size]) for of, size in ends.items()}


def typed_batch(edges, seeds, fanouts, num_nodes=None, *, key=77, rng=None, target="paper", dims=None):
    """Sample a ``HeteroBatch`` around ``seeds``. Fanout -1 takes all neighbours."""
    num_nodes, rng = num_nodes or NUM_NODES, rng or np.random.default_rng(1)
    known = {of: list(seeds) if of == target else [] for of in num_nodes}
    counts, hops = {of: [len(ids)] for of, ids in known.items()}, []
    for fanout in fanouts:
        place = {of: {v: i for i, v in enumerate(ids)} for of, ids in known.items()}
        targets = {of: list(ids) for of, ids in known.items()}
        rows = {of: _rows(of, index, targets[of[2]], fanout, known, place, rng) for of, index in edges.items()}
        for of, ids in known.items():
            counts[of].append(len(ids))
        hops.append({of: _block(row, len(known[of[0]])) for of, row in rows.items()})
    n_id = {of: torch.tensor(ids, dtype=torch.int64) for of, ids in known.items()}
    features = {of: node_rows(of, num_nodes[of], dim) for of, dim in (dims or DIMS).items()}
    blocks = tuple({of: _widened(block, counts[of[0]][hop + 1]) for of, block in layer.items()}
                   for hop, layer in reversed(list(enumerate(hops))))  # fmt: skip
    return HeteroBatch(
        step=0, key=key, num_seeds=len(seeds), global_seeds=len(seeds), target=target, n_id=n_id,
        x={of: x[n_id[of]] for of, x in features.items()}, y=torch.zeros(len(seeds), dtype=torch.int64),
        input_id=torch.arange(len(seeds)), blocks=blocks, num_nodes={of: tuple(c) for of, c in counts.items()},
    )  # fmt: skip


def pyg_batch(edges, seeds, fanouts, num_nodes=None, *, target="paper", dims=None, rng=None):
    """Sample a ``HeteroData`` as torch_geometric's loader does. ``edge_attr`` [e, 3] is random."""
    num_nodes, rng = num_nodes or NUM_NODES, rng or np.random.default_rng(1)
    dims = dict.fromkeys(num_nodes, 4) if dims is None else dims
    known = {of: list(seeds) if of == target else [] for of in num_nodes}
    nodes, ends = {of: [len(ids)] for of, ids in known.items()}, {of: [] for of in edges}
    begin = dict.fromkeys(num_nodes, 0)
    for fanout in fanouts:
        place = {of: {v: i for i, v in enumerate(ids)} for of, ids in known.items()}
        asked = {of: (begin[of], list(ids[begin[of] :])) for of, ids in known.items()}
        begin = {of: len(ids) for of, ids in known.items()}
        for of, index in edges.items():
            first, targets = asked[of[2]]
            rows = _rows(of, index, targets, fanout, known, place, rng)
            ends[of].append([(u, first + i) for i, row in enumerate(rows) for u in row])
        for of, ids in known.items():
            nodes[of].append(len(ids) - begin[of])
    data = HeteroData()
    for of, ids in known.items():
        data[of].x = node_rows(of, num_nodes[of], dims[of])[torch.tensor(ids, dtype=torch.int64)]
        data[of].num_sampled_nodes = nodes[of]
    for of, hops in ends.items():
        pairs = torch.tensor([pair for hop in hops for pair in hop], dtype=torch.int64)
        data[of].edge_index = pairs.reshape(-1, 2).t().contiguous()
        data[of].num_sampled_edges = [len(hop) for hop in hops]
        data[of].edge_attr = torch.randn(len(pairs), 3, generator=torch.Generator().manual_seed(3))
    data[target].batch_size = len(seeds)
    return data


def node_rows(of, count, dim):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(len(of)))


def _rows(of, index, targets, fanout, known, place, rng):
    rows = []
    for v in targets:
        sources = index[0][index[1] == v]
        if 0 <= fanout < len(sources):
            sources = rng.permutation(sources)[:fanout]
        for u in sources.tolist():
            if u not in place[of[0]]:
                place[of[0]][u] = len(known[of[0]])
                known[of[0]].append(u)
        rows.append([place[of[0]][u] for u in sources.tolist()])
    return rows


def _block(rows, num_src):
    indptr = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int32)
    return Block(indptr, torch.tensor([u for row in rows for u in row], dtype=torch.int32), num_src)


def _widened(block, num_src):
    # all edge types of a hop share the sources that they found together
    return Block(block.indptr, block.indices, num_src)
