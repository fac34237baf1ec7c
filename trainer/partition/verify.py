"""Checks every digest, shape and invariant of a partition folder."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.edges import first_outside
from trainer.partition.folder import files_below, is_note
from trainer.partition.verify_endpoints import EndpointSums
from trainer.store.digest_check import sha256_of
from trainer.store.manifest import (
    AttrSpec,
    EdgeSpec,
    FileEntry,
    Manifest,
    NodeSpec,
    endpoint_offsets,
    read_manifest,
)
from trainer.store.part_files import map_array


def new_bitset(size: int) -> npt.NDArray[np.uint64]:
    """Return an empty bit set for the ids 0 to ``size - 1``: uint64 [⌈size / 64⌉]."""
    return np.zeros((size + 63) // 64, np.uint64)


@njit()
def mark(ids: Array, seen: Array) -> int:
    """Set the bits of ``ids`` in the bit array ``seen``, up to the first id whose bit is set already.

    Returns the position of that id in ``ids``, or -1 if there is none.
    """
    for position in range(len(ids)):
        word, bit = ids[position] >> 6, np.uint64(1) << np.uint64(ids[position] & 63)
        if seen[word] & bit:
            return position
        seen[word] |= bit
    return -1


@njit()
def mark_outside(ids: Array, low: int, high: int, seen: Array) -> tuple[int, int]:
    """Set in the bit array ``seen`` the bit of each id that is not in ``low <= id < high``.

    Returns the number of these ids, and how many of their bits were not set before.
    """
    outside = fresh = 0
    for position in range(len(ids)):
        if ids[position] < low or ids[position] >= high:
            outside += 1
            word, bit = ids[position] >> 6, np.uint64(1) << np.uint64(ids[position] & 63)
            fresh += not seen[word] & bit
            seen[word] |= bit
    return outside, fresh


@njit()
def first_descent(values: Array, strict: bool) -> int:
    """Return the first position whose value is less than the previous value, or -1.

    With ``strict``, also a position whose value equals the previous value.
    """
    for position in range(1, len(values)):
        if values[position] < values[position - 1] or (strict and values[position] == values[position - 1]):
            return position
    return -1


@njit()
def first_unordered_row(indptr: Array, orig_id: Array) -> int:
    """Return the first position in ``orig_id`` where edge ids do not ascend within a row, or -1."""
    for row in range(len(indptr) - 1):
        for slot in range(indptr[row] + 1, indptr[row + 1]):
            if orig_id[slot] <= orig_id[slot - 1]:
                return slot
    return -1


@njit()
def first_gid_mismatch(orig_id: Array, global_id: Array, start: int) -> int:
    """Return the first row of a part whose node does not have the global id ``start + row``, or -1.

    ``orig_id``: original id of each row's node. ``global_id``: global id of each original id.
    """
    for row in range(len(orig_id)):
        if global_id[orig_id[row]] != start + row:
            return row
    return -1


@njit()
def first_time_mismatch(indices: Array, times: Array, start: int, values: Array) -> int:
    """Return the position of the first edge whose entry in ``times`` is not its source node's time, or -1.

    ``indices``: global id of each edge's source. ``values``: times of the nodes with global ids from ``start`` on.
    Edges from other sources are skipped.
    """
    for slot in range(len(indices)):
        row = indices[slot] - start
        if 0 <= row < len(values) and values[row] != times[slot]:
            return slot
    return -1


@dataclass(frozen=True)
class Finding:
    path: str  #: relative to the folder, as in the manifest
    problem: str  #: message for the user

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


Found = Generator[Finding, None, Array | None]  #: yields findings, returns the array if it has the expected type


@dataclass(frozen=True)
class Invariants:
    root: Path
    manifest: Manifest
    part_ids: Sequence[int]  #: parts to check
    broken: frozenset[str]  #: paths of files that are known to be broken and are skipped

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
                    yield Finding(path, f"position {wrong[0]}: {scales[wrong[0], 0]} is not a valid scale of a row")

    def _orig_ids(
        self, path: str, spec: NodeSpec, part_id: int, global_id: Array | None, seen: Array
    ) -> Iterator[Finding]:
        ids = yield from self._ids(path, _count(spec, part_id), spec.num_nodes)
        if ids is None:
            return
        if (at := int(first_descent(ids, True))) >= 0:
            yield Finding(path, f"position {at}: original ids do not ascend")
        elif (at := int(mark(ids, seen))) >= 0:
            yield Finding(path, f"position {at}: node {ids[at]} is also in an earlier part")
        elif global_id is not None and (at := int(first_gid_mismatch(ids, global_id, spec.offsets[part_id]))) >= 0:
            gid = spec.offsets[part_id] + at
            yield Finding(
                path,
                f"position {at}: node {ids[at]} has global id {gid}, but {global_id[ids[at]]} in shared global_id.npy",
            )

    def _edges_of(self, edge_type: EdgeType, spec: EdgeSpec) -> Iterator[Finding]:
        seen, sums, complete = new_bitset(spec.num_edges), EndpointSums(), spec.endpoints
        for part_id in self.part_ids:
            top = f"part{part_id}/edges/{type_name(edge_type)}"
            indptr = yield from self._indptr(f"{top}/indptr.npy", edge_type, part_id)
            yield from self._edge_ids(f"{top}/orig_id.npy", spec, part_id, indptr, seen)
            yield from self._attrs(top, spec.attrs, _count(spec, part_id))
            sources = self.manifest.nodes[edge_type[0]].num_nodes
            indices = yield from self._ids(f"{top}/indices.npy", _count(spec, part_id), sources)
            for name in spec.src_times:
                yield from self._times(f"{top}/src_times/{name}.npy", name, edge_type, indices, _count(spec, part_id))
            if spec.endpoints:
                added = yield from self._endpoints(f"{top}/endpoints.npy", edge_type, part_id, indptr, indices, sums)
                complete = complete and added
        if complete and len(self.part_ids) == self.manifest.num_parts and not sums.equal:
            path = f"part{self.part_ids[0]}/edges/{type_name(edge_type)}/endpoints.npy"
            yield Finding(path, "the endpoints in the files of all parts are not those of the edges")

    def _endpoints(
        self, path: str, edge_type: EdgeType, part_id: int, indptr: Array | None, indices: Array | None,
        sums: EndpointSums,
    ) -> Generator[Finding, None, bool]:  # fmt: skip
        ends = self._map(path)
        if ends is None:
            return False
        begin, end = endpoint_offsets(self.manifest.edges[edge_type].num_edges, self.manifest.num_parts)[part_id:][:2]
        if ends.shape != (end - begin, 2) or ends.dtype not in (np.int32, np.int64):
            shape = [end - begin, 2]
            yield Finding(path, f"holds {ends.dtype.name} {list(ends.shape)}, expected int32 or int64 {shape}")
            return False
        for side, of in enumerate((edge_type[0], edge_type[2])):
            size = self.manifest.nodes[of].num_nodes
            if (at := int(first_outside(ends[:, side], size))) >= 0:
                yield Finding(path, f"row {at}: {ends[at, side]} is outside 0 to {size - 1}")
                return False
        orig_id = self._map(str(Path(path).with_name("orig_id.npy")))
        src_gid, dst_gid = self._global_ids(edge_type[0]), self._global_ids(edge_type[2])
        if indptr is None or indices is None or src_gid is None or dst_gid is None:
            return False
        if orig_id is None or orig_id.shape != indices.shape:
            return False
        sums.add_edges(indptr, indices, orig_id, self.manifest.nodes[edge_type[2]].offsets[part_id])
        sums.add_endpoints(ends, begin, src_gid, dst_gid)
        return True

    def _global_ids(self, of: NodeType) -> Array | None:
        num_nodes = self.manifest.nodes[of].num_nodes
        if self.manifest.num_parts == 1:
            return np.empty(0, np.int64)
        table = self._map(f"shared/nodes/{of}/global_id.npy")
        return None if table is None or table.shape != (num_nodes,) else table

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
        times = yield from self._array(path, np.dtype(np.int64), (edges,))
        if times is None or indices is None:
            return
        spec = self.manifest.nodes[edge_type[0]]
        for part_id in self.part_ids:
            values = self._map(f"part{part_id}/nodes/{edge_type[0]}/attrs/{name}.npy")
            if values is None or values.shape != (_count(spec, part_id),):
                continue
            at = int(first_time_mismatch(indices, times, spec.offsets[part_id], values))
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
        """Return the ids in the file ``path``, [count]. If the file is invalid, yield a finding and return None.

        The ids must be in ``0 <= id < limit`` and of ``dtype`` (None: any signed integer type).
        """
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
        return map_array(self.root / path)


def _count(spec: NodeSpec | EdgeSpec, part_id: int) -> int:
    return spec.offsets[part_id + 1] - spec.offsets[part_id]


_READERS = 2


def verify_partition(folder: str | Path, part_ids: Sequence[int] | None = None, digests: bool = True) -> list[Finding]:
    """Return all problems of a partition folder. The list is empty if the folder is sound.

    Memory: one bit per node and edge, and memory-mapped files.

    Args:
        folder: partition folder.
        part_ids: parts to check; None: all. Shared files are always checked. Missing nodes and edges are found only if
            all parts are checked.
        digests: whether to read every file and compare its sha256 with the manifest.

    Raises:
        PartitionError: when the manifest cannot be read, or a part does not exist.
    """
    root, manifest = Path(folder), read_manifest(folder)
    wanted = sorted(set(range(manifest.num_parts) if part_ids is None else part_ids))
    for part_id in wanted:
        if not 0 <= part_id < manifest.num_parts:
            raise PartitionError(f"{root}: no part {part_id}; the folder has {manifest.num_parts} parts")
    tops = (None, *wanted)
    entries = [entry for top in tops for entry in manifest.files_of(top)]
    findings = [*_listing(root, manifest, tops), *_file_findings(root, entries, digests)]
    broken = frozenset(finding.path for finding in findings)
    return [*findings, *Invariants(root, manifest, wanted, broken).check()]


def _listing(root: Path, manifest: Manifest, tops: Iterable[int | None]) -> Iterator[Finding]:
    """Compare the files that this partition should have, the files in the manifest, and the files on disk.

    ``tops``: folders to check: part ids, and None for ``shared/``.
    """
    for top in tops:
        needed = [f"{path}.npy" for path in (_shared_files(manifest) if top is None else _part_files(manifest, top))]
        listed = {entry.path for entry in manifest.files_of(top)}
        yield from (Finding(path, "not listed in the manifest") for path in needed if path not in listed)
        for path in sorted(listed - set(needed)):
            yield Finding(path, "listed in the manifest, but does not belong to any node or edge type")
        for path in sorted(_found(root, "shared" if top is None else f"part{top}") - listed - set(needed)):
            yield Finding(path, "is not a file of this partition; move it away")


def _found(root: Path, top: str) -> set[str]:
    return {name for name in files_below(root, root / top) if not is_note(name)}


def _shared_files(manifest: Manifest) -> Iterator[str]:
    yield from (f"shared/graph/{name}" for name in manifest.graph_attrs)
    for node_type, spec in manifest.nodes.items():
        if manifest.num_parts > 1:
            yield f"shared/nodes/{node_type}/global_id"
        yield from (f"shared/nodes/{node_type}/seeds/{split}" for split in spec.splits)


def _part_files(manifest: Manifest, part_id: int) -> Iterator[str]:
    for node_type, nodes in manifest.nodes.items():
        top = f"part{part_id}/nodes/{node_type}"
        yield f"{top}/orig_id"
        yield from _attr_files(top, nodes.attrs)
    for edge_type, edges in manifest.edges.items():
        top = f"part{part_id}/edges/{type_name(edge_type)}"
        yield from (f"{top}/{name}" for name in ("indptr", "indices", "orig_id"))
        yield from _attr_files(top, edges.attrs)
        yield from (f"{top}/src_times/{name}" for name in edges.src_times)
        if edges.endpoints:
            yield f"{top}/endpoints"


def _attr_files(top: str, attrs: Mapping[str, AttrSpec]) -> Iterator[str]:
    yield from (f"{top}/attrs/{name}" for name in attrs)
    yield from (f"{top}/scales/{name}" for name, spec in attrs.items() if spec.kept)


def _file_findings(root: Path, entries: Sequence[FileEntry], digests: bool) -> list[Finding]:
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda entry: _file_problem(root, entry, digests), entries)
        return [Finding(entry.path, problem) for entry, problem in zip(entries, problems, strict=True) if problem]


def _file_problem(root: Path, entry: FileEntry, digests: bool) -> str | None:
    path = root / entry.path
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{size} bytes, the manifest says {entry.bytes}"
        if digests and sha256_of(path) != entry.sha256:
            return f"content does not match its sha256 {entry.sha256[:12]}…: damaged or changed"
        array = map_array(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    except PartitionError as error:
        return str(error).removeprefix(f"{path} ")
    if (array.dtype.name, array.shape) != (entry.dtype, entry.shape):
        return f"holds {array.dtype.name} {list(array.shape)}, the manifest says {entry.dtype} {list(entry.shape)}"
    return None
