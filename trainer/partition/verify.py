"""Checks the digest, dtype, shape and range of every array of a partition folder."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import PartitionError
from trainer.core.schema import type_name
from trainer.data.edges import first_outside
from trainer.partition.folder import files_below, is_note
from trainer.store.digest_check import sha256_of
from trainer.store.manifest import (
    AttrSpec,
    FileEntry,
    Manifest,
    endpoint_offsets,
    read_manifest,
)
from trainer.store.part_files import map_array


@dataclass(frozen=True)
class Finding:
    path: str  #: relative to the folder, as in the manifest
    problem: str  #: message for the user

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class _Contents:
    """Dtype, shape and range of the arrays of a partition folder, from its manifest alone."""

    root: Path
    manifest: Manifest
    part_ids: Sequence[int]  #: parts to check
    broken: frozenset[str]  #: paths of files that are known to be broken and are skipped

    def check(self) -> Iterator[Finding]:
        manifest = self.manifest
        for name, attr in manifest.graph_attrs.items():
            yield from self._array(f"shared/graph/{name}.npy", attr.stored, attr.shape)
        for node_type, nodes in manifest.nodes.items():
            shared, count = f"shared/nodes/{node_type}", nodes.num_nodes
            for split, seeds in nodes.splits.items():
                yield from self._ids(f"{shared}/seeds/{split}.npy", (seeds,), count, np.dtype(np.int64))
            if manifest.num_parts > 1:
                yield from self._ids(f"{shared}/global_id.npy", (count,), count)
            for part_id in self.part_ids:
                top, owned = f"part{part_id}/nodes/{node_type}", _count(nodes.offsets, part_id)
                yield from self._ids(f"{top}/orig_id.npy", (owned,), count)
                yield from self._attrs(top, nodes.attrs, owned)
        for edge_type, edges in manifest.edges.items():
            sources, targets = (manifest.nodes[edge_type[side]] for side in (0, 2))
            offsets = endpoint_offsets(edges.num_edges, manifest.num_parts)
            for part_id in self.part_ids:
                top, owned = f"part{part_id}/edges/{type_name(edge_type)}", _count(edges.offsets, part_id)
                yield from self._indptr(f"{top}/indptr.npy", _count(targets.offsets, part_id), owned)
                yield from self._ids(f"{top}/orig_id.npy", (owned,), edges.num_edges)
                yield from self._ids(f"{top}/indices.npy", (owned,), sources.num_nodes)
                yield from self._attrs(top, edges.attrs, owned)
                for name in edges.src_times:
                    yield from self._array(f"{top}/src_times/{name}.npy", np.dtype(np.int64), (owned,))
                limits = (sources.num_nodes, targets.num_nodes)
                yield from self._ids(f"{top}/endpoints.npy", (_count(offsets, part_id), 2), limits)

    def _attrs(self, top: str, attrs: Mapping[str, AttrSpec], rows: int) -> Iterator[Finding]:
        for name, attr in attrs.items():
            yield from self._array(f"{top}/attrs/{name}.npy", attr.in_files, (rows, *attr.shape[1:]))
            if attr.kept:
                path = f"{top}/scales/{name}.npy"
                scales = yield from self._array(path, np.dtype(np.float32), (rows, 1))
                if scales is not None and len(wrong := np.flatnonzero(~(scales[:, 0] >= 0) | np.isinf(scales[:, 0]))):
                    yield Finding(path, f"position {wrong[0]}: {scales[wrong[0], 0]} is not a valid scale of a row")

    def _indptr(self, path: str, rows: int, edges: int) -> Iterator[Finding]:
        indptr = yield from self._array(path, np.dtype(np.int64), (rows + 1,))
        if indptr is None:
            return
        if indptr[0] != 0:
            yield Finding(path, f"begins with {indptr[0]}, expected 0")
        elif len(descents := np.flatnonzero(np.diff(indptr) < 0)):
            at = int(descents[0]) + 1
            yield Finding(path, f"position {at}: {indptr[at]} is below the value before it")
        elif indptr[-1] != edges:
            yield Finding(path, f"ends with {indptr[-1]}, but the manifest's offsets give the part {edges} edges")

    def _array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Generator[Finding, None, Array | None]:
        """Return the array in the file ``path``. If it has another dtype or shape, yield a finding and return None."""
        array = None if path in self.broken else map_array(self.root / path)
        if array is None or (array.dtype, array.shape) == (dtype, shape):
            return array
        yield Finding(path, f"holds {array.dtype.name} {list(array.shape)}, expected {dtype.name} {list(shape)}")
        return None

    def _ids(
        self, path: str, shape: tuple[int, ...], limits: int | tuple[int, int], dtype: np.dtype[Any] | None = None
    ) -> Iterator[Finding]:  # fmt: skip
        """Check ids in ``0 <= id < limit`` and of ``dtype`` (None: any signed integer type). A limit per column."""
        if path in self.broken:
            return
        ids = map_array(self.root / path)
        if ids.shape != shape or (ids.dtype.kind != "i" if dtype is None else ids.dtype != dtype):
            kind = "integers" if dtype is None else dtype.name
            yield Finding(path, f"holds {ids.dtype.name} {list(ids.shape)}, expected {kind} {list(shape)}")
            return
        columns = [(ids, limits)] if isinstance(limits, int) else list(zip(ids.T, limits, strict=True))
        for column, limit in columns:
            if (at := int(first_outside(column, limit))) >= 0:
                yield Finding(path, f"position {at}: {column[at]} is outside 0 to {limit - 1}")


def _count(offsets: Sequence[int], part_id: int) -> int:
    return offsets[part_id + 1] - offsets[part_id]


_READERS = 2


def verify_partition(folder: str | Path, part_ids: Sequence[int] | None = None, digests: bool = True) -> list[Finding]:
    """Return all problems of a partition folder: of digests, dtypes, shapes and ranges. Empty if it is sound.

    Args:
        folder: partition folder.
        part_ids: parts to check; None: all. Shared files are always checked.
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
    findings = [*_listing(root, manifest, tops)]
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda entry: _file_problem(root, entry, digests), entries)
        findings += [Finding(entry.path, problem) for entry, problem in zip(entries, problems, strict=True) if problem]
    broken = frozenset(finding.path for finding in findings)
    return [*findings, *_Contents(root, manifest, wanted, broken).check()]


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
        folder = root / ("shared" if top is None else f"part{top}")
        found = {path for path in files_below(root, folder) if not is_note(path)}
        for path in sorted(found - listed - set(needed)):
            yield Finding(path, "is not a file of this partition; move it away")


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
        yield from (f"{top}/{name}" for name in ("indptr", "indices", "orig_id", "endpoints"))
        yield from _attr_files(top, edges.attrs)
        yield from (f"{top}/src_times/{name}" for name in edges.src_times)


def _attr_files(top: str, attrs: Mapping[str, AttrSpec]) -> Iterator[str]:
    yield from (f"{top}/attrs/{name}" for name in attrs)
    yield from (f"{top}/scales/{name}" for name, spec in attrs.items() if spec.kept)


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
