"""Computes and prints the sizes, edge cut and balance of a partition folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.schema import NodeType, type_name
from trainer.store.manifest import AttrSpec, EdgeSpec, Manifest, NodeSpec
from trainer.store.part_store import Part, open_parts

_EDGES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class NodeFigures:
    num_nodes: int
    balance: float  #: nodes of the largest part / mean nodes of a part
    num_classes: int  #: 0 without class labels
    splits: dict[str, int]  #: name -> number of seeds
    attrs: dict[str, str]  #: name -> dtype and shape


@dataclass(frozen=True)
class EdgeFigures:
    num_edges: int
    balance: float  #: edges of the largest part / mean edges of a part
    edge_cut: float  #: share of these edges whose ends are in different parts, 0 to 1
    attrs: dict[str, str]  #: name -> dtype and shape
    src_times: tuple[str, ...]  #: time attributes of the source type that are stored per edge


@dataclass(frozen=True)
class PartFigures:
    """Numbers of nodes, edges and seeds of one part. An edge is counted in the part of its target."""

    part_id: int
    nodes: int
    edges: int
    cut_edges: int  #: edges whose source belongs to another part
    halo: int  #: distinct nodes of other parts that are sources of these edges
    seeds: dict[str, int]  #: split -> number of seeds; the key is `train`, or `paper/train` in a heterogeneous graph
    bytes: int  #: size of the part's files
    nodes_of: dict[str, int]  #: node type -> nodes
    edges_of: dict[str, int]  #: edge type -> edges


@dataclass(frozen=True)
class Description:
    """Sizes, edge cut and balance of a partition folder, with details for each type and part."""

    folder: str
    dataset: str
    algorithm: str
    seed: int
    options: dict[str, Any]  #: further options of the partition method
    hetero: bool
    num_nodes: int
    num_edges: int
    edge_cut: float  #: share of all edges whose ends are in different parts, 0 to 1
    balance: float  #: nodes of the largest part / mean nodes of a part
    shared_bytes: int  #: size of the files that all parts share
    graph_attrs: dict[str, str]  #: name -> dtype and shape
    nodes: dict[str, NodeFigures]  #: by node type
    edges: dict[str, EdgeFigures]  #: by edge type
    parts: tuple[PartFigures, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(folder: str | Path) -> Description:
    """Compute the sizes and quality of a partition. Raises ``PartitionError`` when a file is missing or damaged."""
    store = open_parts(folder)
    manifest = store.manifest
    seeds = {}
    for (of, split), gids in store.splits.items():
        name = f"{of}/{split}" if manifest.hetero else split
        seeds[name] = np.bincount(store.books[of].part_of(gids), minlength=manifest.num_parts)
    parts = []
    for part in store.parts.values():
        outside = [_outside(part, manifest, of) for of in manifest.nodes]
        parts.append(
            PartFigures(
                part_id=part.part_id,
                nodes=sum(nodes.num_nodes for nodes in part.nodes.values()),
                edges=sum(edges.num_edges for edges in part.edges.values()),
                cut_edges=sum(cut for cut, _ in outside),
                halo=sum(halo for _, halo in outside),
                seeds={split: int(counts[part.part_id]) for split, counts in seeds.items()},
                bytes=sum(entry.bytes for entry in manifest.files_of(part.part_id)),
                nodes_of={of: nodes.num_nodes for of, nodes in part.nodes.items()},
                edges_of={type_name(of): edges.num_edges for of, edges in part.edges.items()},
            )
        )
    return Description(
        folder=str(folder),
        dataset=manifest.dataset,
        algorithm=manifest.algorithm,
        seed=manifest.seed,
        options=dict(manifest.options),
        hetero=manifest.hetero,
        num_nodes=manifest.num_nodes,
        num_edges=manifest.num_edges,
        edge_cut=manifest.edge_cut,
        balance=manifest.balance,
        shared_bytes=sum(entry.bytes for entry in manifest.files_of(None)),
        graph_attrs=_attr_texts(manifest.graph_attrs),
        nodes={
            of: NodeFigures(
                spec.num_nodes, _balance(spec), spec.num_classes, dict(spec.splits), _attr_texts(spec.attrs)
            )
            for of, spec in manifest.nodes.items()
        },
        edges={
            type_name(of): EdgeFigures(
                spec.num_edges, _balance(spec), spec.edge_cut, _attr_texts(spec.attrs), spec.src_times
            )
            for of, spec in manifest.edges.items()
        },
        parts=tuple(parts),
    )


def _balance(spec: NodeSpec | EdgeSpec) -> float:
    sizes = np.diff(spec.offsets)
    return float(sizes.max() / sizes.mean()) if spec.offsets[-1] else 1.0


def _attr_texts(attrs: Mapping[str, AttrSpec]) -> dict[str, str]:
    kept = {name: f" as {spec.kept}" if spec.kept else "" for name, spec in attrs.items()}
    return {name: f"{spec.dtype}{kept[name]} {list(spec.shape)}" for name, spec in attrs.items()}


def _outside(part: Part, manifest: Manifest, source: NodeType) -> tuple[int, int]:
    """Return the number of edges from nodes of other parts, and of these nodes. One byte per node of the type."""
    low, high = manifest.nodes[source].offsets[part.part_id : part.part_id + 2]
    cut, seen = 0, np.zeros(manifest.nodes[source].num_nodes, bool)
    for indices in [edges.indices for of, edges in part.edges.items() if of[0] == source]:
        for first in range(0, len(indices), _EDGES_AT_ONCE):
            ids = indices[first : first + _EDGES_AT_ONCE]
            outside = ids[(ids < low) | (ids >= high)]
            cut += len(outside)
            seen[outside] = True
    return cut, int(np.count_nonzero(seen))


def render(description: Description) -> str:
    """Render a description as text: a summary, then tables of node types, edge types and parts."""
    d = description
    options = "".join(f", {name} {value}" for name, value in d.options.items())
    head = [
        f"{d.folder}: {d.dataset}, {len(d.parts)} parts by {d.algorithm} (seed {d.seed}{options})",
        f"{d.num_nodes:,} nodes, {d.num_edges:,} edges; "
        f"cut {d.edge_cut:.2%} of edges, balance {d.balance:.3f} (largest / mean nodes)",
    ]
    if d.graph_attrs:
        head.append(f"attributes of the graph: {_listed(d.graph_attrs)}")
    nodes = [
        [of, f"{f.num_nodes:,}", f"{f.balance:.3f}", str(f.num_classes), _listed(f.attrs)] for of, f in d.nodes.items()
    ]
    edges = [
        [of, f"{f.num_edges:,}", f"{f.balance:.3f}", f"{f.edge_cut:.2%}", _listed(f.attrs)] for of, f in d.edges.items()
    ]
    parts = [
        [
            str(p.part_id),
            *(f"{n:,}" for n in (p.nodes, p.edges, p.cut_edges, p.halo, *p.seeds.values())),
            f"{p.bytes / 1e6:,.1f}",
        ]
        for p in d.parts
    ]
    titles = ["part", "nodes", "edges", "cut edges", "halo nodes", *d.parts[0].seeds, "MB"]
    return "\n".join([
        *head, "",
        *_table([["nodes", "count", "balance", "classes", "attributes"], *nodes]), "",
        *_table([["edges", "count", "balance", "cut", "attributes"], *edges]), "",
        *_table([titles, *parts]),
    ])  # fmt: skip


def _listed(attrs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {spec}" for name, spec in attrs.items()) or "none"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    last = len(rows[0]) - 1
    named = {0, last} if rows[0][last] == "attributes" else set()
    columns = [
        [cell.ljust(width) if at in named else cell.rjust(width) for cell in column]
        for at, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
