"""Test kit: small partitioned graphs in memory, built with numpy without ``trainer.partition``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.core.schema import HOMO_EDGE, HOMO_NODE, type_name
from trainer.store.manifest import AttrSpec, EdgeSpec, Manifest, NodeSpec, write_manifest
from trainer.store.npy import write_npy
from trainer.store.part_store import EdgePart, NodePart, Part, PartStore


def random_graph(seed, num_nodes, num_edges):
    """Return random edges, int64 [2, num_edges], and ``num_nodes``."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, num_nodes, (2, num_edges)), num_nodes


def store_of(edge_index, num_nodes, num_parts=1, *, attrs=None, edge_attrs=None, assignment=None, **options):
    """Return the ``PartStore`` of a homogeneous graph. Node v is in part ``assignment[v]``, default v % num_parts."""
    return typed_store(
        {HOMO_NODE: num_nodes}, {HOMO_EDGE: edge_index}, num_parts,
        node_attrs={HOMO_NODE: attrs or {}}, edge_attrs={HOMO_EDGE: edge_attrs or {}},
        assignment=None if assignment is None else {HOMO_NODE: assignment}, hetero=False, **options,
    )  # fmt: skip


def typed_store(
    num_nodes, edges, num_parts=1, *, node_attrs=None, edge_attrs=None, splits=None, assignment=None,
    time_attrs=("time",), only=None, hetero=True,
):  # fmt: skip
    """Return the ``PartStore`` of a graph with several types.

    num_nodes: by node type. edges: [2, E] by edge type. node_attrs, edge_attrs: by type and name. splits: original ids
    by (type, split). assignment: part of each node by type, by default id % num_parts. time_attrs: names of the node
    attributes that are times. only: parts to open.
    """
    node_attrs, edge_attrs, splits = node_attrs or {}, edge_attrs or {}, splits or {}
    owner = {of: np.arange(n) % num_parts for of, n in num_nodes.items()}
    owner |= {of: np.asarray(parts) for of, parts in (assignment or {}).items()}
    gid, offsets, owned = _relabelled(owner, num_parts)
    times = {e: [a for a in time_attrs if a in node_attrs.get(e[0], {})] for e in edges}
    rows = {e: [_rows_of(index, owned[e[2]][p]) for p in range(num_parts)] for e, index in edges.items()}
    edge_offsets = {e: np.concatenate([[0], np.cumsum([sum(map(len, r)) for r in rows[e]])]) for e in edges}

    def build_nodes(of, p):
        mine = owned[of][p]
        attrs = {name: values[mine] for name, values in node_attrs.get(of, {}).items()}
        return NodePart(int(offsets[of][p]), mine.astype(np.int64), attrs)

    def build_edges(e, p):
        index = edges[e]
        ids = np.concatenate([np.empty(0, np.int64), *rows[e][p]]).astype(np.int64)
        src = index[0][ids]
        return EdgePart(
            start=int(edge_offsets[e][p]),
            indptr=np.concatenate([[0], np.cumsum([len(row) for row in rows[e][p]])]).astype(np.int64),
            indices=gid[e[0]][src].astype(np.int32),
            orig_id=ids,
            attrs={name: values[ids] for name, values in edge_attrs.get(e, {}).items()},
            src_times={name: node_attrs[e[0]][name][src].astype(np.int64) for name in times[e]},
            endpoints=np.array_split(index.T, _cuts(index, num_parts))[p].astype(np.int32),
        )

    manifest = Manifest(
        dataset="test", fingerprint="", num_parts=num_parts, algorithm="given", seed=0, hetero=hetero,
        nodes={of: _node_spec(of, n, offsets[of], node_attrs.get(of, {}), splits) for of, n in num_nodes.items()},
        edges={
            e: EdgeSpec(
                index.shape[1], _ints(edge_offsets[e]), _specs(edge_attrs.get(e, {})), tuple(times[e]), 0.0
            )
            for e, index in edges.items()
        },
        edge_cut=0.0, balance=1.0, graph_attrs={}, files=(),
    )  # fmt: skip
    parts = {
        p: Part(p, {of: build_nodes(of, p) for of in num_nodes}, {e: build_edges(e, p) for e in edges})
        for p in (range(num_parts) if only is None else only)
    }
    seeds = {key: gid[key[0]][np.asarray(ids, np.int64)] for key, ids in splits.items()}
    return PartStore(Path("in memory"), manifest, parts, gid if num_parts > 1 else {}, seeds)


def _relabelled(owner, num_parts):
    gid, offsets, owned = {}, {}, {}
    for of, parts in owner.items():
        order = np.argsort(parts, kind="stable")
        gid[of] = np.empty(len(parts), np.int64)
        gid[of][order] = np.arange(len(parts))
        offsets[of] = np.concatenate([[0], np.cumsum(np.bincount(parts, minlength=num_parts))])
        owned[of] = np.split(order, offsets[of][1:-1])
    return gid, offsets, owned


def _node_spec(of, num_nodes, offsets, attrs, splits):
    sizes = {split: len(ids) for (t, split), ids in splits.items() if t == of}
    return NodeSpec(num_nodes, _ints(offsets), _specs(attrs), sizes, _classes(attrs))


def _rows_of(edge_index, owned):
    """Return, for each node in ``owned``, the ids of its in-edges in ascending order."""
    by_target = np.argsort(edge_index[1], kind="stable")
    bounds = np.searchsorted(edge_index[1][by_target], [owned, owned + 1])
    return [by_target[begin:end] for begin, end in bounds.T]


def _cuts(edge_index, num_parts):
    return [edge_index.shape[1] * part // num_parts for part in range(1, num_parts)]


def _ints(values):
    return tuple(int(value) for value in values)


def _specs(attrs):
    return {name: AttrSpec(values.dtype.name, values.shape) for name, values in attrs.items()}


def _classes(attrs):
    y = attrs.get("y")
    return int(y.max()) + 1 if y is not None and y.dtype.kind in "iu" and y.ndim == 1 and len(y) else 0


def write_store(folder, store):
    entries = []

    def save(path, array):
        entries.append(write_npy(folder, path, array.dtype, array.shape, [array]))

    for of, table in store.global_ids.items():
        save(f"shared/nodes/{of}/global_id.npy", table)
    for (of, split), ids in store.splits.items():
        save(f"shared/nodes/{of}/seeds/{split}.npy", ids)
    for part in store.parts.values():
        for of, nodes in part.nodes.items():
            own = f"part{part.part_id}/nodes/{of}"
            save(f"{own}/orig_id.npy", nodes.orig_id)
            for name, values in nodes.attrs.items():
                save(f"{own}/attrs/{name}.npy", values)
        for of, edges in part.edges.items():
            own = f"part{part.part_id}/edges/{type_name(of)}"
            for name in ("indptr", "indices", "orig_id"):
                save(f"{own}/{name}.npy", getattr(edges, name))
            if edges.endpoints is not None:
                save(f"{own}/endpoints.npy", edges.endpoints)
            for group in ("attrs", "src_times"):
                for name, values in getattr(edges, group).items():
                    save(f"{own}/{group}/{name}.npy", values)
    write_manifest(folder, replace(store.manifest, files=tuple(entries)))
