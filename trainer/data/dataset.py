"""``Dataset``, a graph in memory, and the checks that arrays from any source must pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType
from trainer.data.edges import first_outside
from trainer.store.manifest import NAME_PATTERN, RESERVED_ATTRS

NOT_CLASSES = "option num_classes=0 keeps y as numbers that are not class labels"

_ROWS_AT_ONCE = 1 << 16  #: rows that are checked together, so that memory-mapped arrays are not read as a whole


@dataclass(frozen=True)
class NodeData:
    num_nodes: int
    attrs: Mapping[str, Array] = field(default_factory=dict)  #: name -> [num_nodes, …], such as `x` and `y`
    splits: Mapping[str, Ids] = field(default_factory=dict)  #: name -> node ids, in the order of the source
    num_classes: int = 0  #: if > 0, `y` is integer [num_nodes], -1 = no label; 0: no `y`, or not class labels
    bfloat16: frozenset[str] = frozenset()  #: attributes stored as uint16 with the bits of bfloat16


@dataclass(frozen=True)
class EdgeData:
    edge_index: Array  #: int32|int64 [2, E]; row 0: sources, row 1: targets; messages flow from source to target
    attrs: Mapping[str, Array] = field(default_factory=dict)  #: name -> [E, …]: features, weights, times
    bfloat16: frozenset[str] = frozenset()  #: attributes stored as uint16 with the bits of bfloat16

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])


@dataclass(frozen=True)
class Dataset:
    """One graph. Its arrays may be memory-mapped and are treated as read-only."""

    name: str
    nodes: Mapping[NodeType, NodeData]
    edges: Mapping[EdgeType, EdgeData]
    fingerprint: str  #: sha256 of the name, the options, and the sizes and mtimes of the source files
    hetero: bool = False  #: False: the only types are HOMO_NODE and HOMO_EDGE
    graph_attrs: Mapping[str, Array] = field(default_factory=dict)  #: arrays that belong to the graph as a whole
    time_attrs: tuple[str, ...] = ("time",)  #: node attributes with integer times, for temporal sampling
    notes: tuple[str, ...] = ()  #: messages to the user about reading the source, such as arrays left out

    @classmethod
    def homogeneous(cls, name: str, nodes: NodeData, edges: EdgeData, fingerprint: str, **more: Any) -> Dataset:
        return cls(name, {HOMO_NODE: nodes}, {HOMO_EDGE: edges}, fingerprint, **more)

    @property
    def num_nodes(self) -> int:
        return sum(data.num_nodes for data in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(data.num_edges for data in self.edges.values())


def check_edge_index(edge_index: Array, num_nodes: tuple[int, int], where: str) -> None:
    """Raise ``DataError`` unless ``edge_index`` is integer [2, E] and its node ids are in range.

    ``num_nodes``: the number of nodes of the source type and of the target type.
    """
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        hint = "; transpose it" if edge_index.ndim == 2 and edge_index.shape[1] == 2 else ""
        raise DataError(f"{where}: shape is {list(edge_index.shape)}, expected [2, number of edges]{hint}")
    if edge_index.dtype.kind not in "iu":
        raise DataError(f"{where}: dtype is {edge_index.dtype}, expected integers (int32 or int64)")
    for row, role in ((0, "source"), (1, "target")):
        position = int(first_outside(edge_index[row], num_nodes[row]))
        if position >= 0:
            raise DataError(
                f"{where}: {role} [{row}, {position}] is {edge_index[row, position]}, "
                f"but node ids go from 0 to {num_nodes[row] - 1}"
            )


def check_attr(name: str, values: Array, rows: int, of: str, where: str) -> None:
    """Raise ``DataError`` unless ``values`` has ``rows`` rows of numbers and ``name`` is a valid attribute name.

    ``of`` names the rows in messages, such as `nodes of type 'paper'`.
    """
    if not NAME_PATTERN.fullmatch(name) or name in RESERVED_ATTRS:
        raise DataError(f"{where}: an attribute cannot be called {name!r}; rename it")
    if values.ndim == 0 or len(values) != rows:
        found = len(values) if values.ndim else 0
        raise DataError(f"{where}: {found} rows, but the graph has {rows} {of}; shapes must agree")
    if not is_number(values):
        raise DataError(f"{where}: dtype is {values.dtype}, expected numbers or booleans of at most 64 bits")


def is_number(values: Array) -> bool:
    """Return whether ``values`` are booleans or numbers of at most 64 bits (complex: 128 bits)."""
    return values.dtype.kind in "biufc" and values.dtype.itemsize <= (16 if values.dtype.kind == "c" else 8)


def check_features(x: Array, bfloat16: bool, where: str) -> None:
    """Raise ``DataError`` unless ``x`` has at least two dimensions, [N, F, …], and is finite.

    ``bfloat16``: whether ``x`` is uint16 with the bits of bfloat16 numbers.
    """
    if x.ndim < 2:
        raise DataError(
            f"{where}: shape is {list(x.shape)}, expected [number of nodes, number of features]; "
            "reshape it, or give it another name"
        )
    for start in range(0, len(x) if bfloat16 or x.dtype.kind in "fc" else 0, _ROWS_AT_ONCE):
        rows = x[start : start + _ROWS_AT_ONCE]
        finite = _finite(rows, bfloat16)
        if not finite.all():
            at = np.argwhere(~finite)[0]
            value = "NaN or infinity" if bfloat16 else rows[tuple(at)]
            rest = (x[k : k + _ROWS_AT_ONCE] for k in range(start, len(x), _ROWS_AT_ONCE))
            number = sum(each.size - int(np.count_nonzero(_finite(each, bfloat16))) for each in rest)
            more = f" (the first of {number:,} such values)" if number > 1 else ""
            raise DataError(
                f"{where}: {value} at {[int(at[0]) + start, *at[1:].tolist()]}{more}; "
                "features must be finite, replace NaN and infinity first"
            )


def _finite(rows: Array, bfloat16: bool) -> Array:
    return rows & 0x7F80 != 0x7F80 if bfloat16 else np.isfinite(rows)


def is_time(values: Array, bfloat16: bool) -> bool:
    """Return whether ``values`` are integers below 2**63 of shape [N] or [N, 1].

    ``bfloat16``: whether ``values`` are the bits of bfloat16 numbers, for which the result is False.
    """
    integers = values.dtype.kind in "iu" and not bfloat16 and not (values.size and int(values.max()) >= 2**63)
    return integers and (values.ndim == 1 or values.shape[1:] == (1,))


def check_time(values: Array, bfloat16: bool, where: str) -> Array:
    """Return times as an integer array [N]. Raises ``DataError`` if ``values`` are not times."""
    if not is_time(values, bfloat16):
        found = f"{'bfloat16' if bfloat16 else values.dtype} {list(values.shape)}"
        raise DataError(
            f"{where}: {found}, but times must be one integer (of 63 bits) per node; "
            "convert them, for example to seconds, rename the attribute, or leave it out of option time_attrs"
        )
    return values.reshape(-1)


def class_label_problem(y: Array) -> str:
    """Return why ``y`` is not one class label per node, or '' if it is."""
    if y.ndim != 1 and y.shape[1:] != (1,):
        return f"its shape is {list(y.shape)}"
    if y.dtype.kind == "c":
        return f"its dtype is {y.dtype}"
    if y.dtype.kind == "f":
        flat = y.reshape(-1)
        whole = np.isnan(flat) | (np.isfinite(flat) & (flat == np.rint(flat)))
        if not whole.all():
            position = int(np.argmin(whole))
            return f"{flat[position]} at position {position} is not a whole number"
    return ""


def class_labels(y: Array, where: str) -> tuple[Array, int]:
    """Return labels as an integer array [N] (-1 = no label), and the number of classes.

    ``y`` must have one label per node (``class_label_problem`` checks that). NaN becomes -1. Raises ``DataError`` for
    labels below -1.
    """
    y = y.reshape(-1)
    if y.dtype.kind == "f":
        y = np.where(np.isnan(y), -1.0, y).astype(np.int64)
    if y.dtype.kind == "b":
        y = y.astype(np.int8)
    if len(y) and int(y.min()) < -1:
        position = int(np.argmax(y < -1))
        raise DataError(
            f"{where}: label {y[position]} at position {position}; classes start at 0, -1 means no label "
            f"({NOT_CLASSES})"
        )
    return y, int(y.max()) + 1 if len(y) else 0


def check_num_classes(num_classes: int | None, y: Array, found: int, where: str) -> int:
    """Return the number of classes: ``num_classes`` if given, else ``found``.

    Raises ``DataError`` if a label is not below ``num_classes`` or, without ``num_classes``, if there are more classes
    than nodes.
    """
    position = int(np.argmax(y)) if len(y) else 0
    if num_classes is None and found > len(y):
        raise DataError(
            f"{where}: label {found - 1} at position {position}, but the graph has only {len(y)} nodes; renumber the "
            f"classes from 0, or set option num_classes if the graph has that many classes ({NOT_CLASSES})"
        )
    if num_classes is not None and num_classes < found:
        raise DataError(
            f"{where}: label {found - 1} at position {position} does not fit option num_classes={num_classes}"
        )
    return found if num_classes is None else num_classes


def split_ids(values: Array, num_nodes: int, where: str) -> npt.NDArray[np.int64]:
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
    return _without_repeats(values.astype(np.int64), where)


def _without_repeats(ids: npt.NDArray[np.int64], where: str) -> npt.NDArray[np.int64]:
    order = np.argsort(ids, kind="stable")
    repeated = np.flatnonzero(np.diff(ids[order]) == 0)
    if len(repeated):
        first, second = order[repeated[0]], order[repeated[0] + 1]
        raise DataError(f"{where}: node {ids[first]} appears twice, at positions {first} and {second}")
    return ids


def check_labelled(y: Array, splits: Mapping[str, npt.NDArray[np.int64]], where: str) -> None:
    """Raise ``DataError`` when a split contains a node without a label (-1)."""
    for name, ids in splits.items():
        unlabelled = np.flatnonzero(y[ids] < 0)
        if len(unlabelled):
            raise DataError(
                f"{where}: split {name!r} holds node {ids[unlabelled[0]]} (position {unlabelled[0]}), "
                f"which has no label (-1); {len(unlabelled)} of {len(ids)} nodes of the split have no label"
            )
