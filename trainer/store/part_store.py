"""An opened partition folder with memory-mapped arrays."""

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
from trainer.store.manifest import AttrSpec, Manifest, endpoint_offsets, read_manifest
from trainer.store.part_files import PartFiles, distrusting
from trainer.store.read_ahead import fits_in_memory, read_at_random


@dataclass(frozen=True)
class PartitionBook:
    """Maps global ids to parts: part p owns the ids ``offsets[p] <= gid < offsets[p + 1]``."""

    offsets: Ids  #: int64 [num_parts + 1], ascending, first 0

    @classmethod
    def from_offsets(cls, offsets: Sequence[int]) -> PartitionBook:
        return cls(np.asarray(offsets, dtype=np.int64))

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def part_of(self, gids: Ids) -> Ids:
        """Return the part of each global id, int64, same shape."""
        return np.searchsorted(self.offsets, gids, side="right") - 1

    def range_of(self, part_id: int) -> tuple[int, int]:
        """Return the first global id of a part, and one past the last."""
        return int(self.offsets[part_id]), int(self.offsets[part_id + 1])


@dataclass(frozen=True)
class NodePart:
    start: int  #: first global id of the part
    orig_id: Array  #: int32|int64 [n], original ids, ascending
    attrs: Mapping[str, Array]  #: name -> [n, …]
    scales: Mapping[str, Array] = field(default_factory=dict)  #: name -> float32 [n, 1], of attributes stored as int8

    @property
    def num_nodes(self) -> int:
        return len(self.orig_id)


