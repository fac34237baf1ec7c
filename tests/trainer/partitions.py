"""Small partitioned graphs for tests, built in memory by plain numpy, apart from ``trainer.partition``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.partition.book import PartitionBook
from trainer.partition.format import AttrSpec, Manifest
from trainer.store.part import Part, PartStore


def random_graph(seed, num_nodes, num_edges):
    """Edges drawn at random: self loops and multi-edges included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_nodes, (2, num_edges)), num_nodes


def store_of(edge_index, num_nodes, num_parts=1, *, attrs=None, only=None, assignment=None):
    """``PartStore`` of a graph; node v goes to part ``assignment[v]``, by default v % num_parts."""
    attrs = attrs or {}
    owner = np.arange(num_nodes) % num_parts if assignment is None else np.asarray(assignment)
    order = np.argsort(owner, kind="stable")
    gid = np.empty(num_nodes, np.int64)
    gid[order] = np.arange(num_nodes)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_parts))])
    parts = {
        p: build_part(p, order[offsets[p] : offsets[p + 1]], offsets[p], gid, edge_index, attrs)
        for p in (range(num_parts) if only is None else only)
    }
    specs = {name: AttrSpec(values.dtype.name, values.shape) for name, values in attrs.items()}
    manifest = Manifest(
        dataset="test", fingerprint="", num_parts=num_parts, algorithm="given", seed=0, num_nodes=num_nodes,
        num_edges=edge_index.shape[1], num_classes=0, offsets=tuple(offsets.tolist()), edge_cut=0.0, balance=1.0,
        attrs=specs, splits={}, files=(),
    )  # fmt: skip
    return PartStore(Path("in memory"), manifest, PartitionBook.from_offsets(offsets), parts)


def build_part(part_id, owned, start, gid, edge_index, attrs):
    """One part: the in-edges of ``owned`` (original ids), each row in original edge order."""
    by_target = np.argsort(edge_index[1], kind="stable")
    bounds = np.searchsorted(edge_index[1][by_target], [owned, owned + 1])
    rows = [by_target[begin:end] for begin, end in bounds.T]
    edges = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
    return Part(
        part_id=part_id,
        start=int(start),
        orig_id=owned.astype(np.int64),
        indptr=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        indices=gid[edge_index[0][edges]].astype(np.int32),
        edge_id=edges,
        attrs={name: values[owned] for name, values in attrs.items()},
    )
