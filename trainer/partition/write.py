"""Writes a partition folder atomically: relabels nodes, cuts edges by part, and records digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.remote_settings import WireRows
from trainer.core.rounding import Unroundable, rounds, to_float16, to_int8
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.dataset import Dataset, EdgeData, NodeData, is_time
from trainer.partition.assign import PartitionAssignment
from trainer.partition.cut import EdgeCut, EdgeRows, Relabelling, id_dtype, relabel
from trainer.partition.folder import reusable, staged
from trainer.store.manifest import (
    VERSION,
    AttrSpec,
    EdgeSpec,
    FileEntry,
    Manifest,
    NodeSpec,
    endpoint_offsets,
    write_manifest,
)
from trainer.store.npy import rows_in_chunks, rows_per_chunk, write_npy

_WRITERS = 2


def partition_fingerprint(
    dataset_fingerprint: str, num_parts: int, method: str, seed: int, options: Mapping[str, Any],
    time_attrs: Sequence[str],
) -> str:  # fmt: skip
    """Return the sha256, hex, of all settings and inputs that the content of a partition depends on."""
    text = json.dumps([VERSION, dataset_fingerprint, num_parts, method, seed, options, time_attrs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def options_with(options: Mapping[str, Any], rows: WireRows) -> Mapping[str, Any]:
    """Return the options of the partition method, with ``rows`` added if rows are rounded."""
    return options if rows == "stored" else {**options, "rows": rows}


def write_partition(
    dataset: Dataset, assignment: PartitionAssignment, folder: str | Path, rows: WireRows = "stored"
) -> Manifest:
    """Write a partition folder and return its manifest.

    A folder with the same fingerprint is left unchanged; one with another fingerprint is replaced. Peak memory is the
    dataset, 8 bytes per node, 16 further bytes per node of the largest type, and edge ids of 256 MiB (or of one part
    and type, if that is more). Attributes are written in chunks of 8 MiB.

    Args:
        dataset: the graph.
        assignment: the part of every node.
        folder: partition folder to write.
        rows: type that floating-point attributes with two or more dimensions are rounded to, except labels.

    Raises:
        PartitionError: when the folder cannot be written, or holds other files.
        DataError: when a row cannot be rounded. No files are left behind in either case.
    """
    target = Path(folder)
    assignment = replace(assignment, options=options_with(assignment.options, rows))
    fingerprint = partition_fingerprint(
        dataset.fingerprint, assignment.num_parts, assignment.algorithm, assignment.seed, assignment.options,
        dataset.time_attrs,
    )  # fmt: skip
    if (manifest := reusable(target, fingerprint)) is not None:
        return manifest
    labels = {of: relabel(assignment.parts[of], assignment.num_parts) for of in dataset.nodes}
    with staged(target) as root:
        manifest = _write_all(root, dataset, assignment, labels, fingerprint, rows)
        write_manifest(root, manifest)
    return manifest


@dataclass(frozen=True)
class _ArrayFile:
    """A .npy file to write."""

    path: str  #: relative to the partition folder
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: Iterable[Array]  #: consecutive rows of the array


@dataclass(frozen=True)
class _Writer:
    """Writes .npy files in a thread pool, and collects their entries for the manifest."""

    root: Path
    pool: Executor
    rows: WireRows  #: as in ``write_partition``
    entries: list[FileEntry] = field(default_factory=list)  #: the files written so far

    def write(self, files: Iterable[_ArrayFile]) -> None:
        """Write the files, and wait until all are written."""
        self.entries.extend(self.pool.map(self._write, files))

    def _write(self, file: _ArrayFile) -> FileEntry:
        return write_npy(self.root, file.path, file.dtype, file.shape, file.chunks)


def _write_all(
    root: Path, dataset: Dataset, assignment: PartitionAssignment, labels: Mapping[NodeType, Relabelling],
    fingerprint: str, rows: WireRows,
) -> Manifest:  # fmt: skip
    with ThreadPoolExecutor(_WRITERS) as pool:
        writer = _Writer(root, pool, rows)
        writer.write(_graph_files(dataset.graph_attrs))
        nodes = {of: _write_nodes(writer, of, data, labels[of]) for of, data in dataset.nodes.items()}
        edges = {of: _write_edges(writer, dataset, of, labels, assignment.edge_cuts[of]) for of in dataset.edges}
    return Manifest(
        dataset=dataset.name,
        fingerprint=fingerprint,
        num_parts=assignment.num_parts,
        algorithm=assignment.algorithm,
        seed=assignment.seed,
        options=assignment.options,
        hetero=dataset.hetero,
        nodes=nodes,
        edges=edges,
        edge_cut=assignment.edge_cut,
        balance=assignment.balance,
        graph_attrs={name: AttrSpec(values.dtype.name, values.shape) for name, values in dataset.graph_attrs.items()},
        files=tuple(sorted(writer.entries, key=lambda entry: entry.path)),
    )


def _whole(path: str, array: Array) -> _ArrayFile:
    return _ArrayFile(path, array.dtype, array.shape, rows_in_chunks(array))


def _gathered(path: str, values: Array, rows: Array) -> _ArrayFile:
    step = rows_per_chunk(values)
    chunks = (values[rows[start : start + step]] for start in range(0, len(rows), step))
    return _ArrayFile(path, values.dtype, (len(rows), *values.shape[1:]), chunks)


def _graph_files(attrs: Mapping[str, Array]) -> Iterator[_ArrayFile]:
    for name, values in attrs.items():
        yield _ArrayFile(f"shared/graph/{name}.npy", values.dtype, values.shape, [values])


def _attr_specs(data: NodeData | EdgeData, rows: WireRows) -> dict[str, AttrSpec]:
    return {name: _attr_spec(name, values, name in data.bfloat16, rows) for name, values in data.attrs.items()}


def _attr_spec(name: str, values: Array, bfloat16: bool, rows: WireRows) -> AttrSpec:
    form = _kept_as(name, values, rows)
    if form == "int8":
        return AttrSpec("float32", values.shape, "int8")
    return AttrSpec("bfloat16" if bfloat16 else "float16" if form == "float16" else values.dtype.name, values.shape)


def _kept_as(name: str, values: Array, rows: WireRows) -> WireRows:
    return rows if rounds(name, values.dtype, values.shape, rows) else "stored"


def _attr_files(top: str, attrs: Mapping[str, Array], owned: Array, rows: WireRows) -> Iterator[_ArrayFile]:
    for name, values in attrs.items():
        file, form = _gathered(f"{top}/attrs/{name}.npy", values, owned), _kept_as(name, values, rows)
        if form == "int8":
            yield replace(file, dtype=np.dtype(np.int8), chunks=_rounded(file, owned, lambda some: to_int8(some)[0]))
            again = _gathered(f"{top}/scales/{name}.npy", values, owned)  # rounds twice, to save memory
            scales = _rounded(again, owned, lambda some: to_int8(some)[1])
            yield replace(again, dtype=np.dtype(np.float32), shape=(len(owned), 1), chunks=scales)
        elif form == "float16":
            yield replace(file, dtype=np.dtype(np.float16), chunks=_rounded(file, owned, to_float16))
        else:
            yield file


def _rounded(file: _ArrayFile, owned: Array, to: Callable[[Array], Array]) -> Iterator[Array]:
    """Yield the chunks of ``file``, rounded by ``to``. Raises ``DataError`` that names a row that cannot be rounded."""
    at = 0
    for chunk in file.chunks:
        try:
            yield to(chunk)
        except Unroundable as error:
            row = owned[at + error.row]
            raise DataError(f"{file.path}: row {row} of the dataset {error.why}; use --rows stored") from None
        at += len(chunk)


def _write_nodes(writer: _Writer, node_type: NodeType, data: NodeData, labels: Relabelling) -> NodeSpec:
    writer.write(chain(_shared_files(node_type, data, labels), _node_files(node_type, data, labels, writer.rows)))
    return NodeSpec(
        num_nodes=data.num_nodes,
        offsets=tuple(labels.offsets.tolist()),
        attrs=_attr_specs(data, writer.rows),
        splits={name: len(ids) for name, ids in data.splits.items()},
        num_classes=data.num_classes,
    )


def _shared_files(node_type: NodeType, data: NodeData, labels: Relabelling) -> Iterator[_ArrayFile]:
    top = f"shared/nodes/{node_type}"
    if labels.num_parts > 1:  # with one part, global ids equal original ids
        yield _whole(f"{top}/global_id.npy", labels.global_id)
    for name, ids in data.splits.items():
        yield _whole(f"{top}/seeds/{name}.npy", labels.global_id[ids].astype(np.int64))


def _node_files(node_type: NodeType, data: NodeData, labels: Relabelling, rows: WireRows) -> Iterator[_ArrayFile]:
    for part_id in range(labels.num_parts):
        top, owned = f"part{part_id}/nodes/{node_type}", labels.owned(part_id)
        yield _whole(f"{top}/orig_id.npy", owned)
        yield from _attr_files(top, data.attrs, owned, rows)


def _write_edges(
    writer: _Writer, dataset: Dataset, edge_type: EdgeType, labels: Mapping[NodeType, Relabelling], edge_cut: float
) -> EdgeSpec:
    data, source = dataset.edges[edge_type], labels[edge_type[0]]
    cut = EdgeCut.of(data.edge_index, source, labels[edge_type[2]])
    times = _source_times(dataset, edge_type)
    for group in cut.groups():
        writer.write(file for rows in group for file in _edge_files(edge_type, rows, data, source, times, writer.rows))
        del group  # frees the group's memory before the next one is made
    writer.write(_endpoint_files(edge_type, data.edge_index, source, labels[edge_type[2]]))
    return EdgeSpec(
        num_edges=data.num_edges,
        offsets=tuple(cut.offsets.tolist()),
        attrs=_attr_specs(data, writer.rows),
        src_times=tuple(times),
        edge_cut=edge_cut,
        endpoints=True,
    )


def _endpoint_files(
    edge_type: EdgeType, edge_index: Array, source: Relabelling, target: Relabelling
) -> Iterator[_ArrayFile]:
    """Yield a file per part with the ends of the edges of its share of the original edge ids: original ids [m, 2]."""
    dtype = np.dtype(id_dtype(max(len(source.orig_id), len(target.orig_id))))
    cuts = endpoint_offsets(edge_index.shape[1], source.num_parts)
    for part_id, (begin, end) in enumerate(pairwise(cuts)):
        rows = edge_index[:, begin:end].T
        path = f"part{part_id}/edges/{type_name(edge_type)}/endpoints.npy"
        yield _ArrayFile(path, dtype, rows.shape, rows_in_chunks(rows))


def _source_times(dataset: Dataset, edge_type: EdgeType) -> dict[str, Array]:
    """Return the time attributes of the edges' source type that have one integer per node."""
    source = dataset.nodes[edge_type[0]]
    times = {name: source.attrs[name] for name in dataset.time_attrs if name in source.attrs}
    return {name: at for name, at in times.items() if at.ndim == 1 and is_time(at, name in source.bfloat16)}


def _edge_files(
    edge_type: EdgeType, rows: EdgeRows, data: EdgeData, source: Relabelling, times: Mapping[str, Array], form: WireRows
) -> Iterator[_ArrayFile]:
    top = f"part{rows.part_id}/edges/{type_name(edge_type)}"
    yield _whole(f"{top}/indptr.npy", rows.indptr)
    yield _whole(f"{top}/indices.npy", rows.indices)
    yield _whole(f"{top}/orig_id.npy", rows.orig_id)
    yield from _attr_files(top, data.attrs, rows.orig_id, form)
    for name, values in times.items():
        yield _times(f"{top}/src_times/{name}.npy", values, source, rows.indices)


def _times(path: str, values: Array, source: Relabelling, indices: Array) -> _ArrayFile:
    chunks = (values[source.orig_id[gids]] for gids in rows_in_chunks(indices))
    return _ArrayFile(path, np.dtype(np.int64), indices.shape, chunks)
