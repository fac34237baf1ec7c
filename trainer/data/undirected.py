"""Adds the reverse of every edge (option ``undirected``), in memory or in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from trainer.core.arrays import Array, Ids, id_dtype
from trainer.core.errors import DataError
from trainer.core.row_sort import Column, Records, Scratch, SortedRows, sorted_rows
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.dataset import EdgeData
from trainer.data.edges import undirected
from trainer.data.work_arrays import mapped_values

_EDGES_AT_ONCE = 1 << 20


def both_ways(
    edges: Mapping[EdgeType, EdgeData], num_nodes: Mapping[NodeType, int], reverse_types: bool, where: str,
    scratch: Scratch | None = None,
) -> dict[EdgeType, EdgeData]:  # fmt: skip
    """Add the reverse of every edge, as torch_geometric's ``ToUndirected`` does.

    The reverse edges of a type ``(a, r, b)`` become the new edge type ``(b, rev_r, a)``, in the same order. But if both
    ends have the same node type, the reverse edges are added to the type itself, unless ``reverse_types`` is set. With
    ``scratch``, new arrays are memory-mapped files in its folder. Raises ``DataError`` if a new type already exists.
    ``where``: beginning of the error message.
    """
    result = dict(edges)
    for of, data in edges.items():
        source, relation, target = of
        if source == target and not reverse_types:
            result[of] = merged(data, num_nodes[source], _within(scratch, type_name(of)))
            continue
        back = (target, f"rev_{relation}", source)
        if back in result:
            raise DataError(f"{where}: edge type {type_name(back)} already exists; leave out option undirected")
        result[back] = reverse(data, _within(scratch, type_name(back)))
    return result


def reverse(data: EdgeData, scratch: Scratch | None = None) -> EdgeData:
    """Return the edges with sources and targets swapped. The attributes are shared with ``data``."""
    swapped = data.edge_index[::-1]
    if scratch is None:
        return EdgeData(np.ascontiguousarray(swapped), data.attrs, data.bfloat16)
    out = np.lib.format.open_memmap(scratch.folder / "edge_index.npy", "w+", swapped.dtype, swapped.shape)
    out[:] = swapped
    return EdgeData(out, data.attrs, data.bfloat16)


def merged(data: EdgeData, num_nodes: int, scratch: Scratch | None = None) -> EdgeData:
    """Return both directions of every edge, without duplicates, sorted by source, then by target.

    An edge s -> t of the result gets the attributes of the first edge s -> t in ``data``; if there is none, those of
    the first edge t -> s.
    """
    if scratch is not None:
        return _merged_on_disk(data, num_nodes, scratch)
    if not data.attrs:
        return EdgeData(undirected(data.edge_index, num_nodes))
    both = np.concatenate([data.edge_index, data.edge_index[::-1]], axis=1)
    order = np.lexsort((both[1], both[0]))  # stable, so a given edge comes before an equal reversed one
    both = both[:, order]
    new = np.ones(both.shape[1], bool)
    new[1:] = (both[:, 1:] != both[:, :-1]).any(axis=0)
    edge_index, origin = np.ascontiguousarray(both[:, new]), order[new] % data.edge_index.shape[1]
    return EdgeData(edge_index, {name: values[origin] for name, values in data.attrs.items()}, data.bfloat16)


# --- by way of files ----------------------------------------------------------------------------------------------


def _within(scratch: Scratch | None, name: str) -> Scratch | None:
    if scratch is None:
        return None
    folder = scratch.folder / f"both_ways-{name}"
    folder.mkdir()
    return replace(scratch, folder=folder)


def _merged_on_disk(data: EdgeData, num_nodes: int, scratch: Scratch) -> EdgeData:
    """Implement ``merged`` with memory-mapped files. Takes 16 bytes of memory per node, and ``scratch.memory``."""
    count = data.num_edges
    indptr = np.zeros(num_nodes + 1, np.int64)
    for start in range(0, count, _EDGES_AT_ONCE):
        ends = data.edge_index[:, start : start + _EDGES_AT_ONCE]
        indptr[1:] += np.bincount(ends.reshape(-1), minlength=num_nodes)
    np.cumsum(indptr, out=indptr)
    dtype = data.edge_index.dtype
    columns = [Column(dtype), Column(np.dtype(id_dtype(2 * count)))]
    names, total = ("source", "target", "origin"), 0
    with (
        open(scratch.folder / "source", "wb") as sources,
        open(scratch.folder / "target", "wb") as targets,
        open(scratch.folder / "origin", "wb") as origins,
    ):
        for group in sorted_rows(indptr, columns, lambda: _both_directions(data.edge_index, columns), scratch):
            source, target, origin = _without_repeats(group)
            sources.write(source.astype(dtype, copy=False).data)
            targets.write(target.data)
            origins.write((origin % count).astype(np.int64, copy=False).data)
            total += len(source)
    edge_index = np.lib.format.open_memmap(scratch.folder / "edge_index.npy", "w+", dtype, (2, total))
    for row, name in enumerate(names[:2]):
        ends = mapped_values(scratch.folder / name, dtype)
        for start in range(0, total, _EDGES_AT_ONCE):
            edge_index[row, start : start + _EDGES_AT_ONCE] = ends[start : start + _EDGES_AT_ONCE]
    origin = mapped_values(scratch.folder / "origin", np.dtype(np.int64))
    attrs = {}
    for name, values in data.attrs.items():
        path, shape = scratch.folder / f"{name}.npy", (total, *values.shape[1:])
        attrs[name] = np.lib.format.open_memmap(path, "w+", values.dtype, shape)
        for start in range(0, total, _EDGES_AT_ONCE):
            attrs[name][start : start + _EDGES_AT_ONCE] = values[origin[start : start + _EDGES_AT_ONCE]]
    for name in names:
        (scratch.folder / name).unlink()
    return EdgeData(edge_index, attrs, data.bfloat16)


def _both_directions(edge_index: Array, columns: list[Column]) -> Iterator[Records]:
    count = edge_index.shape[1]
    for first, (sources, targets) in ((0, edge_index), (count, edge_index[::-1])):
        for start in range(0, count, _EDGES_AT_ONCE):
            rows = sources[start : start + _EDGES_AT_ONCE]
            position = np.arange(first + start, first + start + len(rows), dtype=columns[1].dtype)
            yield rows, [targets[start : start + _EDGES_AT_ONCE], position]


def _without_repeats(group: SortedRows) -> tuple[Ids, Array, Array]:
    source = np.repeat(np.arange(group.first, group.first + len(group.limits) - 1), np.diff(group.limits))
    target, position = (column() for column in group.columns)
    order = np.lexsort((target, source))  # stable
    source, target = source[order], target[order]
    new = np.ones(len(order), bool)
    new[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[new], target[new], position[order[new]]
