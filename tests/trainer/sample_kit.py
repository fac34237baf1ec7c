"""Test kit: random typed graphs, sampling settings and seeds."""

from __future__ import annotations

import dataclasses

import numpy as np

from plain_sampler import PlainGraph
from trainer.core.rng import batch_key
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.multi_hop import sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.types import SampleSettings, SeedSet, TimeRule

WRITES, CITES, HOLDS, LIKES = ("a", "writes", "p"), ("p", "cites", "p"), ("p", "holds", "a"), ("a", "likes", "p")
BARE = ("c", "none", "a")

KINDS = {
    "uniform": {},
    "replace": {"replace": True},
    "weighted": {"weight": "w"},
    "weighted-replace": {"weight": "w", "replace": True},
    "top": {"weight": "w", "top": True},
    "top-until": {"weight": "w", "top": True, "time": TimeRule("t", "edge")},
    "node-time": {"time": TimeRule("time", "node")},
    "node-time-last": {"time": TimeRule("time", "node", last=True)},
    "edge-time": {"time": TimeRule("t", "edge")},
    "edge-time-last": {"time": TimeRule("t", "edge", last=True)},
    "edge-time-replace": {"time": TimeRule("t", "edge"), "replace": True},
    "disjoint": {"disjoint": True},
}


def typed_graph(seed, num_nodes=(12, 15, 3), num_edges=60):
    """Return a random graph of three node types and five edge types.

    Edge type ``BARE`` has no edges; ``LIKES`` has no attributes.
    """
    rng = np.random.default_rng(seed)
    count = dict(zip("apc", num_nodes, strict=True))
    edges = {
        e: np.stack([rng.integers(0, count[e[0]], num_edges), rng.integers(0, count[e[2]], num_edges)])
        for e in (WRITES, CITES, HOLDS, LIKES)
    } | {BARE: np.empty((2, 0), np.int64)}
    return PlainGraph(
        count, edges,
        node_attrs={"p": {"time": rng.integers(0, 8, count["p"])}},
        edge_attrs={
            e: {
                "w": np.where(rng.random(num_edges) < 0.3, 0, rng.random(num_edges)).astype(dtype),
                "t": rng.integers(-3, 8, num_edges).astype(np.int32),
            }
            for e, dtype in ((WRITES, np.float32), (CITES, np.float64), (HOLDS, np.float32))
        },
    )  # fmt: skip


def random_settings(rng, edge_types, **more):
    hops = int(rng.integers(1, 4))
    fanouts = {e: tuple(int(f) for f in rng.choice([-1, 0, 1, 2, 3, 5], hops)) for e in edge_types}
    return SampleSettings(fanouts, edge_ids=True, **more)


def random_seeds(rng, graph, exclude=False):
    nodes = {of: rng.integers(0, graph.num_nodes[of], n) for of, n in (("p", 4), ("a", 2))}
    pairs = {}
    if exclude:
        for e in (WRITES, CITES):
            taken = rng.permutation(graph.edges[e].shape[1])[:25]
            pairs[e] = graph.edges[e][1][taken], graph.edges[e][0][taken]
    return SeedSet(
        nodes,
        trees={of: rng.integers(0, 1000, len(ids)) for of, ids in nodes.items()},
        times={of: rng.integers(-1, 8, len(ids)) for of, ids in nodes.items()},
        exclude=pairs,
    )


def to_global(store, seeds):
    exclude = {
        e: (store.to_global(e[2], targets), store.to_global(e[0], sources))
        for e, (targets, sources) in seeds.exclude.items()
    }
    nodes = {of: store.to_global(of, np.asarray(ids)) for of, ids in seeds.nodes.items()}
    return dataclasses.replace(seeds, nodes=nodes, exclude=exclude)


def sample(store, seeds, settings, key=7, tables=None):
    """Sample for seeds that are given as original ids."""
    tables = RelabelTables(store.manifest) if tables is None else tables
    return sample_multi_hop(LocalGraph(store), store.manifest, to_global(store, seeds), settings, key, tables)


def sample_homo(store, seeds, fanouts, key=7, tables=None, **more):
    """Sample a homogeneous graph, for seeds that are given as original ids."""
    settings = SampleSettings({HOMO_EDGE: tuple(fanouts)}, **more)
    return sample(store, SeedSet({HOMO_NODE: np.asarray(seeds, np.int64)}), settings, key, tables)


def orig_nodes(store, subgraph, of=HOMO_NODE):
    table = np.concatenate([part.nodes[of].orig_id for part in store.parts.values()])
    return table[subgraph.nodes[of].ids]


def orig_edges(store, subgraph, e=HOMO_EDGE):
    table = np.concatenate([part.edges[e].orig_id for part in store.parts.values()])
    return table[subgraph.edges[e].edge]


def names(store, subgraph, of):
    """Return (tree, original id) of every sampled node of type ``of``. The tree is None if sampling is not disjoint."""
    nodes = subgraph.nodes[of]
    trees = [None] * len(nodes.ids) if nodes.tree is None else nodes.tree.tolist()
    return list(zip(trees, orig_nodes(store, subgraph, of).tolist(), strict=True))


def some_key(step):
    return batch_key(3, 0, 0, step)
