"""An opened partition folder: everything memory-mapped, nothing copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import PartitionError
from trainer.core.remote_settings import Topology
from trainer.core.schema import AnyType, EdgeType, NodeType, type_name
from trainer.store.manifest import AttrSpec, Manifest, read_manifest
from trainer.store.partition_book import PartitionBook


@dataclass(frozen=True)
class NodePart:
    """The nodes of one type that one part owns."""

    start: int  #: first owned global id
    orig_id: Array  #: [n] original ids, ascending
    attrs: Mapping[str, Array]  #: name -> [n, …]
    scales: Mapping[str, Array] = field(default_factory=dict)  #: float32 [n, 1] of attributes kept as int8

    @property
    def num_nodes(self) -> int:
        return len(self.orig_id)


@dataclass(frozen=True)
class EdgePart:
    """The in-edges by one edge type of the nodes one part owns (CSC: row = target node).

    Row order is original edge order, whatever the partition.
    """

    start: int  #: global id of the first edge here; slot s has start + s
    indptr: Array  #: int64 [n + 1], n = owned nodes of the target type
    indices: Array  #: int32|int64 [e] global ids of sources
    orig_id: Array  #: int32|int64 [e] original edge ids
    attrs: Mapping[str, Array]  #: name -> [e, …]
    src_times: Mapping[str, Array]  #: time attribute of the source type -> int64 [e]: the source node's
    scales: Mapping[str, Array] = field(default_factory=dict)  #: float32 [e, 1] of attributes kept as int8

    @property
    def num_edges(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Part:
    """What one part owns."""

    part_id: int
    nodes: Mapping[NodeType, NodePart]
    edges: Mapping[EdgeType, EdgePart]


@dataclass(frozen=True)
class PartStore:
    """Some parts of one partition, opened read-only."""

    folder: Path  #: for messages only, when the parts are in memory
    manifest: Manifest
    parts: Mapping[int, Part]
    global_ids: Mapping[NodeType, Array]  #: [num_nodes] global id of each original id; absent where they are equal
    splits: Mapping[tuple[NodeType, str], Ids]  #: (type, split) -> global ids, int64 [n], in the dataset's order
    graph_attrs: Mapping[str, Array] = field(default_factory=dict)
    #: Of the other parts, what all hosts have where topology is replicated: all but attributes of several dimensions.
    replicas: Mapping[int, Part] = field(default_factory=dict)

    @cached_property
    def topology(self) -> Mapping[int, Part]:
        """The parts whose edges, ids and 1-d attributes are here."""
        return dict(sorted({**self.replicas, **self.parts}.items()))

    @cached_property
    def whole_topology(self) -> bool:
        """Whether the edges of all parts are here."""
        return len(self.topology) == self.manifest.num_parts

    @cached_property
    def books(self) -> Mapping[AnyType, PartitionBook]:
        """Who owns which nodes and edges."""
        books: dict[AnyType, PartitionBook] = {}
        for nodes, node_spec in self.manifest.nodes.items():
            books[nodes] = PartitionBook.from_offsets(node_spec.offsets)
        for edges, edge_spec in self.manifest.edges.items():
            books[edges] = PartitionBook.from_offsets(edge_spec.offsets)
        return books

    def to_global(self, node_type: NodeType, orig_ids: Ids) -> Ids:
        """Global ids of original ids, int64, same shape; the ids must lie in range."""
        table = self.global_ids.get(node_type)
        return orig_ids if table is None else table[orig_ids].astype(np.int64)

    def seeds(self, node_type: NodeType, split: str) -> Ids:
        """Global ids of a split's nodes, int64 [n]. Raises ``PartitionError`` for a split that is not there."""
        if (node_type, split) not in self.splits:
            known = sorted(name for of, name in self.splits if of == node_type)
            raise PartitionError(f"{self.folder}: no split {split!r} of {node_type!r}; there are {known}")
        return self.splits[node_type, split]


