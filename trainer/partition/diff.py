"""Compares two partition folders: whether they hold the same graph, and how their parts differ."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.schema import EdgeType, type_name
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.partition.restore import PartitionedGraph, restore_graph
from trainer.store.manifest import Manifest, read_manifest
from trainer.store.npy import rows_per_chunk


@dataclass(frozen=True)
class PartitionSummary:
    folder: str
    dataset: str
    num_parts: int
    algorithm: str
    edge_cut: float  #: share of all edges whose ends are in different parts, 0 to 1
    balance: float  #: nodes of the largest part / mean nodes of a part


@dataclass(frozen=True)
class PartitionDiff:
    first: PartitionSummary
    second: PartitionSummary
    difference: str  #: the first difference of the graphs; '' if they are the same
    same_edge_order: bool  #: whether edges have the same original ids in both; sampling draws by this order
    moved: float  #: share of nodes in another part, 0 to 1, part numbers matched to make it smallest; nan: other nodes

    @property
    def same_graph(self) -> bool:
        return not self.difference

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values. ``moved`` is null if the graphs have different nodes."""
        return {**asdict(self), "same_graph": self.same_graph, "moved": None if np.isnan(self.moved) else self.moved}


def diff_partitions(first: str | Path, second: str | Path) -> PartitionDiff:
    """Compare two partition folders by original ids.

    Graphs are the same if types, nodes, edges, attributes and splits are equal; edges may be numbered differently.
    Large arrays are written to the system's folder for temporary files.

    Raises:
        PartitionError: when a folder is incomplete or damaged.
    """
    manifests = read_manifest(first), read_manifest(second)
    with tempfile.TemporaryDirectory(prefix="gnnfleet-diff-") as work:
        folders = Path(work, "a"), Path(work, "b")
        for folder in folders:
            folder.mkdir()
        a, b = (restore_graph(place, folder) for place, folder in zip((first, second), folders, strict=True))
        difference = next(_differences(a.dataset, b.dataset), "")
        return PartitionDiff(
            first=_summary(first, manifests[0]),
            second=_summary(second, manifests[1]),
            difference=difference,
            same_edge_order=not difference and _same_order(a.dataset, b.dataset),
            moved=_moved(a, b),
        )


def _summary(folder: str | Path, manifest: Manifest) -> PartitionSummary:
    return PartitionSummary(
        str(folder), manifest.dataset, manifest.num_parts, manifest.algorithm, manifest.edge_cut, manifest.balance
    )


def _differences(a: Dataset, b: Dataset) -> Iterator[str]:
    for what, ours, theirs in (
        ("node types", set(a.nodes), set(b.nodes)),
        ("edge types", {type_name(of) for of in a.edges}, {type_name(of) for of in b.edges}),
        ("graph attributes", set(a.graph_attrs), set(b.graph_attrs)),
    ):
        if ours != theirs:
            yield f"{what}: {_names(ours - theirs)} only in the first, {_names(theirs - ours)} only in the second"
            return
    if a.hetero != b.hetero:
        yield "one graph is heterogeneous, the other is not"
    for node_type in a.nodes:
        yield from _node_differences(node_type, a.nodes[node_type], b.nodes[node_type])
    for edge_type in a.edges:
        yield from _edge_differences(edge_type, a.edges[edge_type], b.edges[edge_type])
    for name, values in a.graph_attrs.items():
        if not _equal(values, b.graph_attrs[name]):
            yield f"graph attribute {name} differs"


def _node_differences(of: str, a: NodeData, b: NodeData) -> Iterator[str]:
    if a.num_nodes != b.num_nodes:
        yield f"nodes of type {of}: {a.num_nodes:,} and {b.num_nodes:,}"
        return
    if a.num_classes != b.num_classes:
        yield f"nodes of type {of}: {a.num_classes} and {b.num_classes} classes"
    yield from _attr_differences(f"node of type {of}", a, b, None)
    if set(a.splits) != set(b.splits):
        yield f"nodes of type {of}: splits {_names(set(a.splits))} and {_names(set(b.splits))}"
        return
    for name, ids in a.splits.items():
        if not np.array_equal(ids, b.splits[name]):
            same = len(ids) == len(b.splits[name]) and np.array_equal(np.sort(ids), np.sort(b.splits[name]))
            yield f"nodes of type {of}: split {name} has " + ("another order" if same else "other nodes")


def _edge_differences(of: EdgeType, a: EdgeData, b: EdgeData) -> Iterator[str]:
    what = f"edges of type {type_name(of)}"
    if a.num_edges != b.num_edges:
        yield f"{what}: {a.num_edges:,} and {b.num_edges:,}"
        return
    orders = None
    if not np.array_equal(a.edge_index, b.edge_index):
        orders = _edge_order(a), _edge_order(b)
        for start in range(0, a.num_edges, 1 << 20):
            ours, theirs = (g.edge_index[:, o[start : start + (1 << 20)]] for g, o in zip((a, b), orders, strict=True))
            if len(wrong := np.flatnonzero((ours != theirs).any(axis=0))):
                lesser = min(tuple(map(int, each[::-1, wrong[0]])) for each in (ours, theirs))
                where = "first" if lesser == tuple(map(int, ours[::-1, wrong[0]])) else "second"
                yield f"{what}: {lesser[1]} -> {lesser[0]} is only, or more often, in the {where}"
                return
    yield from _attr_differences(f"edge of type {type_name(of)}", a, b, orders)


