"""Checking a partition folder: every digest, shape and invariant of the format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from trainer.core.errors import PartitionError
from trainer.core.schema import type_name
from trainer.partition.folder import files_below, is_note
from trainer.partition.invariants import Finding, Invariants
from trainer.store.manifest import AttrSpec, FileEntry, Manifest, read_manifest

_BLOCK = 4 << 20

_READERS = 2


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
    tops = (None, *wanted)
    entries = [entry for top in tops for entry in manifest.files_of(top)]
    findings = [*_listing(root, manifest, tops), *_file_findings(root, entries, digests)]
    broken = frozenset(finding.path for finding in findings)
    return [*findings, *Invariants(root, manifest, wanted, broken).check()]


def _listing(root: Path, manifest: Manifest, tops: Iterable[int | None]) -> Iterator[Finding]:
    """Files that the types ask for, that the manifest lists, and that are there: all three must agree."""
    for top in tops:
        needed = [f"{path}.npy" for path in (_shared_files(manifest) if top is None else _part_files(manifest, top))]
        listed = {entry.path for entry in manifest.files_of(top)}
        yield from (Finding(path, "not listed in the manifest") for path in needed if path not in listed)
        for path in sorted(listed - set(needed)):
            yield Finding(path, "listed in the manifest, but no type has such a file")
        for path in sorted(_found(root, "shared" if top is None else f"part{top}") - listed - set(needed)):
            yield Finding(path, "is no file of this partition; move it away")


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
