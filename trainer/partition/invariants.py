"""What must hold between the arrays of a partition folder."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.edges import first_outside
from trainer.partition.kernels import (
    first_descent,
    first_other_gid,
    first_other_time,
    first_unordered_row,
    mark,
    new_bitset,
)
from trainer.store.manifest import AttrSpec, EdgeSpec, Manifest, NodeSpec


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one file."""

    path: str  #: relative to the folder, as in the manifest
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


Found = Generator[Finding, None, Array | None]  #: findings, then the array when it is of the kind expected


@dataclass(frozen=True)
class Invariants:
    """Checks of arrays against each other; files already found broken are left out."""

    root: Path
    manifest: Manifest
    part_ids: Sequence[int]
    broken: frozenset[str]  #: paths

    def check(self) -> Iterator[Finding]:
        for name, attr in self.manifest.graph_attrs.items():
            yield from self._array(f"shared/graph/{name}.npy", attr.stored, attr.shape)
        for node_type, nodes in self.manifest.nodes.items():
            yield from self._nodes_of(node_type, nodes)
        for edge_type, edges in self.manifest.edges.items():
            yield from self._edges_of(edge_type, edges)

    def _nodes_of(self, node_type: NodeType, spec: NodeSpec) -> Iterator[Finding]:
        shared = f"shared/nodes/{node_type}"
        for split, count in spec.splits.items():
            yield from self._ids(f"{shared}/seeds/{split}.npy", count, spec.num_nodes, np.dtype(np.int64))
        global_id, seen = None, new_bitset(spec.num_nodes)
        if self.manifest.num_parts > 1:
            global_id = yield from self._ids(f"{shared}/global_id.npy", spec.num_nodes, spec.num_nodes)
        for part_id in self.part_ids:
            owned, top = _count(spec, part_id), f"part{part_id}/nodes/{node_type}"
            yield from self._orig_ids(f"{top}/orig_id.npy", spec, part_id, global_id, seen)
            yield from self._attrs(top, spec.attrs, owned)

    def _attrs(self, top: str, attrs: Mapping[str, AttrSpec], rows: int) -> Iterator[Finding]:
        for name, attr in attrs.items():
            yield from self._array(f"{top}/attrs/{name}.npy", attr.in_files, (rows, *attr.shape[1:]))
            if attr.kept:
                path = f"{top}/scales/{name}.npy"
                scales = yield from self._array(path, np.dtype(np.float32), (rows, 1))
                if scales is not None and len(wrong := np.flatnonzero(~(scales[:, 0] >= 0) | np.isinf(scales[:, 0]))):
                    yield Finding(path, f"position {wrong[0]}: {scales[wrong[0], 0]} is no scale of a row")

    def _orig_ids(
        self, path: str, spec: NodeSpec, part_id: int, global_id: Array | None, seen: Array
    ) -> Iterator[Finding]:
        ids = yield from self._ids(path, _count(spec, part_id), spec.num_nodes)
        if ids is None:
            return
        if (at := int(first_descent(ids, True))) >= 0:
            yield Finding(path, f"position {at}: original ids do not ascend")
        elif (at := int(mark(ids, seen))) >= 0:
            yield Finding(path, f"position {at}: node {ids[at]} is in an earlier part too")
        elif global_id is not None and (at := int(first_other_gid(ids, global_id, spec.offsets[part_id]))) >= 0:
            gid = spec.offsets[part_id] + at
            yield Finding(
                path, f"position {at}: node {ids[at]} has global id {gid}, not {global_id[ids[at]]} as shared"
            )

    def _edges_of(self, edge_type: EdgeType, spec: EdgeSpec) -> Iterator[Finding]:
        seen = new_bitset(spec.num_edges)
        for part_id in self.part_ids:
            top = f"part{part_id}/edges/{type_name(edge_type)}"
            indptr = yield from self._indptr(f"{top}/indptr.npy", edge_type, part_id)
            yield from self._edge_ids(f"{top}/orig_id.npy", spec, part_id, indptr, seen)
            yield from self._attrs(top, spec.attrs, _count(spec, part_id))
            sources = self.manifest.nodes[edge_type[0]].num_nodes
            indices = yield from self._ids(f"{top}/indices.npy", _count(spec, part_id), sources)
            for name in spec.src_times:
                yield from self._times(f"{top}/src_times/{name}.npy", name, edge_type, indices, _count(spec, part_id))

    def _indptr(self, path: str, edge_type: EdgeType, part_id: int) -> Found:
        rows = _count(self.manifest.nodes[edge_type[2]], part_id)
        indptr = yield from self._array(path, np.dtype(np.int64), (rows + 1,))
        if indptr is None:
            return None
        edges = _count(self.manifest.edges[edge_type], part_id)
        if indptr[0] != 0:
            yield Finding(path, f"begins with {indptr[0]}, expected 0")
        elif (at := int(first_descent(indptr, False))) >= 0:
            yield Finding(path, f"position {at}: {indptr[at]} is below the value before it")
        elif indptr[-1] != edges:
            yield Finding(path, f"ends with {indptr[-1]}, but the manifest's offsets give the part {edges} edges")
        else:
            return indptr
        return None

    def _edge_ids(self, path: str, spec: EdgeSpec, part_id: int, indptr: Ids | None, seen: Array) -> Iterator[Finding]:
        ids = yield from self._ids(path, _count(spec, part_id), spec.num_edges)
        if ids is None:
            return
        if indptr is not None and (at := int(first_unordered_row(indptr, ids))) >= 0:
            yield Finding(path, f"position {at}: edge ids do not ascend inside their row")
        elif (at := int(mark(ids, seen))) >= 0:
            yield Finding(path, f"position {at}: edge {ids[at]} appears twice")

    def _times(self, path: str, name: str, edge_type: EdgeType, indices: Array | None, edges: int) -> Iterator[Finding]:
        """The source's time beside every edge whose source is in a part that is checked too."""
        times = yield from self._array(path, np.dtype(np.int64), (edges,))
        if times is None or indices is None:
            return
        spec = self.manifest.nodes[edge_type[0]]
        for part_id in self.part_ids:
            values = self._map(f"part{part_id}/nodes/{edge_type[0]}/attrs/{name}.npy")
            if values is None or values.shape != (_count(spec, part_id),):
                continue
            at = int(first_other_time(indices, times, spec.offsets[part_id], values))
            if at >= 0:
                value = values[indices[at] - spec.offsets[part_id]]
                yield Finding(path, f"position {at}: {times[at]}, but {name!r} of source {indices[at]} is {value}")
                return

    def _array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Found:
        array = self._map(path)
        if array is None or (array.dtype, array.shape) == (dtype, shape):
            return array
        yield Finding(path, f"holds {array.dtype.name} {list(array.shape)}, expected {dtype.name} {list(shape)}")
        return None

    def _ids(self, path: str, count: int, limit: int, dtype: np.dtype[Any] | None = None) -> Found:
        """Ids ``0 <= id < limit``, [count], of any signed integer type or the given one."""
        ids = self._map(path)
        if ids is None:
            return None
        if ids.shape != (count,) or (ids.dtype.kind != "i" if dtype is None else ids.dtype != dtype):
            kind = "integers" if dtype is None else dtype.name
            yield Finding(path, f"holds {ids.dtype.name} {list(ids.shape)}, expected {kind} [{count}]")
        elif (at := int(first_outside(ids, limit))) >= 0:
            yield Finding(path, f"position {at}: {ids[at]} is outside 0 to {limit - 1}")
        else:
            return ids
        return None

    def _map(self, path: str) -> Array | None:
        if path in self.broken:
            return None
        array: Array = np.load(self.root / path, mmap_mode="r", allow_pickle=False)
        return array.view(np.ndarray)


def _count(spec: NodeSpec | EdgeSpec, part_id: int) -> int:
    """Nodes or edges of one part."""
    return spec.offsets[part_id + 1] - spec.offsets[part_id]