def _edge_order(data: EdgeData) -> Array:
    order = np.lexsort((data.edge_index[0], data.edge_index[1]))
    ends = data.edge_index[:, order]
    repeated = np.flatnonzero((ends[:, 1:] == ends[:, :-1]).all(axis=0))
    if not len(repeated) or not data.attrs:
        return order
    several = np.unique(np.concatenate([repeated, repeated + 1]))
    rows = [np.ascontiguousarray(values[order[several]]).reshape(len(several), -1) for values in _sorted(data.attrs)]
    columns = [row[:, column] for row in rows for column in range(row.shape[1])]
    order[several] = order[several][np.lexsort((*columns[::-1], ends[0, several], ends[1, several]))]
    return order


def _sorted(attrs: Mapping[str, Array]) -> list[Array]:
    return [attrs[name] for name in sorted(attrs)]


def _attr_differences(
    what: str, a: NodeData | EdgeData, b: NodeData | EdgeData, orders: tuple[Array, Array] | None
) -> Iterator[str]:
    """Yield the differences of attributes.

    ``orders``: for ``a`` and for ``b``, the order in which rows are compared; None: as stored.
    """
    if set(a.attrs) != set(b.attrs):
        ours, theirs = set(a.attrs), set(b.attrs)
        yield (
            f"attributes of each {what}: {_names(ours - theirs)} only in the first, {_names(theirs - ours)} only "
            "in the second"
        )
        return
    for name, values in a.attrs.items():
        other = b.attrs[name]
        kinds = [
            f"{'bfloat16' if name in data.bfloat16 else data.attrs[name].dtype} {list(data.attrs[name].shape)}"
            for data in (a, b)
        ]
        if kinds[0] != kinds[1]:
            yield f"attribute {name} of each {what}: {kinds[0]} and {kinds[1]}"
            continue
        if (row := _first_unequal(values, other, orders)) is not None:
            ids = [row, row] if orders is None else [int(order[row]) for order in orders]
            shown = " and ".join(_shown(array[at]) for array, at in zip((values, other), ids, strict=True))
            yield f"attribute {name} of {what} {ids[0]}: {shown}"


def _first_unequal(a: Array, b: Array, orders: tuple[Array, Array] | None) -> int | None:
    step = rows_per_chunk(a)
    for start in range(0, len(a), step):
        rows = slice(start, start + step)
        ours, theirs = (a[rows], b[rows]) if orders is None else (a[orders[0][rows]], b[orders[1][rows]])
        if not _equal(ours, theirs):
            unequal = ~((ours == theirs) | ((ours != ours) & (theirs != theirs))).reshape(len(ours), -1)
            return start + int(np.argmax(unequal.any(axis=1)))
    return None


def _equal(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _shown(row: Array) -> str:
    return np.array2string(np.asarray(row), threshold=4, edgeitems=2, precision=4)


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _same_order(a: Dataset, b: Dataset) -> bool:
    return all(np.array_equal(data.edge_index, b.edges[of].edge_index) for of, data in a.edges.items())


def _moved(a: PartitionedGraph, b: PartitionedGraph) -> float:
    """Match the parts of ``a`` and ``b`` one to one, and return the share of nodes outside the matched parts.

    A node is outside if its part in ``a`` is not matched with its part in ``b``. The matching makes the share as small
    as possible. Returns nan if the graphs have different numbers of nodes, or no nodes.
    """
    counts = [{of: nodes.num_nodes for of, nodes in graph.dataset.nodes.items()} for graph in (a, b)]
    if counts[0] != counts[1] or not a.dataset.num_nodes:
        return float("nan")
    common = np.zeros((a.num_parts, b.num_parts), np.int64)
    for of, part in a.parts.items():
        both = part.astype(np.int64) * b.num_parts + b.parts[of]
        common += np.bincount(both, minlength=common.size).reshape(common.shape)
    return 1 - _best_match(common) / a.dataset.num_nodes


def _best_match(common: Array) -> int:
    import networkx  # torch depends on it

    graph = networkx.Graph()
    for i, j in zip(*np.nonzero(common), strict=True):
        graph.add_edge(("a", int(i)), ("b", int(j)), weight=int(common[i, j]))
    matched = networkx.max_weight_matching(graph)
    return sum(int(graph.edges[edge]["weight"]) for edge in matched)


def render_diff(diff: PartitionDiff) -> str:
    lines = []
    if diff.same_graph:
        order = "" if diff.same_edge_order else "; edges are numbered differently, so that other neighbours are sampled"
        lines.append(f"same graph{order}")
    else:
        lines.append(f"different graphs: {diff.difference}")
    for each in (diff.first, diff.second):
        lines.append(
            f"{each.folder}: {each.dataset}, {each.num_parts} parts by {each.algorithm}, cut {each.edge_cut:.2%}, "
            f"balance {each.balance:.3f}"
        )
    if not np.isnan(diff.moved):
        lines.append(f"{diff.moved:.2%} of the nodes are in another part (part numbers matched)")
    return "\n".join(lines)
