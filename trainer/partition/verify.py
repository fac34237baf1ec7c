"""Checking a partition folder: every digest, shape and invariant of the format."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.arrays import Array
from trainer.data.edges import first_outside
from trainer.errors import PartitionError
from trainer.partition.format import FileEntry, Manifest, read_manifest
from trainer.partition.kernels import first_descent, first_unordered_row, mark, new_bitset

_BLOCK = 4 << 20
_READERS = 2


@dataclass(frozen=True)
class Finding:
    """One thing wrong with one file."""

    path: str  #: relative to the folder, as in the manifest
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def verify_partition(folder: str | Path, part_ids: Sequence[int] | None = None, digests: bool = True) -> list[Finding]:
    """Everything wrong with the folder; an empty list when it is sound.

    ``part_ids`` limits the check to these parts and the shared files; that every node and edge is there is
    only known when all parts are checked. Memory: one bit a node and an edge, besides mapped files.
    Raises ``PartitionError`` when there is no readable manifest, or no such part.
    """
    root, manifest = Path(folder), read_manifest(folder)
    wanted = sorted(set(range(manifest.num_parts) if part_ids is None else part_ids))
    for part_id in wanted:
        if not 0 <= part_id < manifest.num_parts:
            raise PartitionError(f"{root}: no part {part_id}; the folder has {manifest.num_parts} parts")
    entries = [entry for part_id in (None, *wanted) for entry in manifest.files_of(part_id)]
    findings = [*_unlisted(manifest, wanted), *_file_findings(root, entries, digests)]
    broken = {finding.path for finding in findings}
    return [*findings, *_Invariants(root, manifest, broken).check(wanted)]


def _unlisted(manifest: Manifest, part_ids: Iterable[int]) -> list[Finding]:
    """Files the format asks for that the manifest does not list."""
    listed = {entry.path for entry in manifest.files}
    needed = [f"shared/seeds/{split}.npy" for split in manifest.splits]
    for part_id in part_ids:
        needed += [f"part{part_id}/nodes/{name}.npy" for name in ("orig_id", *manifest.attrs)]
        needed += [f"part{part_id}/edges/{name}.npy" for name in ("indptr", "indices", "edge_id")]
    return [Finding(path, "not listed in the manifest") for path in needed if path not in listed]


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
        if digests and _sha256(path) != entry.sha256:
            return f"content does not match its sha256 {entry.sha256[:12]}…: damaged or changed"
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    if (array.dtype.name, array.shape) != (entry.dtype, entry.shape):
        return f"holds {array.dtype.name} {list(array.shape)}, the manifest says {entry.dtype} {list(entry.shape)}"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class _Invariants:
    """What must hold between arrays; files already found broken are left out."""

    def __init__(self, root: Path, manifest: Manifest, broken: set[str]) -> None:
        self._root, self._manifest, self._broken = root, manifest, broken
        self._nodes_seen = new_bitset(manifest.num_nodes)
        self._edges_seen = new_bitset(manifest.num_edges)

    def check(self, part_ids: Sequence[int]) -> Iterator[Finding]:
        before = len(self._broken)
        edges = 0
        for split, count in self._manifest.splits.items():
            yield from self._seeds(f"shared/seeds/{split}.npy", count)
        for part_id in part_ids:
            yield from self._nodes(part_id)
            yield from self._attrs(part_id)
            edges += yield from self._edges(part_id)
        whole = len(part_ids) == self._manifest.num_parts and not before
        if whole and edges != self._manifest.num_edges:
            yield Finding("manifest.json", f"num_edges is {self._manifest.num_edges}, the parts hold {edges}")

    def _map(self, path: str) -> Array | None:
        if path in self._broken:
            return None
        array: Array = np.load(self._root / path, mmap_mode="r", allow_pickle=False)
        return array.view(np.ndarray)

    def _seeds(self, path: str, count: int) -> Iterator[Finding]:
        seeds = self._map(path)
        if seeds is None:
            return
        if seeds.dtype != np.int64 or seeds.shape != (count,):
            yield Finding(path, f"holds {seeds.dtype.name} {list(seeds.shape)}, expected int64 [{count}]")
        elif (at := int(first_outside(seeds, self._manifest.num_nodes))) >= 0:
            yield Finding(path, f"position {at}: {seeds[at]} is no global id (0 to {self._manifest.num_nodes - 1})")

    def _nodes(self, part_id: int) -> Iterator[Finding]:
        path = f"part{part_id}/nodes/orig_id.npy"
        ids = self._map(path)
        if ids is None:
            return
        owned = self._owned(part_id)
        if ids.shape != (owned,) or ids.dtype.kind != "i":
            yield Finding(path, f"holds {ids.dtype.name} {list(ids.shape)}, expected integers [{owned}]")
        elif (at := int(first_outside(ids, self._manifest.num_nodes))) >= 0:
            yield Finding(path, f"position {at}: {ids[at]} is no node (0 to {self._manifest.num_nodes - 1})")
        elif (at := int(first_descent(ids, True))) >= 0:
            yield Finding(path, f"position {at}: original ids do not ascend")
        elif (at := int(mark(ids, self._nodes_seen))) >= 0:
            yield Finding(path, f"position {at}: node {ids[at]} is in an earlier part too")

    def _attrs(self, part_id: int) -> Iterator[Finding]:
        for name, spec in self._manifest.attrs.items():
            path = f"part{part_id}/nodes/{name}.npy"
            values = self._map(path)
            expected = (self._owned(part_id), *spec.shape[1:])
            if values is not None and (values.dtype.name, values.shape) != (spec.dtype, expected):
                yield Finding(
                    path, f"holds {values.dtype.name} {list(values.shape)}, expected {spec.dtype} {list(expected)}"
                )

    def _edges(self, part_id: int) -> Generator[Finding, None, int]:
        """Findings of one part's edges; returns how many edges it holds."""
        names = ("indptr", "indices", "edge_id")
        paths = [f"part{part_id}/edges/{name}.npy" for name in names]
        indptr, indices, edge_id = (self._map(path) for path in paths)
        if indptr is None:
            return 0
        problem = _indptr_problem(indptr, self._owned(part_id))
        if problem:
            yield Finding(paths[0], problem)
            return 0
        for path, values, limit in (
            (paths[1], indices, self._manifest.num_nodes),
            (paths[2], edge_id, self._manifest.num_edges),
        ):
            if values is not None and (problem := _ids_problem(values, int(indptr[-1]), limit)):
                yield Finding(path, problem)
                return 0
        if edge_id is not None:
            yield from self._edge_ids(paths[2], indptr, edge_id)
        return int(indptr[-1])

    def _edge_ids(self, path: str, indptr: Array, edge_id: Array) -> Iterator[Finding]:
        if (at := int(first_unordered_row(indptr, edge_id))) >= 0:
            yield Finding(path, f"position {at}: edge ids do not ascend inside their row")
        elif (at := int(mark(edge_id, self._edges_seen))) >= 0:
            yield Finding(path, f"position {at}: edge {edge_id[at]} appears twice")

    def _owned(self, part_id: int) -> int:
        return self._manifest.offsets[part_id + 1] - self._manifest.offsets[part_id]


def _indptr_problem(indptr: Array, owned: int) -> str | None:
    if indptr.dtype != np.int64 or indptr.shape != (owned + 1,):
        return f"holds {indptr.dtype.name} {list(indptr.shape)}, expected int64 [{owned + 1}]"
    if indptr[0] != 0:
        return f"begins with {indptr[0]}, expected 0"
    at = int(first_descent(indptr, False))
    return f"position {at}: {indptr[at]} is below the value before it" if at >= 0 else None


def _ids_problem(values: Array, count: int, limit: int) -> str | None:
    if values.shape != (count,) or values.dtype.kind != "i":
        return f"holds {values.dtype.name} {list(values.shape)}, expected integers [{count}] (the end of indptr)"
    at = int(first_outside(values, limit))
    return f"position {at}: {values[at]} is outside 0 to {limit - 1}" if at >= 0 else None