@dataclass(frozen=True)
class EdgePart:
    """The edges of one type into the nodes of one part (CSC: one row per target node).

    Edges within a row are in original order.
    """

    start: int  #: global id of the first edge of the part; slot s has the id start + s
    indptr: Array  #: int64 [n + 1], n = nodes of the target type in the part
    indices: Array  #: int32|int64 [e], global ids of sources
    orig_id: Array  #: int32|int64 [e], original edge ids
    attrs: Mapping[str, Array]  #: name -> [e, …]
    src_times: Mapping[str, Array]  #: time attribute of the source type -> int64 [e], the time of each edge's source
    scales: Mapping[str, Array] = field(default_factory=dict)  #: name -> float32 [e, 1], of attributes stored as int8
    #: int [m, 2], original ids of source and target of the edges whose *original* ids are this part's share
    #: (``endpoint_offsets``), most of which other parts own. None: not stored, or not opened (replicas).
    endpoints: Array | None = None

    @property
    def num_edges(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Part:
    part_id: int
    nodes: Mapping[NodeType, NodePart]
    edges: Mapping[EdgeType, EdgePart]

    def table(self, of: AnyType) -> NodePart | EdgePart:
        return self.nodes[of] if isinstance(of, str) else self.edges[of]


@dataclass(frozen=True)
class EndpointTable:
    """Key of a partition book in ``PartStore.books``.

    The book maps the original id of an edge to the part whose endpoints file stores the source and target of the edge.
    """

    edge_type: EdgeType

    def __repr__(self) -> str:
        return f"endpoints of {self.edge_type}"


BookKey = AnyType | EndpointTable


@dataclass(frozen=True)
class PartStore:
    """Some parts of one partition, opened read-only."""

    folder: Path  #: partition folder; only a name for messages when the parts are in memory or on other hosts
    manifest: Manifest
    parts: Mapping[int, Part]  #: part id -> part, for the parts of this host
    global_ids: Mapping[NodeType, Array]  #: [num_nodes], global id of each original id; no entry if they are equal
    splits: Mapping[tuple[NodeType, str], Ids]  #: (type, split) -> global ids, int64 [n], in the dataset's order
    graph_attrs: Mapping[str, Array] = field(default_factory=dict)  #: arrays that belong to the graph as a whole
    #: Topology "replicated": the other parts, without attributes of two or more dimensions.
    replicas: Mapping[int, Part] = field(default_factory=dict)
    files: tuple[str, ...] = ()  #: mapped files, relative to ``folder``
    #: The mapped files do not fit in memory: before rows are used, ``read_ahead`` reads their pages in parallel.
    larger_than_memory: bool = False

    @cached_property
    def topology(self) -> Mapping[int, Part]:
        """The parts whose edges, ids and 1-d attributes are on this host: ``parts`` and ``replicas``."""
        return dict(sorted({**self.replicas, **self.parts}.items()))

    @cached_property
    def whole_topology(self) -> bool:
        return len(self.topology) == self.manifest.num_parts

    @cached_property
    def books(self) -> Mapping[BookKey, PartitionBook]:
        """Partition books, which map ids to parts, of each node type, edge type and table of endpoints."""
        books: dict[BookKey, PartitionBook] = {}
        for nodes, node_spec in self.manifest.nodes.items():
            books[nodes] = PartitionBook.from_offsets(node_spec.offsets)
        for edges, edge_spec in self.manifest.edges.items():
            books[edges] = PartitionBook.from_offsets(edge_spec.offsets)
            cuts = endpoint_offsets(edge_spec.num_edges, self.manifest.num_parts)
            books[EndpointTable(edges)] = PartitionBook.from_offsets(cuts)
        return books

    def to_global(self, node_type: NodeType, orig_ids: Ids) -> Ids:
        """Convert original ids of nodes to global ids, int64 of the same shape. The ids must be in range."""
        table = self.global_ids.get(node_type)
        return orig_ids if table is None else table[orig_ids].astype(np.int64)

    def seeds(self, node_type: NodeType, split: str) -> Ids:
        """Return the global ids of a split's nodes, int64 [n]. Raises ``PartitionError`` for an unknown split."""
        if (node_type, split) not in self.splits:
            known = sorted(name for of, name in self.splits if of == node_type)
            raise PartitionError(f"{self.folder}: no split {split!r} of {node_type!r}; there are {known}")
        return self.splits[node_type, split]


def open_parts(
    folder: str | Path, part_ids: Sequence[int] | None = None, topology: Topology = "partitioned"
) -> PartStore:
    """Open parts of a partition folder.

    Ids and offsets are checked when a part is opened for the first time.

    Args:
        folder: partition folder.
        part_ids: parts to open; None: all.
        topology: "replicated" also opens edges, ids and 1-d attributes of the other parts.

    Raises:
        PartitionError: when the folder, the manifest, a part or a file is missing, or a file does not match the
            manifest.
    """
    root = Path(folder)
    with distrusting(root):
        manifest = read_manifest(root)
        wanted = range(manifest.num_parts) if part_ids is None else part_ids
        others = sorted(set(range(manifest.num_parts)) - set(wanted)) if topology == "replicated" else ()
        files = PartFiles(root, manifest)
        opener = PartOpener(files, manifest)
        parts = {part_id: opener.part(part_id, light=False) for part_id in wanted}
        replicas = {}
        for part_id in others:
            try:
                replicas[part_id] = opener.part(part_id, light=True)
            except PartitionError as error:
                raise PartitionError(
                    f"{error}\nreplicated topology needs the edges, ids and 1-d attributes of part {part_id} on this "
                    "host too; send them, or run with --topology partitioned"
                ) from error
        global_ids = opener.global_ids() if manifest.num_parts > 1 else {}
        splits, graph_attrs = opener.splits(), opener.graph_attrs()
        files.check_ranges()
    larger = not fits_in_memory(files.num_bytes)
    if larger:
        for part in (*parts.values(), *replicas.values()):
            for nodes in part.nodes.values():
                read_at_random((nodes.orig_id, *nodes.attrs.values(), *nodes.scales.values()))
            for edges in part.edges.values():
                read_at_random((edges.indptr, edges.indices, edges.orig_id))
                read_at_random((*edges.attrs.values(), *edges.src_times.values(), *edges.scales.values()))
                if edges.endpoints is not None:
                    read_at_random((edges.endpoints,))
    return PartStore(
        folder=root,
        manifest=manifest,
        parts=parts,
        global_ids=global_ids,
        splits=splits,
        graph_attrs=graph_attrs,
        replicas=replicas,
        files=tuple(files.opened),
        larger_than_memory=larger,
    )


@dataclass(frozen=True)
class PartOpener:
    """Opens the arrays of a partition folder: the names, dtypes and shapes of its files."""

    files: PartFiles
    manifest: Manifest

    def global_ids(self) -> dict[NodeType, Array]:
        return {
            of: self.files.ids(f"shared/nodes/{of}/global_id", spec.num_nodes, spec.num_nodes)
            for of, spec in self.manifest.nodes.items()
        }

    def splits(self) -> dict[tuple[NodeType, str], Ids]:
        return {
            (of, split): self.files.ids(f"shared/nodes/{of}/seeds/{split}", count, spec.num_nodes, np.dtype(np.int64))
            for of, spec in self.manifest.nodes.items()
            for split, count in spec.splits.items()
        }

    def graph_attrs(self) -> dict[str, Array]:
        attrs = self.manifest.graph_attrs
        return {name: self.files.array(f"shared/graph/{name}", spec.stored, spec.shape) for name, spec in attrs.items()}

    def part(self, part_id: int, *, light: bool) -> Part:
        num_parts, files = self.manifest.num_parts, self.files
        if not 0 <= part_id < num_parts:
            raise PartitionError(f"{files.root}: no part {part_id}; the folder has {num_parts} parts")
        nodes: dict[NodeType, NodePart] = {}
        for node_type, spec in self.manifest.nodes.items():
            top, count = f"part{part_id}/nodes/{node_type}", _count(spec.offsets, part_id)
            nodes[node_type] = NodePart(
                start=spec.offsets[part_id],
                orig_id=files.ids(f"{top}/orig_id", count, spec.num_nodes),
                attrs=self._attrs(top, spec.attrs, count, light),
                scales=self._scales(top, spec.attrs, count, light),
            )
        edges: dict[EdgeType, EdgePart] = {}
        for of, edge_spec in self.manifest.edges.items():
            top, count = f"part{part_id}/edges/{type_name(of)}", _count(edge_spec.offsets, part_id)
            sources, targets = self.manifest.nodes[of[0]], self.manifest.nodes[of[2]]
            int64 = np.dtype(np.int64)
            times = {name: files.array(f"{top}/src_times/{name}", int64, (count,)) for name in edge_spec.src_times}
            endpoints = None
            if not light:
                shape = (_count(endpoint_offsets(edge_spec.num_edges, num_parts), part_id), 2)
                endpoints = files.id_rows(f"{top}/endpoints", shape, [sources.num_nodes, targets.num_nodes])
            edges[of] = EdgePart(
                start=edge_spec.offsets[part_id],
                indptr=files.offsets(f"{top}/indptr", _count(targets.offsets, part_id), count),
                indices=files.ids(f"{top}/indices", count, sources.num_nodes),
                orig_id=files.ids(f"{top}/orig_id", count, edge_spec.num_edges),
                attrs=self._attrs(top, edge_spec.attrs, count, light),
                src_times=times,
                scales=self._scales(top, edge_spec.attrs, count, light),
                endpoints=endpoints,
            )
        return Part(part_id, nodes, edges)

    def _attrs(self, top: str, specs: Mapping[str, AttrSpec], count: int, light: bool) -> dict[str, Array]:
        return {
            name: self.files.array(f"{top}/attrs/{name}", spec.in_files, (count, *spec.shape[1:]))
            for name, spec in specs.items()
            if len(spec.shape) == 1 or not light
        }

    def _scales(self, top: str, specs: Mapping[str, AttrSpec], count: int, light: bool) -> dict[str, Array]:
        kept = [name for name, spec in specs.items() if spec.kept and not light]
        return {name: self.files.array(f"{top}/scales/{name}", np.dtype(np.float32), (count, 1)) for name in kept}


def _count(offsets: Sequence[int], part_id: int) -> int:
    return offsets[part_id + 1] - offsets[part_id]