def open_parts(
    folder: str | Path, part_ids: Sequence[int] | None = None, topology: Topology = "partitioned"
) -> PartStore:
    """Open ``part_ids`` (default: all) of a partition folder; of the others what ``topology`` asks for.

    Raises ``PartitionError`` when the folder, its manifest, a part or a file of it is missing.
    """
    root = Path(folder)
    manifest = read_manifest(root)
    wanted = range(manifest.num_parts) if part_ids is None else part_ids
    shared = root / "shared"
    others = sorted(set(range(manifest.num_parts)) - set(wanted)) if topology == "replicated" else ()
    return PartStore(
        folder=root,
        manifest=manifest,
        parts={part_id: _open_part(root, manifest, part_id) for part_id in wanted},
        global_ids={
            of: _map(shared / "nodes" / of / "global_id.npy") for of in manifest.nodes if manifest.num_parts > 1
        },
        splits={
            (of, split): _map(shared / "nodes" / of / "seeds" / f"{split}.npy")
            for of, spec in manifest.nodes.items()
            for split in spec.splits
        },
        graph_attrs={name: _map(shared / "graph" / f"{name}.npy") for name in manifest.graph_attrs},
        replicas={part_id: _open_replica(root, manifest, part_id) for part_id in others},
    )


def _open_replica(root: Path, manifest: Manifest, part_id: int) -> Part:
    try:
        return _open_part(root, manifest, part_id, light=True)
    except PartitionError as error:
        raise PartitionError(
            f"{error}\nreplicated topology needs the edges, ids and 1-d attributes of part {part_id} here too;"
            " send them, or run with --topology partitioned"
        ) from error


def _open_part(root: Path, manifest: Manifest, part_id: int, *, light: bool = False) -> Part:
    """``light``: without attributes of several dimensions."""
    if not 0 <= part_id < manifest.num_parts:
        raise PartitionError(f"{root}: no part {part_id}; the folder has {manifest.num_parts} parts")
    own = root / f"part{part_id}"
    nodes = {of: _open_nodes(own / "nodes" / of, manifest, of, part_id, light) for of in manifest.nodes}
    edges = {of: _open_edges(own / "edges" / type_name(of), manifest, of, part_id, light) for of in manifest.edges}
    return Part(part_id, nodes, edges)


def _open_nodes(folder: Path, manifest: Manifest, node_type: NodeType, part_id: int, light: bool) -> NodePart:
    spec = manifest.nodes[node_type]
    attrs = _open_attrs(folder / "attrs", spec.attrs, light)
    scales = _open_scales(folder, spec.attrs, light)
    return NodePart(spec.offsets[part_id], _map(folder / "orig_id.npy"), attrs, scales)


def _open_edges(folder: Path, manifest: Manifest, edge_type: EdgeType, part_id: int, light: bool) -> EdgePart:
    spec = manifest.edges[edge_type]
    return EdgePart(
        start=spec.offsets[part_id],
        indptr=_map(folder / "indptr.npy"),
        indices=_map(folder / "indices.npy"),
        orig_id=_map(folder / "orig_id.npy"),
        attrs=_open_attrs(folder / "attrs", spec.attrs, light),
        src_times={name: _map(folder / "src_times" / f"{name}.npy") for name in spec.src_times},
        scales=_open_scales(folder, spec.attrs, light),
    )


def _open_attrs(folder: Path, specs: Mapping[str, AttrSpec], light: bool) -> dict[str, Array]:
    return {name: _map(folder / f"{name}.npy") for name, spec in specs.items() if len(spec.shape) == 1 or not light}


def _open_scales(folder: Path, specs: Mapping[str, AttrSpec], light: bool) -> dict[str, Array]:
    kept = [name for name, spec in specs.items() if spec.kept and not light]
    return {name: _map(folder / "scales" / f"{name}.npy") for name in kept}


def _map(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise PartitionError(f"{path} is missing; send or make the part again (partition verify lists all)") from None
    except (ValueError, OSError, EOFError) as error:
        raise PartitionError(
            f"{path} cannot be read; send or make the part again (partition verify lists all that is wrong): {error}"
        ) from error
    return array.view(np.ndarray)  # kernels are compiled for plain arrays
