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
from trainer.core.schema import HOMO_NODE, LONGEST_NAME, EdgeType, NodeType, check_word, type_name
from trainer.data.dataset import Dataset, EdgeData, NodeData, is_time
from trainer.data.edges import first_outside
from trainer.data.hold_out import hold_out_given
from trainer.data.options import MOST_CLASSES, SourceOptions
from trainer.data.raw_arrays import EDGE_NAMES, RawArray, RawArrays, RawGraph, link_arrays, sort_arrays, split_prefix
from trainer.data.undirected import both_ways
from trainer.data.work_arrays import mapped_file, slices
from trainer.store.manifest import NAME_PATTERN, RESERVED_ATTRS

_SPLIT_NAMES = {"valid": "val", "validation": "val"}  #: aliases of split names

_NOT_CLASSES = "option num_classes=0 keeps y as numbers that are not class labels"

_ROWS_AT_ONCE = 1 << 16  #: rows that are checked together, so that memory-mapped arrays are not read as a whole

_MOST_GRAPH_BYTES = 16 << 20  #: largest graph attribute in bytes; every host gets a copy


def build_dataset(raw: RawGraph, options: SourceOptions, fingerprint: str, scratch: Scratch | None = None) -> Dataset:
    """Check the arrays of ``raw``, and assign them to types, attributes and splits.

    Every edge type needs ``edge_index`` [2, E]. ``<split>_idx`` and ``<split>_mask`` become splits. An array with one
    row per node or edge becomes an attribute of its type; any other array becomes an attribute of the graph. With
    ``scratch``, added reverse edges are memory-mapped files in its folder. Links that are held out by a given split
    (``hold_out_given``) are taken out of the edges first. Raises ``DataError`` for arrays or options
    that contradict each other.
    """
    if options.num_classes is not None and not 0 <= options.num_classes <= MOST_CLASSES:
        raise DataError(
            f"{raw.name}: option num_classes must be from 0 to {MOST_CLASSES}, not {options.num_classes}; "
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
    if raw.hetero and not raw.edges:
        raise DataError(f"{raw.name}: no edges; a heterogeneous graph has arrays named source__relation__target")
    for of in (*raw.node_types, *raw.edges):
        words = [of] if isinstance(of, str) else [*of]
        for word in words:
            check_word(word, raw.name)
        if len(name := "__".join(words)) > LONGEST_NAME:
            raise DataError(
                f"{raw.name}: edge type {name[:20]}…{name[-20:]} has {len(name)} characters, more than "
                f"{LONGEST_NAME}; use shorter names"
            )

    native_nodes = {of: _native(arrays) for of, arrays in raw.nodes.items()}
    native_edges = {of: _native(arrays) for of, arrays in raw.edges.items()}
    graph = sort_arrays(replace(raw, plain=_native(raw.plain), nodes=native_nodes, edges=native_edges), options)
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
    graph_attrs, links = {}, link_arrays(graph.plain)
    for name, array in graph.plain.items():
        if array.bfloat16 or not _is_number(array.values) or not NAME_PATTERN.fullmatch(name):
            notes.append(f"{array.place}: left out, {array.description} belongs neither to nodes nor to edges")
        elif array.values.nbytes > _MOST_GRAPH_BYTES and name not in links:
            size = f"{array.values.nbytes / 1e6:.0f} MB"
            notes.append(
                f"{array.place}: left out, {array.description} has no row per node or edge, and {size} is too much to "
                "copy to every host"
            )
        else:
            graph_attrs[name] = array.values
    held_out |= {f"{type_name(of)}__{CLASSES}": _edge_classes(of, data, raw.name) for of, data in labelled.items()}
    if repeated := set(graph_attrs) & set(held_out):
        raise DataError(f"{raw.name}: graph attribute {sorted(repeated)[0]} already exists; rename it")
    graph_attrs |= held_out
    return Dataset(
        raw.name, nodes, edges, fingerprint, raw.hetero, graph_attrs, options.times, tuple(notes)
    )  # fmt: skip


def _native(arrays: RawArrays) -> RawArrays:
    # Numba kernels support no other byte order.
    return {
        name: array
        if array.values.dtype.isnative
        else replace(array, values=array.values.astype(array.values.dtype.newbyteorder("=")))
        for name, array in arrays.items()
    }


def _node_data(
    of: NodeType, graph: RawGraph, options: SourceOptions, notes: list[str], scratch: Scratch | None
) -> NodeData:  # fmt: skip
    num_nodes, arrays = graph.num_nodes[of], dict(graph.nodes.get(of, {}))

    # The arrays ``<split>_idx`` and ``<split>_mask``.
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
        values = array.values
        if values.ndim == 2 and values.dtype.kind == "b":
            if options.split is None or not 0 <= options.split < values.shape[1]:
                raise DataError(
                    f"{array.place}: the mask has {values.shape[1]} columns; choose one with option split (from 0)"
                )
            values = values[:, options.split]
        splits[name] = _split_ids(values, num_nodes, array.place)
    usual = [name for name in ("train", "val", "test") if name in splits]
    splits = {name: splits[name] for name in dict.fromkeys([*usual, *splits])}
    kept = _attrs(arrays, ("x", "y", *(options.time_attrs or ())), num_nodes, "nodes" + _of(of), notes)
    if "x" in kept:
        x = kept["x"]
        if x.values.ndim < 2:
            raise DataError(
                f"{x.place}: shape is {list(x.values.shape)}, expected [number of nodes, number of features]; "
                "reshape it, or give it another name"
            )
        for start in range(0, num_nodes if x.bfloat16 or x.values.dtype.kind in "fc" else 0, _ROWS_AT_ONCE):
            rows = x.values[start : start + _ROWS_AT_ONCE]
            finite = _finite(rows, x.bfloat16)
            if not finite.all():
                at = np.argwhere(~finite)[0]
                value = "NaN or infinity" if x.bfloat16 else rows[tuple(at)]
                rest = (x.values[k : k + _ROWS_AT_ONCE] for k in range(start, num_nodes, _ROWS_AT_ONCE))
                number = sum(each.size - int(np.count_nonzero(_finite(each, x.bfloat16))) for each in rest)
                more = f" (the first of {number:,} such values)" if number > 1 else ""
                raise DataError(
                    f"{x.place}: {value} at {[int(at[0]) + start, *at[1:].tolist()]}{more}; "
                    "features must be finite, replace NaN and infinity first"
                )
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


def _finite(rows: Array, bfloat16: bool) -> Array:
    return rows & 0x7F80 != 0x7F80 if bfloat16 else np.isfinite(rows)


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
    values = array.values
    if is_time(values, array.bfloat16):
        return replace(array, values=values.reshape(-1))
    if required:
        raise DataError(
            f"{array.place}: {'bfloat16' if array.bfloat16 else values.dtype} {list(values.shape)}, but times must be "
            "one integer (of 63 bits) per node; "
            "convert them, for example to seconds, rename the attribute, or leave it out of option time_attrs"
        )
    notes.append(f"{array.place}: kept as a plain attribute: times are one integer per node, not {array.description}")
    return array


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
    if requested == 0:
        return 0
    array = kept["y"]
    y, place, reason = array.values, array.place, ""
    if array.bfloat16:
        reason = "it is bfloat16"
    elif y.ndim != 1 and y.shape[1:] != (1,):
        reason = f"its shape is {list(y.shape)}"
    elif y.dtype.kind == "c":
        reason = f"its dtype is {y.dtype}"
    elif y.dtype.kind == "f":
        flat = y.reshape(-1)
        exact = 2.0 ** (np.finfo(y.dtype).nmant + 1)  # larger numbers are rounded to whole ones
        whole = np.isnan(flat) | ((abs(flat) < exact) & (flat == np.rint(flat)))
        if not whole.all():
            position = int(np.argmin(whole))
            large = f", or too large for one in {y.dtype}" * bool(abs(flat[position]) >= exact)
            reason = f"{flat[position]} at position {position} is not a whole number{large}"
    if reason:
        if requested is not None:
            raise DataError(f"{place}: y is not class labels: {reason}; leave out option num_classes to keep y")
        notes.append(f"{place}: kept, but not as class labels: {reason}")
        return 0

    # Labels as integers; NaN is no label.
    y = y.reshape(-1)
    if y.dtype.kind == "f":
        y = np.where(np.isnan(y), -1.0, y).astype(np.int64)
    if y.dtype.kind == "b":
        y = y.astype(np.int8)
    if len(y) and int(y.min()) < -1:
        position = int(np.argmax(y < -1))
        raise DataError(
            f"{place}: label {y[position]} at position {position}; classes start at 0, -1 means no label "
            f"({_NOT_CLASSES})"
        )
    kept["y"] = replace(array, values=y)

    # Their number, and labels of all nodes in splits.
    found, position = (int(y.max()) + 1, int(np.argmax(y))) if len(y) else (0, 0)
    if requested is None and found > len(y):
        raise DataError(
            f"{place}: label {found - 1} at position {position}, but the graph has only {len(y)} nodes; renumber the "
            f"classes from 0, or set option num_classes if the graph has that many classes ({_NOT_CLASSES})"
        )
    if requested is not None and requested < found:
        raise DataError(
            f"{place}: label {found - 1} at position {position} does not fit option num_classes={requested}"
        )
    for name, ids in splits.items():
        unlabelled = np.flatnonzero(y[ids] < 0)
        if len(unlabelled):
            raise DataError(
                f"{place}: split {name!r} holds node {ids[unlabelled[0]]} (position {unlabelled[0]}), "
                f"which has no label (-1); {len(unlabelled)} of {len(ids)} nodes of the split have no label"
            )
    return found if requested is None else requested


def _edge_data(of: EdgeType, graph: RawGraph, notes: list[str]) -> EdgeData:
    arrays = dict(graph.edges[of])
    if "edge_index" not in arrays:
        found = ", ".join(sorted(arrays)) or "nothing"
        raise DataError(f"{graph.name}: no edge_index{_of(of)}; expected integers [2, number of edges], found {found}")
    found_index = arrays.pop("edge_index")
    edge_index, where = found_index.values, found_index.place
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        hint = "; transpose it" if edge_index.ndim == 2 and edge_index.shape[1] == 2 else ""
        raise DataError(f"{where}: shape is {list(edge_index.shape)}, expected [2, number of edges]{hint}")
    if edge_index.dtype.kind not in "iu":
        raise DataError(f"{where}: dtype is {edge_index.dtype}, expected integers (int32 or int64)")
    for row, role, end in ((0, "source", of[0]), (1, "target", of[2])):
        position = int(first_outside(edge_index[row], graph.num_nodes[end]))
        if position >= 0:
            raise DataError(
                f"{where}: {role} [{row}, {position}] is {edge_index[row, position]}, "
                f"but node ids go from 0 to {graph.num_nodes[end] - 1}"
            )
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
    if most >= MOST_CLASSES:
        raise DataError(f"{where}: labels y of the edges {type_name(of)}: {most} is more than {MOST_CLASSES} classes")
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
        values = array.values
        per_row = values.ndim > 0 and len(values) == rows
        if not (per_row and _is_number(values)) and name not in needed:
            notes.append(
                f"{array.place}: left out, {array.description} is not one row of numbers for each of {rows} {of}"
            )
            continue
        if not NAME_PATTERN.fullmatch(name) or name in RESERVED_ATTRS or len(name) > LONGEST_NAME:
            raise DataError(f"{array.place}: an attribute cannot be called {name!r}; rename it")
        if not per_row:
            found = len(values) if values.ndim else 0
            raise DataError(f"{array.place}: {found} rows, but the graph has {rows} {of}; shapes must agree")
        if not _is_number(values):
            raise DataError(f"{array.place}: dtype is {values.dtype}, expected numbers or booleans of at most 64 bits")
        kept[name] = array
    return kept


def _is_number(values: Array) -> bool:
    """Return whether ``values`` are booleans or numbers of at most 64 bits (complex: 128 bits)."""
    return values.dtype.kind in "biufc" and values.dtype.itemsize <= (16 if values.dtype.kind == "c" else 8)


def _split_ids(values: Array, num_nodes: int, where: str) -> Ids:
    """Return the node ids of a split, int64 [n], from ids (order kept) or a boolean mask.

    Raises ``DataError`` for other arrays, ids out of range, and repeated ids.
    """
    if values.dtype.kind == "b":
        if values.shape != (num_nodes,):
            raise DataError(f"{where}: mask has shape {list(values.shape)}, expected [{num_nodes}]")
        return np.flatnonzero(values).astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(
            f"{where}: holds {values.dtype} {list(values.shape)}, "
            f"expected integer node ids [n] or a boolean mask [{num_nodes}]"
        )
    position = int(first_outside(values, num_nodes))
    if position >= 0:
        raise DataError(
            f"{where}: {values[position]} at position {position}, but node ids go from 0 to {num_nodes - 1}"
        )
    ids = values.astype(np.int64)
    order = np.argsort(ids, kind="stable")
    repeated = np.flatnonzero(np.diff(ids[order]) == 0)
    if len(repeated):
        first, second = order[repeated[0]], order[repeated[0] + 1]
        raise DataError(f"{where}: node {ids[first]} appears twice, at positions {first} and {second}")
    return ids
