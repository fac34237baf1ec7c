"""Arrays as read from a dataset's source, and their assignment to nodes, edges or the graph as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.files import read_json
from trainer.core.graph_attrs import CATEGORIES
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.options import SourceOptions

SPLIT_SUFFIXES = ("_idx", "_mask")


@dataclass(frozen=True)
class RawArray:
    """One array of a dataset's source, and where it was read from."""

    values: Array
    place: str  #: file, or file and name within it, for messages
    bfloat16: bool = False  #: ``values`` are uint16 with the bits of bfloat16

    @property
    def rows(self) -> int:
        return len(self.values) if self.values.ndim else 0

    @property
    def description(self) -> str:
        return f"{'bfloat16' if self.bfloat16 else self.values.dtype} {list(self.values.shape)}"


RawArrays = Mapping[str, RawArray]


@dataclass(frozen=True)
class RawGraph:
    """A graph as read from a dataset's source: arrays grouped by the node or edge type in their name.

    ``plain``: arrays whose names contain no type, such as those of a homogeneous graph.
    """

    name: str
    plain: RawArrays = field(default_factory=dict)  #: all arrays of a homogeneous graph; otherwise those without a type
    nodes: Mapping[NodeType, RawArrays] = field(default_factory=dict)
    edges: Mapping[EdgeType, RawArrays] = field(default_factory=dict)  #: including ``edge_index``
    num_nodes: Mapping[NodeType, int] = field(default_factory=dict)  #: types whose number of nodes the source states
    hetero: bool = False
    notes: tuple[str, ...] = ()  #: messages to the user about arrays left out

    @property
    def node_types(self) -> tuple[NodeType, ...]:
        """All node types that have a number of nodes or an array in the source, or are an end of an edge type."""
        ends = [end for source, _, target in self.edges for end in (source, target)]
        return tuple(dict.fromkeys([*self.num_nodes, *self.nodes, *ends]))


def read_data_json(path: Path) -> Any:
    """Parse a JSON file. Raises ``DataError`` if it cannot be read."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


def split_prefix(name: str) -> str | None:
    """Return the split in an array's name (``train`` for ``train_idx`` and ``train_mask``), or None."""
    suffix = next((suffix for suffix in SPLIT_SUFFIXES if name.endswith(suffix)), None)
    return name.removesuffix(suffix) if suffix else None


def by_name(found: Iterable[tuple[str, RawArray]]) -> dict[str, RawArray]:
    """Make a dict from (name, array) pairs. Raises ``DataError`` for a repeated name."""
    arrays: dict[str, RawArray] = {}
    for name, array in found:
        if name in arrays:
            raise DataError(f"{array.place}: {name} is also in {arrays[name].place}; remove one")
        arrays[name] = array
    return arrays


EDGE_NAMES = ("edge_attr", "edge_weight", "edge_time", "edge_split")  #: names that always belong to edges

_LINKS = "_label_index"  #: suffix of T.RandomLinkSplit's links; the names of their labels end in `_label`


def link_arrays(arrays: RawArrays) -> dict[str, RawArray]:
    """Return the arrays for link prediction: links, ``…_label_index`` [2, m], and their labels, ``…_label`` [m]."""
    links = {
        name: array
        for name, array in arrays.items()
        if name.endswith(_LINKS)
        and array.values.ndim == 2
        and len(array.values) == 2
        and array.values.dtype.kind in "iu"
    }
    labels = [name.removesuffix("_index") for name in links]
    return links | {name: arrays[name] for name in labels if name in arrays}


def sort_arrays(raw: RawGraph, options: SourceOptions) -> RawGraph:
    """Assign every array to a node type, an edge type or the graph, and count the nodes of each type.

    Raises ``DataError`` when the type of an array or the number of nodes cannot be determined.
    """
    if not raw.hetero:
        return raw if raw.edges else _homogeneous(raw, options)
    notes, plain = list(raw.notes), dict(raw.plain)
    if "edge_index" in plain:
        notes.append(f"{plain.pop('edge_index').place}: left out, as the graph has typed edges")
    counts = {of: count for of in raw.node_types if (count := _known_nodes(raw, of)) is not None}
    target = _target(plain, counts, raw, options)
    nodes: dict[NodeType, dict[str, RawArray]] = {of: dict(arrays) for of, arrays in raw.nodes.items()}
    if target is not None:
        own = nodes.setdefault(target, {})
        for name, array in list(plain.items()):
            if name.endswith(f"__{CATEGORIES}"):
                continue
            if _belongs_to_nodes(name) or target not in counts or array.rows == counts[target]:
                if name in own:
                    raise DataError(f"{array.place}: {name} of {target} is also in {own[name].place}; remove one")
                own[name] = plain.pop(name)
    found = replace(raw, plain=plain, nodes=nodes, notes=tuple(notes))
    num_nodes: dict[NodeType, int] = {}
    for of in raw.node_types:
        if (known := _known_nodes(found, of)) is None:
            raise DataError(
                f"{raw.name}: the number of nodes of type {of!r} is unknown; add num_nodes.json {{{of!r}: number, …}}, "
                f"or an array {of}__x"
            )
        num_nodes[of] = known
    edges = {}
    for edge_type, arrays in raw.edges.items():
        links = link_arrays(arrays)
        plain |= {f"{type_name(edge_type)}__{name}": array for name, array in links.items()}
        edges[edge_type] = {name: array for name, array in arrays.items() if name not in links}
    return replace(found, plain=plain, edges=edges, num_nodes=num_nodes)


