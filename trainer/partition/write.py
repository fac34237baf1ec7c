"""Writes a partition folder atomically: relabels nodes, writes the edges of each part, and records digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids, id_dtype
from trainer.core.errors import DataError
from trainer.core.progress import progress
from trainer.core.remote_settings import WireRows
from trainer.core.rounding import Unroundable, rounds, to_float16, to_int8
from trainer.core.row_sort import Column, Scratch
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.dataset import Dataset, EdgeData, NodeData, is_time
from trainer.partition.cut import EdgeCut, Relabelling, Span, relabel
from trainer.partition.folder import reusable, staged
from trainer.partition.methods.assign import PartitionAssignment
from trainer.partition.work_folder import WorkFolder
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
from trainer.store.npy import NpyWriter, rows_per_chunk, write_npy

_WRITERS = 2

SORT_MEMORY = 1 << 30  #: bytes


def partition_fingerprint(
    dataset_fingerprint: str, num_parts: int, method: str, seed: int, options: Mapping[str, Any],
    time_attrs: Sequence[str],
) -> str:  # fmt: skip
    """Return the sha256, in hex, of all inputs and settings that determine the content of a partition."""
    text = json.dumps([VERSION, dataset_fingerprint, num_parts, method, seed, options, time_attrs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def options_with(options: Mapping[str, Any], rows: WireRows) -> Mapping[str, Any]:
    return options if rows == "stored" else {**options, "rows": rows}


def write_partition(
    dataset: Dataset, assignment: PartitionAssignment, folder: str | Path, rows: WireRows = "stored",
    memory: int = SORT_MEMORY, work: WorkFolder | None = None, fingerprint: str | None = None,
) -> Manifest:  # fmt: skip
    """Write a partition folder and return its manifest.

    A folder with the same fingerprint is left unchanged; one with another fingerprint is replaced. Memory: the dataset,
    8 bytes per node, 16 further bytes per node of the largest type, and ``memory``. The arrays of the dataset are read
    once, in order, and may be memory-mapped.

    Args:
        dataset: the graph.
        assignment: the part of every node.
        folder: partition folder to write.
        rows: type to which floating-point attributes are rounded, except labels and 1-d attributes.
        memory: bytes for sorting edges and their attributes; if they need more, they are sorted in files.
        work: folder that records which groups of files are finished, so that an interrupted call can be continued.
        fingerprint: fingerprint of the partition; default: computed from dataset and assignment.

    Raises:
        PartitionError: when the folder cannot be written, or contains files that are not of a partition.
        DataError: when a row cannot be rounded. After either error, ``folder`` is unchanged.
    """
    target = Path(folder)
    assignment = replace(assignment, options=options_with(assignment.options, rows))
    fingerprint = fingerprint or partition_fingerprint(
        dataset.fingerprint, assignment.num_parts, assignment.algorithm, assignment.seed, assignment.options,
        dataset.time_attrs,
    )  # fmt: skip
    if (manifest := reusable(target, fingerprint)) is not None:
        return manifest
    labels = {of: relabel(assignment.parts[of], assignment.num_parts) for of in dataset.nodes}
    with staged(target, None if work is None else work.folder("parts")) as root:
        with ThreadPoolExecutor(_WRITERS) as pool:
            writer = _Writer(root, pool, rows, Scratch(work.emptied("sort") if work else root, memory), work)
            graph = {f"shared/graph/{name}.npy": values for name, values in dataset.graph_attrs.items()}
            writer.group("graph", lambda: writer.arrays(graph))
            nodes = {of: _write_nodes(writer, of, data, labels[of]) for of, data in dataset.nodes.items()}
            edges = {of: _write_edges(writer, dataset, of, labels, assignment.edge_cuts[of]) for of in dataset.edges}
        manifest = Manifest(
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
            graph_attrs={of: AttrSpec(values.dtype.name, values.shape) for of, values in dataset.graph_attrs.items()},
            files=tuple(sorted(writer.entries, key=lambda entry: entry.path)),
            dataset_fingerprint=dataset.fingerprint,
            time_attrs=dataset.time_attrs,
        )
        write_manifest(root, manifest)
    return manifest


#: Rows of one part, and their row numbers in the dataset.
_Piece = tuple[int, Array, Array]


class _PartArray:
    """One .npy file per part, ``part<p>/<path>``."""

    def __init__(self, root: Path, path: str, column: Column, counts: Sequence[int]) -> None:
        """Create the files. ``column``: dtype and shape of a row. ``counts``: number of rows of each part."""
        self._writers = [
            NpyWriter(root, f"part{part_id}/{path}", column.dtype, (count, *column.shape))
            for part_id, count in enumerate(counts)
        ]

    def append(self, part_id: int, rows: Array, numbers: Array | None = None) -> None:
        """Write the next rows of a part. Different threads may write different parts."""
        for chunk in _rows_in_chunks(rows):
            self._writers[part_id].append(chunk)

    def finish(self) -> Iterator[FileEntry]:
        return (writer.finish() for writer in self._writers)


class _PartAttr:
    """The files of an attribute, whose rows may be rounded to float16 or int8 when written."""

    def __init__(self, root: Path, top: str, name: str, column: Column, counts: Sequence[int], form: WireRows) -> None:
        """Create the files in ``part<p>/<top>/attrs`` and, if rows are rounded to int8, in ``part<p>/<top>/scales``."""
        self._what = f"{top}/attrs/{name}.npy"
        self._convert: Callable[[Array], Sequence[Array]] = lambda rows: [rows]
        stored = [column]
        form = _stored_form(name, column.dtype, (0, *column.shape), form)
        if form == "int8":
            self._convert = to_int8
            stored = [Column(np.dtype(np.int8), column.shape), Column(np.dtype(np.float32), (1,))]
        elif form == "float16":
            self._convert = lambda rows: [to_float16(rows)]
            stored = [Column(np.dtype(np.float16), column.shape)]
        paths = [self._what, f"{top}/scales/{name}.npy"]
        self._arrays = [_PartArray(root, path, each, counts) for path, each in zip(paths, stored, strict=False)]

    def append(self, part_id: int, rows: Array, numbers: Array) -> None:
        """Write the next rows of a part. ``numbers`` [rows]: their row numbers in the dataset.

        Raises ``DataError`` for a row that cannot be rounded.
        """
        at = 0
        for chunk in _rows_in_chunks(rows):
            try:
                converted = self._convert(chunk)
            except Unroundable as error:
                row = numbers[at + error.row]
                raise DataError(f"{self._what}: row {row} of the dataset {error.why}; use --rows stored") from None
            for array, values in zip(self._arrays, converted, strict=True):
                array.append(part_id, values)
            at += len(chunk)

    def write(self, pieces: Iterable[Sequence[_Piece]], pool: Executor) -> list[FileEntry]:
        """Write all rows, and return the entries of the files for the manifest.

        Pieces of one sequence are written in parallel, so they must belong to different parts.
        """
        for several in pieces:
            list(pool.map(lambda piece: self.append(*piece), several))
        return self.finish()

    def finish(self) -> list[FileEntry]:
        return [entry for array in self._arrays for entry in array.finish()]


def _stored_form(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], rows: WireRows) -> WireRows:
    """Return the type that the attribute is rounded to in the files: ``rows``, or ``stored`` if it is not rounded.

    ``rows``: the value of option ``--rows``.
    """
    return rows if rounds(name, dtype, shape, rows) else "stored"


def _pieces_by_part(values: Array, part: Array, num_parts: int, at_once: int) -> Iterator[list[_Piece]]:
    """Cut ``values`` into chunks of ``at_once`` rows, and yield each chunk as a list of one piece per part.

    ``part`` [rows]: the part of each row.
    """
    for start in range(0, len(values), at_once):
        progress("write nodes", start, len(values))
        rows, own = values[start : start + at_once], part[start : start + at_once]
        order = np.argsort(own, kind="stable")
        limits: Ids = np.zeros(num_parts + 1, np.int64)
        np.cumsum(np.bincount(own, minlength=num_parts), out=limits[1:])
        chosen = [order[limits[part_id] : limits[part_id + 1]] for part_id in range(num_parts)]
        yield [(part_id, rows[which], which + start) for part_id, which in enumerate(chosen) if len(which)]


@dataclass(frozen=True)
class _Writer:
    root: Path
    pool: Executor
    rows: WireRows  #: as in ``write_partition``
    scratch: Scratch  #: for edges and their attributes
    work: WorkFolder | None
    entries: list[FileEntry] = field(default_factory=list)  #: the files written so far

    def group(self, name: str, write: Callable[[], Iterable[FileEntry]]) -> None:
        """Write a group of files, unless an interrupted call has written it already."""
        if self.work is None:
            self.entries.extend(write())
        else:
            done = self.work.once(name, lambda: [asdict(entry) for entry in write()])
            self.entries.extend(FileEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in done)

    def arrays(self, arrays: Mapping[str, Array], dtype: npt.DTypeLike | None = None) -> Iterable[FileEntry]:
        def write(path: str) -> FileEntry:
            values = arrays[path]
            chunks = _rows_in_chunks(values) if values.ndim else [values]
            return write_npy(self.root, path, dtype or values.dtype, values.shape, chunks)

        return self.pool.map(write, arrays)

    def append(self, files: _PartArray | _PartAttr, spans: Sequence[Span], rows: Array, numbers: Array) -> None:
        """For each span (part, begin, end), append ``rows[begin:end]`` to the part's file.

        ``numbers``: for each of ``rows``, its row number in the dataset.
        """
        list(
            self.pool.map(
                lambda span: files.append(span[0], rows[span[1] : span[2]], numbers[span[1] : span[2]]), spans
            )
        )


def _attr_specs(data: NodeData | EdgeData, rows: WireRows) -> dict[str, AttrSpec]:
    specs = {}
    for name, values in data.attrs.items():
        form = _stored_form(name, values.dtype, values.shape, rows)
        dtype = "bfloat16" if name in data.bfloat16 else "float16" if form == "float16" else values.dtype.name
        specs[name] = AttrSpec(dtype, values.shape)
        if form == "int8":
            specs[name] = AttrSpec("float32", values.shape, "int8")
    return specs


def _write_nodes(writer: _Writer, node_type: NodeType, data: NodeData, labels: Relabelling) -> NodeSpec:
    writer.group(f"nodes {node_type}", lambda: writer.arrays(_node_arrays(node_type, data, labels)))
    for name in data.attrs:
        writer.group(f"nodes {node_type} {name}", partial(_write_node_attr, writer, node_type, name, data, labels))
    return NodeSpec(
        num_nodes=data.num_nodes,
        offsets=tuple(labels.offsets.tolist()),
        attrs=_attr_specs(data, writer.rows),
        splits={name: len(ids) for name, ids in data.splits.items()},
        num_classes=data.num_classes,
    )


def _node_arrays(node_type: NodeType, data: NodeData, labels: Relabelling) -> dict[str, Array]:
    top = f"shared/nodes/{node_type}"
    arrays = {f"{top}/seeds/{name}.npy": labels.global_id[ids].astype(np.int64) for name, ids in data.splits.items()}
    if labels.num_parts > 1:  # with one part, global ids equal original ids
        arrays[f"{top}/global_id.npy"] = labels.global_id
    owned = {f"part{part}/nodes/{node_type}/orig_id.npy": labels.owned(part) for part in range(labels.num_parts)}
    return arrays | owned


def _write_node_attr(
    writer: _Writer, node_type: NodeType, name: str, data: NodeData, labels: Relabelling
) -> list[FileEntry]:
    values, counts = data.attrs[name], np.diff(labels.offsets).tolist()
    attr = _PartAttr(writer.root, f"nodes/{node_type}", name, Column.of(values), counts, writer.rows)
    part = np.searchsorted(labels.offsets[1:], labels.global_id, side="right").astype(np.int32)
    pieces = _pieces_by_part(values, part, labels.num_parts, rows_per_chunk(values) * _WRITERS)
    return attr.write(pieces, writer.pool)


def _write_edges(
    writer: _Writer, dataset: Dataset, edge_type: EdgeType, labels: Mapping[NodeType, Relabelling], edge_cut: float
) -> EdgeSpec:
    data, nodes, source = dataset.edges[edge_type], dataset.nodes[edge_type[0]], labels[edge_type[0]]
    cut = EdgeCut.of(data.edge_index, source, labels[edge_type[2]])
    times = {name: nodes.attrs[name] for name in dataset.time_attrs if name in nodes.attrs}
    times = {name: at for name, at in times.items() if at.ndim == 1 and is_time(at, name in nodes.bfloat16)}
    writer.group(f"edges {type_name(edge_type)}", lambda: _write_sorted(writer, edge_type, cut, data, times))
    endpoints = {  # rows of source and target, as original ids; each file has a range of original edge ids
        f"part{part_id}/edges/{type_name(edge_type)}/endpoints.npy": data.edge_index[:, begin:end].T
        for part_id, (begin, end) in enumerate(pairwise(endpoint_offsets(data.num_edges, source.num_parts)))
    }
    id_type = id_dtype(max(len(labels[end].orig_id) for end in (edge_type[0], edge_type[2])))
    writer.group(f"endpoints {type_name(edge_type)}", lambda: writer.arrays(endpoints, id_type))
    return EdgeSpec(
        num_edges=data.num_edges,
        offsets=tuple(cut.offsets.tolist()),
        attrs=_attr_specs(data, writer.rows),
        src_times=tuple(times),
        edge_cut=edge_cut,
    )


def _write_sorted(
    writer: _Writer, edge_type: EdgeType, cut: EdgeCut, data: EdgeData, times: Mapping[str, Array]
) -> Iterator[FileEntry]:
    top, counts = f"edges/{type_name(edge_type)}", np.diff(cut.offsets).tolist()
    yield from writer.arrays({f"part{p}/{top}/indptr.npy": cut.part_indptr(p) for p in range(cut.target.num_parts)})
    indices = _PartArray(writer.root, f"{top}/indices.npy", Column(cut.index_dtype), counts)
    orig_ids = _PartArray(writer.root, f"{top}/orig_id.npy", Column(cut.edge_dtype), counts)
    plain = Column(np.dtype(np.int64))
    src_times = {name: _PartArray(writer.root, f"{top}/src_times/{name}.npy", plain, counts) for name in times}
    attrs = [
        _PartAttr(writer.root, top, name, Column.of(values), counts, writer.rows) for name, values in data.attrs.items()
    ]
    for group in cut.sorted_edges(list(data.attrs.values()), writer.scratch):
        spans = list(cut.part_spans(group))
        sources, numbers = group.columns[0](), group.columns[1]()
        writer.append(indices, spans, sources, numbers)
        writer.append(orig_ids, spans, numbers, numbers)
        for name, array in src_times.items():
            writer.append(array, spans, times[name][cut.source.orig_id[sources]], numbers)
        del sources
        progress("write edges", group.first, len(cut.indptr))
        for attr, column in zip(attrs, group.columns[2:], strict=True):
            writer.append(attr, spans, column(), numbers)
    written: list[_PartArray | _PartAttr] = [indices, orig_ids, *src_times.values(), *attrs]
    for files in written:
        yield from files.finish()


def _rows_in_chunks(rows: Array) -> Iterator[Array]:
    step = rows_per_chunk(rows)
    return (rows[start : start + step] for start in range(0, len(rows), step))
