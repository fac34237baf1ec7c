"""Checks the arrays read from a dataset's source, and builds a ``Dataset`` from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.core.graph_attrs import CLASSES, is_task_table
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_NODE, EdgeType, NodeType, check_word, type_name
from trainer.data import dataset as checks
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.hold_out import hold_out_given
from trainer.data.options import SourceOptions
from trainer.data.raw_arrays import EDGE_NAMES, RawArray, RawArrays, RawGraph, link_arrays, sort_arrays, split_prefix
from trainer.data.undirected import both_ways
from trainer.data.work_arrays import mapped_file, slices
from trainer.store.manifest import NAME_PATTERN

_SPLIT_NAMES = {"valid": "val", "validation": "val"}  #: aliases of split names

_MOST_CLASSES = 1 << 20

_MOST_GRAPH_BYTES = 16 << 20  #: largest graph attribute in bytes; every host gets a copy


def build_dataset(raw: RawGraph, options: SourceOptions, fingerprint: str, scratch: Scratch | None = None) -> Dataset:
    """Check the arrays of ``raw``, and assign them to types, attributes and splits.

    Every edge type needs ``edge_index`` [2, E]. ``<split>_idx`` and ``<split>_mask`` become splits. An array with one
    row per node or edge becomes an attribute of its type; any other array becomes an attribute of the graph. With
    ``scratch``, added reverse edges are memory-mapped files in its folder. Links that are held out by a given split
    (``hold_out_given``) are taken out of the edges first. Raises ``DataError`` for arrays or options
    that contradict each other.
    """
    _check_options(raw, options)
    if raw.hetero and not raw.edges:
        raise DataError(f"{raw.name}: no edges; a heterogeneous graph has arrays named source__relation__target")
    for of in (*raw.node_types, *raw.edges):
        for word in [of] if isinstance(of, str) else of:
            check_word(word, raw.name)
    graph = sort_arrays(_native(raw), options)
    notes = [*graph.notes]
    nodes = {of: _node_data(of, graph, options, notes, scratch) for of in graph.node_types}
    for name in options.times:
        if name != "time" and not any(name in data.attrs for data in nodes.values()):
            raise DataError(f"{raw.name}: option time_attrs names {name!r}, but no node type has this attribute")
    edges = {of: _edge_data(of, graph, notes) for of in graph.edges}
    counts = {of: data.num_nodes for of, data in nodes.items()}
    edges, held_out, more = hold_out_given(edges, counts, options, raw.name, scratch)
    notes += more
    labelled = {of: data for of, data in edges.items() if "y" in data.attrs and data.attrs["y"].dtype.kind in "iu"}
    if options.undirected:
        only = {
            of: data for of, data in edges.items() if any(is_task_table(end, graph.plain) for end in (of[0], of[2]))
        }
        others = {of: data for of, data in edges.items() if of not in only}
        edges = {**both_ways(others, counts, options.reverse_types, raw.name, scratch), **only}
    graph_attrs = _graph_attrs(graph.plain, notes)
    held_out |= {f"{type_name(of)}__{CLASSES}": _edge_classes(of, data, raw.name) for of, data in labelled.items()}
    if repeated := set(graph_attrs) & set(held_out):
        raise DataError(f"{raw.name}: graph attribute {sorted(repeated)[0]} already exists; rename it")
    graph_attrs |= held_out
    return Dataset(
        raw.name, nodes, edges, fingerprint, raw.hetero, graph_attrs, options.times, tuple(notes)
    )  # fmt: skip


def _check_options(raw: RawGraph, options: SourceOptions) -> None:
    if options.num_classes is not None and not 0 <= options.num_classes <= _MOST_CLASSES:
        raise DataError(
            f"{raw.name}: option num_classes must be from 0 to {_MOST_CLASSES}, not {options.num_classes}; "
            "it is the width of the model's last layer"
        )
    if options.hetero is not None and options.hetero != raw.hetero:
        found = "heterogeneous" if raw.hetero else "homogeneous: no array is named source__relation__target"
        raise DataError(f"{raw.name}: option hetero={str(options.hetero).lower()}, but the graph is {found}")
    if options.target is not None and options.target not in (raw.node_types if raw.hetero else ()):
        known = ", ".join(raw.node_types) if raw.hetero else "none, the graph is homogeneous"
        raise DataError(f"{raw.name}: option target={options.target}, but the node types are: {known}")
    if raw.hetero and options.num_nodes is not None:
        raise DataError(
            f"{raw.name}: option num_nodes is for homogeneous graphs; write num_nodes.json {{type: number}} instead"
        )
    if options.reverse_types and not (raw.hetero and options.undirected):
        raise DataError(f"{raw.name}: option reverse_types needs a heterogeneous graph and option undirected")


def _native(raw: RawGraph) -> RawGraph:
    def converted(arrays: RawArrays) -> RawArrays:
        # Numba kernels support no other byte order.
        return {
            name: array
            if array.values.dtype.isnative
            else replace(array, values=array.values.astype(array.values.dtype.newbyteorder("=")))
            for name, array in arrays.items()
        }

    nodes = {of: converted(arrays) for of, arrays in raw.nodes.items()}
    edges = {of: converted(arrays) for of, arrays in raw.edges.items()}
    return replace(raw, plain=converted(raw.plain), nodes=nodes, edges=edges)


def _node_data(
    of: NodeType, graph: RawGraph, options: SourceOptions, notes: list[str], scratch: Scratch | None
) -> NodeData:  # fmt: skip
    num_nodes, arrays = graph.num_nodes[of], dict(graph.nodes.get(of, {}))
    splits = _splits(arrays, num_nodes, options)
    kept = _attrs(arrays, ("x", "y", *(options.time_attrs or ())), num_nodes, "nodes" + _of(of), notes)
    if "x" in kept:
        x = kept["x"]
        checks.check_features(x.values, x.bfloat16, x.place)
        if x.values.ndim > 2:
            notes.append(f"{x.place}: shape is {list(x.values.shape)}; the bundled models need [nodes, features]")
        if options.normalize_features:
            kept["x"] = _normalized(x, None if scratch is None else scratch.folder / f"normalized-{of}.npy")
    for name in {*options.times} & {*kept}:
        kept[name] = _time(kept[name], options.time_attrs is not None, notes)
    requested = options.num_classes if of == _num_classes_type(graph, options) else None
    num_classes = _classes(kept, splits, requested, notes)
    attrs = {name: array.values for name, array in kept.items()}
    return NodeData(num_nodes, attrs, splits, num_classes, _bfloat16(kept))


def _normalized(x: RawArray, path: Path | None) -> RawArray:
    """Divide each row by the sum of its absolute values, unless that is 0. Returns floats.

    The result is a memory-mapped file ``path``, or an array in memory.
    """
    dtype = x.values.dtype if x.values.dtype.kind == "f" else np.dtype(np.float32)
    out = np.empty(x.values.shape, dtype) if path is None else mapped_file(path, x.values.shape, dtype)
    for piece in slices(len(out), 8 * (out.size // max(1, len(out)))):
        rows = x.values[piece]
        rows = (rows.astype(np.uint32) << 16).view(np.float32) if x.bfloat16 else rows
        sums = np.abs(rows.astype(np.float64)).sum(axis=tuple(range(1, rows.ndim)), keepdims=True)
        out[piece] = rows / np.where(sums == 0, 1, sums)
    return replace(x, values=out, bfloat16=False)


def _time(array: RawArray, required: bool, notes: list[str]) -> RawArray:
    """Return times as one integer per node, [N].

    If ``array`` contains no integer times, raises ``DataError`` if ``required``; otherwise appends a message to
    ``notes`` and returns the array unchanged.
    """
    if not required and not checks.is_time(array.values, array.bfloat16):
        notes.append(
            f"{array.place}: kept as a plain attribute: times are one integer per node, not {array.description}"
        )
        return array
    return replace(array, values=checks.check_time(array.values, array.bfloat16, array.place))


def _num_classes_type(graph: RawGraph, options: SourceOptions) -> NodeType | None:
    if options.num_classes is None or not graph.hetero:
        return HOMO_NODE
    labelled = [of for of in graph.node_types if "y" in graph.nodes.get(of, {})]
    if options.num_classes == 0 and not labelled and any("y" in arrays for arrays in graph.edges.values()):
        return None  # numbers as labels of edges
    if options.target is None and len(labelled) != 1:
        raise DataError(f"{graph.name}: option num_classes needs option target: {len(labelled)} node types have y")
    return options.target or labelled[0]


def _classes(kept: dict[str, RawArray], splits: Mapping[str, Ids], requested: int | None, notes: list[str]) -> int:
    """Convert attribute ``y`` in ``kept`` to class labels, in place, and return the number of classes.

    ``requested``: option ``num_classes``, 0 to leave ``y`` unchanged. If ``y`` does not contain class labels, raises
    ``DataError`` if ``requested`` is given; otherwise adds a message to ``notes`` and returns 0.
    """
    if "y" not in kept:
        return requested or 0
    y = kept["y"]
    reason = "it is bfloat16" if y.bfloat16 else checks.class_label_problem(y.values)
    if requested == 0:
        return 0
    if reason:
        if requested is not None:
            raise DataError(f"{y.place}: y is not class labels: {reason}; leave out option num_classes to keep y")
        notes.append(f"{y.place}: kept, but not as class labels: {reason}")
        return 0
    labels, found = checks.class_labels(y.values, y.place)
    num_classes = checks.check_num_classes(requested, labels, found, y.place)
    checks.check_labelled(labels, splits, y.place)
    kept["y"] = replace(y, values=labels)
    return num_classes


def _edge_data(of: EdgeType, graph: RawGraph, notes: list[str]) -> EdgeData:
    arrays = dict(graph.edges[of])
    if "edge_index" not in arrays:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise DataError(f"{graph.name}: no edge_index{_of(of)}; expected integers [2, number of edges], found {found}")
    found_index = arrays.pop("edge_index")
    edge_index = found_index.values
    checks.check_edge_index(edge_index, (graph.num_nodes[of[0]], graph.num_nodes[of[2]]), found_index.place)
    if edge_index.dtype not in (np.int32, np.int64):
        edge_index = edge_index.astype(np.int64)
    kept = _attrs(arrays, EDGE_NAMES, edge_index.shape[1], "edges" + _of(of), notes)
    return EdgeData(edge_index, {name: array.values for name, array in kept.items()}, _bfloat16(kept))


def _edge_classes(of: EdgeType, data: EdgeData, where: str) -> Array:
    """Return the number of classes of integer labels of edges, int64 [1]; 0 if they are several per edge."""
    y, most = data.attrs["y"], -1
    if y.size != data.num_edges:
        return np.zeros(1, np.int64)
    for piece in slices(data.num_edges):
        if int(y[piece].min()) < -1:
            raise DataError(f"{where}: labels y of the edges {type_name(of)}: classes start at 0, -1 means no label")
        most = max(most, int(y[piece].max()))
    if most >= _MOST_CLASSES:
        raise DataError(f"{where}: labels y of the edges {type_name(of)}: {most} is more than {_MOST_CLASSES} classes")
    return np.array([most + 1], np.int64)


def _of(of: NodeType | EdgeType) -> str:
    return "" if HOMO_NODE in (of, of[0]) else f" of type {type_name(of)}"


def _bfloat16(kept: RawArrays) -> frozenset[str]:
    return frozenset(name for name, array in kept.items() if array.bfloat16)


def _attrs(arrays: RawArrays, needed: tuple[str, ...], rows: int, of: str, notes: list[str]) -> dict[str, RawArray]:
    """Return the arrays that have one row of numbers for each node or edge of a type.

    Other arrays are left out, with a message in ``notes``. Raises ``DataError`` if an array left out is named in
    ``needed``. ``rows``: number of these nodes or edges. ``of``: their name in messages.
    """
    kept = {}
    for name, array in arrays.items():
        fits = array.values.ndim > 0 and len(array.values) == rows and checks.is_number(array.values)
        if fits or name in needed:
            checks.check_attr(name, array.values, rows, of, array.place)
            kept[name] = array
        else:
            notes.append(
                f"{array.place}: left out, {array.description} is not one row of numbers for each of {rows} {of}"
            )
    return kept


def _graph_attrs(arrays: RawArrays, notes: list[str]) -> dict[str, Array]:
    kept: dict[str, Array] = {}
    links = link_arrays(arrays)
    for name, array in arrays.items():
        if array.bfloat16 or not checks.is_number(array.values) or not NAME_PATTERN.fullmatch(name):
            notes.append(f"{array.place}: left out, {array.description} belongs neither to nodes nor to edges")
        elif array.values.nbytes > _MOST_GRAPH_BYTES and name not in links:
            size = f"{array.values.nbytes / 1e6:.0f} MB"
            notes.append(
                f"{array.place}: left out, {array.description} has no row per node or edge, and {size} is too much to "
                "copy to every host"
            )
        else:
            kept[name] = array.values
    return kept


def _splits(arrays: dict[str, RawArray], num_nodes: int, options: SourceOptions) -> dict[str, Ids]:
    """Remove the arrays ``<split>_idx`` and ``<split>_mask`` from ``arrays``, and return the node ids of each split."""
    splits: dict[str, Ids] = {}
    for key in sorted(key for key in arrays if split_prefix(key) is not None):
        prefix, array = str(split_prefix(key)), arrays.pop(key)
        name = _SPLIT_NAMES.get(prefix, prefix)
        if name in splits:
            raise DataError(f"{array.place}: split {name!r} is given twice, as ids and as a mask; remove one")
        if key.endswith("_mask") and array.values.dtype.kind != "b":
            raise DataError(
                f"{array.place}: a mask of {array.values.dtype}, expected booleans; "
                f"name it {prefix}_idx if it holds ids"
            )
        splits[name] = checks.split_ids(_column(array, options), num_nodes, array.place)
    usual = [name for name in ("train", "val", "test") if name in splits]
    return {name: splits[name] for name in dict.fromkeys([*usual, *splits])}


def _column(array: RawArray, options: SourceOptions) -> Array:
    values = array.values
    if values.ndim != 2 or values.dtype.kind != "b":
        return values
    if options.split is None or not 0 <= options.split < values.shape[1]:
        raise DataError(f"{array.place}: the mask has {values.shape[1]} columns; choose one with option split (from 0)")
    return values[:, options.split]
