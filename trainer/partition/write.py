"""Writing a partition folder: relabelled, cut by part, digested, in place at once or not at all."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from trainer.arrays import Array
from trainer.data.dataset import Dataset
from trainer.partition.assign import PartitionAssignment
from trainer.partition.folder import reusable, staged
from trainer.partition.format import VERSION, AttrSpec, FileEntry, Manifest, write_manifest
from trainer.partition.npy import rows_in_chunks, rows_per_chunk, write_npy

Job = Callable[[Path], FileEntry]

_EDGE_BYTES_AT_ONCE = 256 << 20  #: cut edges of as many parts together as fit; each group reads the edge list once
_WRITERS = 2


@dataclass(frozen=True)
class Relabelling:
    """Global ids: part by part, ascending original id inside a part."""

    offsets: npt.NDArray[np.int64]  #: [num_parts + 1]
    orig_id: Array  #: int32|int64 [N]: original id of each global id
    global_id: Array  #: int32|int64 [N]: global id of each original id


def relabel(part: npt.NDArray[np.int32], num_parts: int) -> Relabelling:
    """Number the nodes part by part; ``part`` [N] is the part of each original id."""
    offsets = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part, minlength=num_parts), out=offsets[1:])
    orig_id = np.empty(len(part), id_dtype(len(part)))
    global_id = np.empty_like(orig_id)
    _number(part, offsets[:-1].copy(), orig_id, global_id)
    return Relabelling(offsets, orig_id, global_id)


def id_dtype(count: int) -> type[np.signedinteger[Any]]:
    """The smallest id type for ``count`` things."""
    return np.int32 if count <= 2**31 - 1 else np.int64


def partition_fingerprint(dataset_fingerprint: str, num_parts: int, method: str, seed: int) -> str:
    """Digest of everything a partition depends on, hex."""
    return hashlib.sha256(f"{VERSION} {dataset_fingerprint} {num_parts} {method} {seed}".encode()).hexdigest()


def write_partition(dataset: Dataset, assignment: PartitionAssignment, folder: str | Path) -> Manifest:
    """Write ``folder`` and return its manifest; an equal folder already there is left as it is.

    A partition with another fingerprint is replaced. Peak memory is the dataset, 20 bytes a node and
    at most 256 MiB (or one part's edges). Raises ``PartitionError``; nothing is left behind then.
    """
    target = Path(folder)
    fingerprint = partition_fingerprint(
        dataset.fingerprint, assignment.num_parts, assignment.algorithm, assignment.seed
    )
    if (manifest := reusable(target, fingerprint)) is not None:
        return manifest
    labels = relabel(assignment.part, assignment.num_parts)
    with staged(target) as root:
        files = _write_files(root, dataset, labels)
        manifest = _manifest(dataset, assignment, labels, fingerprint, files)
        write_manifest(root, manifest)
    return manifest


def _write_files(root: Path, dataset: Dataset, labels: Relabelling) -> list[FileEntry]:
    entries: list[FileEntry] = []
    with ThreadPoolExecutor(_WRITERS) as pool:
        for jobs in _job_groups(dataset, labels):
            entries.extend(pool.map(lambda job: job(root), jobs))
    return sorted(entries, key=lambda entry: entry.path)


def _job_groups(dataset: Dataset, labels: Relabelling) -> Iterator[list[Job]]:
    """Lists of files to write; only one list's arrays are in memory at a time."""
    yield [*_seed_jobs(dataset, labels), *_node_jobs(dataset, labels)]
    indptr = _indptr(dataset.edge_index[1], labels.global_id)
    for parts in edge_groups(indptr[labels.offsets], _edge_bytes(dataset), _EDGE_BYTES_AT_ONCE):
        yield _edge_jobs(dataset, labels, indptr, parts)


def _job(path: str, array: Array) -> Job:
    return functools.partial(_write, path=path, dtype=array.dtype, shape=array.shape, chunks=rows_in_chunks(array))


def _write(root: Path, path: str, dtype: Any, shape: tuple[int, ...], chunks: Iterator[Array]) -> FileEntry:
    return write_npy(root, path, dtype, shape, chunks)


def _seed_jobs(dataset: Dataset, labels: Relabelling) -> list[Job]:
    return [
        _job(f"shared/seeds/{name}.npy", labels.global_id[ids].astype(np.int64)) for name, ids in dataset.splits.items()
    ]


def _node_jobs(dataset: Dataset, labels: Relabelling) -> list[Job]:
    jobs = []
    for part_id, (start, end) in enumerate(zip(labels.offsets, labels.offsets[1:], strict=False)):
        owned = labels.orig_id[start:end]
        jobs.append(_job(f"part{part_id}/nodes/orig_id.npy", owned))
        for name, values in dataset.attrs.items():
            path, shape = f"part{part_id}/nodes/{name}.npy", (len(owned), *values.shape[1:])
            jobs.append(
                functools.partial(_write, path=path, dtype=values.dtype, shape=shape, chunks=_gather(values, owned))
            )
    return jobs


def _gather(values: Array, rows: Array) -> Iterator[Array]:
    step = rows_per_chunk(values)
    return (values[rows[start : start + step]] for start in range(0, len(rows), step))


def _edge_bytes(dataset: Dataset) -> int:
    return np.dtype(id_dtype(dataset.num_nodes)).itemsize + np.dtype(id_dtype(dataset.num_edges)).itemsize


def edge_groups(edge_offsets: Array, edge_bytes: int, limit: int) -> Iterator[range]:
    """Consecutive parts whose edges together stay under ``limit`` bytes; always at least one part."""
    start, num_parts = 0, len(edge_offsets) - 1
    while start < num_parts:
        end = start + 1
        while end < num_parts and (edge_offsets[end + 1] - edge_offsets[start]) * edge_bytes <= limit:
            end += 1
        yield range(start, end)
        start = end


def _edge_jobs(dataset: Dataset, labels: Relabelling, indptr: Array, parts: range) -> list[Job]:
    low, high = int(labels.offsets[parts.start]), int(labels.offsets[parts.stop])
    first, count = int(indptr[low]), int(indptr[high] - indptr[low])
    indices = np.empty(count, id_dtype(dataset.num_nodes))
    edge_id = np.empty(count, id_dtype(dataset.num_edges))
    sources, targets = dataset.edge_index
    _cut_rows(sources, targets, labels.global_id, low, high, indptr[low:high] - first, indices, edge_id)
    jobs = []
    for part_id in parts:
        rows = indptr[labels.offsets[part_id] : labels.offsets[part_id + 1] + 1]
        own = slice(int(rows[0]) - first, int(rows[-1]) - first)
        jobs.append(_job(f"part{part_id}/edges/indptr.npy", rows - rows[0]))
        jobs.append(_job(f"part{part_id}/edges/indices.npy", indices[own]))
        jobs.append(_job(f"part{part_id}/edges/edge_id.npy", edge_id[own]))
    return jobs


def _manifest(
    dataset: Dataset, assignment: PartitionAssignment, labels: Relabelling, fingerprint: str, files: list[FileEntry]
) -> Manifest:
    return Manifest(
        dataset=dataset.name,
        fingerprint=fingerprint,
        num_parts=assignment.num_parts,
        algorithm=assignment.algorithm,
        seed=assignment.seed,
        num_nodes=dataset.num_nodes,
        num_edges=dataset.num_edges,
        num_classes=dataset.num_classes,
        offsets=tuple(labels.offsets.tolist()),
        edge_cut=assignment.edge_cut,
        balance=assignment.balance,
        attrs={name: AttrSpec(values.dtype.name, values.shape) for name, values in dataset.attrs.items()},
        splits={name: len(ids) for name, ids in dataset.splits.items()},
        files=tuple(files),
    )


@njit(nogil=True, cache=True)
def _number(part: Array, cursor: Array, orig_id: Array, global_id: Array) -> None:
    for node in range(len(part)):
        gid = cursor[part[node]]
        cursor[part[node]] += 1
        orig_id[gid] = node
        global_id[node] = gid


@njit(nogil=True, cache=True)
def _indptr(targets: Array, global_id: Array) -> Array:
    """Row limits of all parts one after the other, int64 [N + 1]."""
    indptr = np.zeros(len(global_id) + 1, np.int64)
    for target in targets:
        indptr[global_id[target] + 1] += 1
    for row in range(len(global_id)):
        indptr[row + 1] += indptr[row]
    return indptr


@njit(nogil=True, cache=True)
def _cut_rows(
    sources: Array, targets: Array, global_id: Array, low: int, high: int, cursor: Array, indices: Array, edge_id: Array
) -> None:
    """Fill the rows ``low <= gid < high`` in original edge order; ``cursor`` holds the rows' next free slots."""
    for edge in range(len(sources)):
        row = global_id[targets[edge]]
        if low <= row < high:
            slot = cursor[row - low]
            cursor[row - low] += 1
            indices[slot] = global_id[sources[edge]]
            edge_id[slot] = edge
