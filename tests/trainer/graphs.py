"""Small ``Dataset`` objects of known structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType
from trainer.data.dataset import Dataset, EdgeData, NodeData

DEBIAN = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "debian"
NO_DEBIAN = f"the Debian data does not exist: {DEBIAN}"


def graph(
    edges: Sequence[tuple[int, int]] | np.ndarray,
    num_nodes: int,
    attrs: Mapping[str, np.ndarray] | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
    name: str = "small",
    edge_attrs: Mapping[str, np.ndarray] | None = None,
) -> Dataset:
    """Build a homogeneous dataset from (source, target) pairs. Default x: row v is (v, v/2, -v). Default y: v mod 3."""
    edge_index = np.asarray(edges, dtype=np.int64).reshape(-1, 2).T
    ids = np.arange(num_nodes)
    x = np.stack((ids, ids / 2, -ids), axis=1).astype(np.float32)
    chosen: dict[str, Any] = {"x": x, "y": ids % 3} if attrs is None else dict(attrs)
    seeds = {"train": ids[::-2], "val": ids[:1]} if splits is None else splits
    nodes = NodeData(
        num_nodes=num_nodes,
        attrs=chosen,
        splits={split: np.asarray(values, dtype=np.int64) for split, values in seeds.items()},
        num_classes=3,
    )
    edge_data = EdgeData(np.ascontiguousarray(edge_index), dict(edge_attrs or {}))
    return Dataset.homogeneous(name, nodes, edge_data, f"{name}-{num_nodes}-{edge_index.shape[1]}")


def ring(num_nodes: int) -> Dataset:
    """Return a directed ring with edges v -> v + 1."""
    return graph([(v, (v + 1) % num_nodes) for v in range(num_nodes)], num_nodes, name="ring")


def star(leaves: int) -> Dataset:
    """Return a star: leaves 1..n all point to node 0."""
    return graph([(v, 0) for v in range(1, leaves + 1)], leaves + 1, name="star")


def skewed(num_nodes: int, num_edges: int, seed: int = 0) -> Dataset:
    """Return a directed graph with skewed degrees, self loops and multi-edges."""
    rng = np.random.default_rng(seed)
    ends = (rng.random((num_edges, 2)) ** 3 * num_nodes).astype(np.int64)
    return graph(rng.permutation(num_nodes)[ends], num_nodes, name=f"skewed-{seed}")


def empty(num_nodes: int) -> Dataset:
    return graph([], num_nodes, name="empty")


def odd() -> Dataset:
    """Return a graph with self loops, a triple edge, an edge in both directions, and isolated nodes 5, 6 and 9."""
    edges = [(0, 0), (1, 2), (1, 2), (2, 1), (1, 2), (3, 4), (4, 4), (8, 7), (7, 3), (0, 1), (3, 8)]
    return graph(edges, 10, name="odd")


def blocks(num_blocks: int, size: int, seed: int = 0) -> Dataset:
    """Return dense blocks that are joined in a ring by single edges, so that the best cut is known."""
    rng = np.random.default_rng(seed)
    edges = [(b * size, (b + 1) % num_blocks * size) for b in range(num_blocks)]
    for b in range(num_blocks):
        edges += [(b * size + u, b * size + v) for u in range(size) for v in range(size) if u < v]
    order = rng.permutation(num_blocks * size)
    return graph(order[np.array(edges)], num_blocks * size, name="blocks")


def hetero(
    num_nodes: Mapping[str, int],
    edges: Mapping[EdgeType, Sequence[tuple[int, int]] | np.ndarray],
    edge_attrs: Mapping[EdgeType, Mapping[str, np.ndarray]] | None = None,
    name: str = "typed",
) -> Dataset:
    """Build a heterogeneous dataset. The nodes of each type have x, y and splits as in ``graph``."""
    nodes = {of: graph([], count).nodes[HOMO_NODE] for of, count in num_nodes.items()}
    typed = {
        of: graph(pairs, 0, {}, {}, edge_attrs=(edge_attrs or {}).get(of)).edges[HOMO_EDGE]
        for of, pairs in edges.items()
    }
    return Dataset(name, nodes, typed, f"{name}-{len(nodes)}-{len(typed)}", hetero=True)


def bipartite() -> Dataset:
    """Return a graph in which authors write papers and papers cite papers.

    Node type ``venue`` and relation ``written_by`` have no edges.
    """
    edges = {
        ("author", "writes", "paper"): [(0, 0), (0, 1), (1, 1), (2, 3), (3, 3), (3, 5), (3, 5)],
        ("paper", "cites", "paper"): [(1, 0), (2, 0), (2, 2), (5, 4), (4, 5)],
        ("paper", "written_by", "author"): [],
    }
    cites = {"edge_attr": np.arange(10, dtype=np.float32).reshape(5, 2)}
    return hetero({"author": 4, "paper": 6, "venue": 2}, edges, {("paper", "cites", "paper"): cites}, name="bipartite")