def _homogeneous(raw: RawGraph, options: SourceOptions) -> RawGraph:
    if "edge_index" not in raw.plain:
        found = ", ".join(sorted(raw.plain)) or "nothing"
        raise DataError(f"{raw.name}: no edge_index; expected integers [2, number of edges], found {found}")
    rows = [raw.plain[name].rows for name in ("x", "y") if name in raw.plain and raw.plain[name].values.ndim]
    if options.num_nodes is not None:
        num_nodes = options.num_nodes
        if not 0 <= num_nodes < 1 << 63:
            raise DataError(f"{raw.name}: option num_nodes is {num_nodes}, expected the number of nodes")
    elif HOMO_NODE in raw.num_nodes:
        num_nodes = raw.num_nodes[HOMO_NODE]
    elif rows:
        num_nodes = rows[0]
    else:  # not the largest id in the edges, since the last nodes may have no edges
        raise DataError(f"{raw.name}: the number of nodes is unknown without x and y; give option num_nodes")
    shape = raw.plain["edge_index"].values.shape
    num_edges = shape[1] if len(shape) == 2 else -1
    links = link_arrays(raw.plain)
    owners = {
        name: "" if name in links else _owner(name, array, num_nodes, num_edges) for name, array in raw.plain.items()
    }
    nodes, edges, plain = (
        {name: array for name, array in raw.plain.items() if owners[name] == owner} for owner in ("node", "edge", "")
    )
    return replace(
        raw, plain=plain, nodes={HOMO_NODE: nodes}, edges={HOMO_EDGE: edges}, num_nodes={HOMO_NODE: num_nodes}
    )


def _owner(name: str, array: RawArray, num_nodes: int, num_edges: int) -> str:
    if name == "edge_index" or name in EDGE_NAMES:
        return "edge"
    if name in ("x", "y") or split_prefix(name) is not None:
        return "node"
    rows = array.rows if array.values.ndim else -1
    if rows == num_edges and (rows != num_nodes or name.startswith("edge_")):
        return "edge"
    return "node" if rows == num_nodes else ""


def _belongs_to_nodes(name: str) -> bool:
    return name in ("x", "y") or split_prefix(name) is not None


def _target(plain: RawArrays, counts: Mapping[NodeType, int], raw: RawGraph, options: SourceOptions) -> NodeType | None:
    """Return the node type of x, y and splits in ``plain``: option ``target``, or else the only type that fits.

    A type fits if it has as many nodes as these arrays have rows. ``counts``: number of nodes of each type.

    Returns None if ``plain`` has no such array and ``target`` is not set. Raises ``DataError`` if no type or several
    types fit.
    """
    if options.target is not None or not any(map(_belongs_to_nodes, plain)):
        return options.target
    if len(raw.node_types) == 1:
        return raw.node_types[0]
    rows = {array.rows for name, array in plain.items() if _belongs_to_nodes(name) and not name.endswith("_idx")}
    fitting = [of for of in raw.node_types if rows <= {counts.get(of)}]
    if len(fitting) != 1:
        names = ", ".join(name for name in plain if _belongs_to_nodes(name))
        what = "fit several node types: " + ", ".join(fitting) if fitting else "fit the number of nodes of no type"
        raise DataError(f"{raw.name}: {names} {what}; give option target, the node type they belong to")
    return fitting[0]


def _known_nodes(raw: RawGraph, of: NodeType) -> int | None:
    """Return the number of nodes of a type, or None if it is unknown.

    Returns the first of these that exists: the number that the source states, the number of rows of x, that of y, and
    the number of rows of the other attributes if all have equally many.
    """
    if of in raw.num_nodes:
        return raw.num_nodes[of]
    arrays = {name: array for name, array in raw.nodes.get(of, {}).items() if not name.endswith("_idx")}
    for name in ("x", "y"):
        if name in arrays:
            return arrays[name].rows
    rows = {array.rows for array in arrays.values()}
    return rows.pop() if len(rows) == 1 else None
