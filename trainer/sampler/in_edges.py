"""The in-edges of nodes of all types as one array, for rules that look at all neighbours of many nodes.

Where this process has the topology of all parts, the rows of all nodes are there from the start. Elsewhere rows are
requested when a kernel lacks them, and kept for later batches: the graph does not change.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainer.core.arrays import Array, Ids, read_only
from trainer.core.errors import DataError
from trainer.core.memory import available_memory
from trainer.core.schema import EdgeType, NodeType
from trainer.sampler import neighbor_kernels
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.requests import GraphAccess
from trainer.sampler.settings import bound_here
from trainer.sampler.types import HopRequest, RowRequest, TimeRule
from trainer.store.part_store import PartStore

_LITTLE_MEMORY = 4 << 30  #: bytes that are available if nobody knows how many

_EDGES_AT_ONCE = 1 << 22  #: edges of the rows that are requested at once: servers limit the size of an answer

_KEPT = 2  #: number of ``_InEdges`` of a graph, those used last

ALWAYS = np.iinfo(np.int64).min  #: time of edges without one


class Rows(NamedTuple):
    """In-edges of nodes that are numbered over all types, as kernels read them. Its values never change.

    m: number of numbered nodes; e: number of known in-edges.
    """

    begin: Any  #: int64 [m], the first of the node's edges; -1: its edges are not known
    end: Any  #: int64 [m]
    src: Any  #: int32|int64 [e], sources by number
    weight: Any  #: float64 [e], or empty
    time: Any  #: int64 [e], or empty
    degree: Any  #: int32 [m], in-edges by all edge types
    kind: Any  #: int8|int16 [m], index of the node type, or empty: the graph has one type


class Hidden(NamedTuple):
    """Edges that a batch does not follow, between nodes that are numbered as in ``Rows``."""

    targets: Any  #: int64 [h], ascending
    begin: Any  #: int64 [h + 1], the first source of each target
    sources: Any  #: int64 [m], ascending for each target


@dataclass(frozen=True)
class Walked:
    """Which edges are followed, and what is read of them."""

    edge_types: tuple[EdgeType, ...]  #: in the order of the schema
    weight: str | None  #: edge attribute; an edge without it has weight 1
    time: TimeRule | None


class _InEdges:
    """The in-edges of one graph that ``walked`` describes. Thread-safe."""

    def __init__(self, store: PartStore, walked: Walked):
        self._schema, self._walked, self._types = store.manifest, walked, list(store.manifest.nodes)
        sizes = [spec.num_nodes for spec in store.manifest.nodes.values()]
        self._first = dict(zip(self._types, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._kind: np.dtype[Any] = np.dtype(np.int8 if len(self._types) < 128 else np.int16)
        self._most = (available_memory() or _LITTLE_MEMORY) // 8
        self._lock = threading.Lock()
        size = 8 * sum(spec.num_edges for spec in store.manifest.edges.values())
        as_it_is = len(store.topology) == len(store.manifest.edges) == 1
        self._whole = self._rows_of(store) if store.whole_topology and (as_it_is or size < self._most) else None
        self._clear()

    def view(
        self, access: GraphAccess, of: NodeType, ids: Ids, begins: bool, exclude: Mapping[EdgeType, tuple[Ids, Ids]]
    ) -> tuple[Rows, Hidden, Ids, Ids | None]:
        """Return known rows, hidden edges, the numbers of the nodes ``ids``, and each number's global id for ``id_of``.

        ``begins``: this begins a batch. Rows that have become too many are forgotten first. ``exclude``: targets and
        sources by edge type. All edges between them are hidden, of whatever type.
        """
        if self._whole is not None:
            hidden = self._hidden(exclude, lambda of, ids: ids + self._first[of])
            return self._whole, hidden, ids + self._first[of], None
        with self._lock:
            if begins and sum(each.nbytes for each in self._known) > self._most:
                self._clear()
            numbers = self._numbers(access, of, ids)
            hidden = self._hidden(exclude, partial(self._numbers, access))
            return Rows(*map(read_only, self._known)), hidden, numbers, self._ids

    def id_of(self, of: NodeType, numbers: Ids, ids: Ids | None) -> Ids:
        """Return the global ids of nodes of one type. ``ids``: from ``view``."""
        return numbers - self._first[of] if ids is None else ids[numbers]

    def add(self, access: GraphAccess, ids: Ids, kinds: Array) -> None:
        """Request the rows of those nodes, given by global id and index of the type, that are not known yet.

        Raises ``DataError`` for a weight that is negative or not finite.
        """
        with self._lock:
            for kind in np.unique(kinds).tolist():
                nodes = np.unique(self._numbers(access, self._types[kind], ids[kinds == kind]))
                nodes = nodes[self._known.begin[nodes] < 0]
                pieces = np.cumsum(self._known.degree[nodes], dtype=np.int64) // _EDGES_AT_ONCE
                for some in np.split(nodes, np.flatnonzero(np.diff(pieces)) + 1):
                    self._request(access, self._types[kind], some)

    def _hidden(
        self, exclude: Mapping[EdgeType, tuple[Ids, Ids]], numbers: Callable[[NodeType, Ids], Ids]
    ) -> Hidden:  # fmt: skip
        hidden = [of for of in self._walked.edge_types if of in exclude]
        none = np.empty(0, np.int64)
        targets = np.concatenate([none, *(numbers(of[2], exclude[of][0]) for of in hidden)])
        sources = np.concatenate([none, *(numbers(of[0], exclude[of][1]) for of in hidden)])
        order = np.lexsort((sources, targets))
        distinct, begin = np.unique(targets[order], return_index=True)
        return Hidden(*map(read_only, (distinct, np.append(begin, len(order)), sources[order])))

    def _clear(self) -> None:
        none = np.empty(0, np.int64)
        self._tables, self._ids, self._used = RelabelTables(self._schema), none, 0
        self._known = Rows(
            none, none, np.empty(0, np.int32), np.empty(0), none, np.empty(0, np.int32), np.empty(0, self._kind)
        )

    def _numbers(self, access: GraphAccess, of: NodeType, ids: Array) -> Ids:
        """Return the numbers of nodes, and number those that are new."""
        local, new = np.empty(len(ids), np.int32), np.empty(len(ids), np.int64)
        new = new[: self._tables.table(of).relabel(ids, len(self._ids), local, new)]
        if len(new):
            known, none = self._known, np.full(len(new), -1)
            try:
                degree = access.gather([RowRequest(of, new, ("in_degree",))])[0]["in_degree"]
            except BaseException:
                self._clear()  # the table has numbers for these nodes, which others would get, too
                raise
            self._ids = np.concatenate([self._ids, new])
            self._known = known._replace(
                begin=np.concatenate([known.begin, none]),
                end=np.concatenate([known.end, none]),
                degree=np.concatenate([known.degree, degree.astype(np.int32)]),
                kind=np.concatenate([known.kind, np.full(len(new), self._types.index(of), self._kind)]),
            )
        return local.astype(np.int64)

    def _request(self, access: GraphAccess, of: NodeType, nodes: Ids) -> None:
        """Request the rows of nodes of one type, and append them to the known rows."""
        weight, time, ids = self._walked.weight, self._walked.time, self._ids[nodes]
        types = [each for each in self._walked.edge_types if each[2] == of]
        weighted = [each for each in types if weight in self._schema.edges[each].attrs]
        timed = [each for each in types if time is not None and bound_here(time, self._schema.edges[each])]
        by_edge = {*weighted, *(timed if time is not None and time.on == "edge" else ())}
        samples = access.sample_hops([HopRequest(each, ids, -1, 0, 0, with_edge=each in by_edge) for each in types])
        pieces = []
        for each, sample in zip(types, samples, strict=True):
            edges = np.empty(0, np.int64) if sample.edge is None else sample.edge.astype(np.int64, copy=False)
            columns: dict[str, Array] = {"src": self._numbers(access, each[0], sample.src).astype(np.int32)}
            if weight is not None:
                columns["weight"] = np.ones(len(sample.src))
                if each in weighted:
                    (found,) = access.gather([RowRequest(each, edges, (weight,))])
                    columns["weight"] = _checked(found[weight], each, weight)
            if time is not None:
                columns["time"] = np.full(len(sample.src), ALWAYS)
                if each in timed:
                    sources = sample.src.astype(np.int64, copy=False)
                    where = RowRequest(each, edges, (time.attr,)), RowRequest(each[0], sources, (time.attr,))
                    (found,) = access.gather([where[time.on == "node"]])
                    columns["time"] = found[time.attr].astype(np.int64)
            pieces.append((sample.counts, columns))
        counts, columns = _joined(len(nodes), pieces)
        known, used = self._known, self._used + int(counts.sum(dtype=np.int64))
        for name, values in columns.items():
            held = getattr(known, name)
            if used > len(held):  # views of other threads keep the shorter array
                held = np.concatenate([held, np.empty(2 * used - len(held), held.dtype)])
                known = known._replace(**{name: held})
            held[self._used : used] = values
        begin, end = known.begin.copy(), known.end.copy()
        end[nodes] = self._used + np.cumsum(counts, dtype=np.int64)
        begin[nodes] = end[nodes] - counts
        self._known, self._used = known._replace(begin=begin, end=end), used

    def _rows_of(self, store: PartStore) -> Rows:
        """Return the in-edges of all nodes. Of one part and one edge type these are the arrays of the part."""
        weight, time, parts = self._walked.weight, self._walked.time, store.topology.values()
        spans = sum(spec.num_nodes for spec in store.manifest.nodes.values())
        all_counts, all_columns, degrees, kinds = [], [], [], []
        for number, (of, spec) in enumerate(store.manifest.nodes.items()):
            pieces, degree = [], np.zeros(spec.num_nodes, np.int64)
            for each in (each for each in store.manifest.edges if each[2] == of):
                edges, first = [part.edges[each] for part in parts], self._first[each[0]]
                counts = _chained([np.diff(one.indptr) for one in edges])
                degree += counts
                if each not in self._walked.edge_types:
                    continue
                wide = np.int32 if spans < 2**31 else np.int64  # for the numbers of the nodes of all types
                src = _chained([one.indices for one in edges]).astype(wide, copy=False)
                columns = {"src": src + np.array(first, src.dtype) if first else src}
                if weight is not None:
                    known = weight in store.manifest.edges[each].attrs
                    found = _chained([one.attrs[weight] for one in edges]) if known else np.ones(len(src))
                    columns["weight"] = _checked(found, each, weight)
                if time is not None:
                    times = [one.src_times if time.on == "node" else one.attrs for one in edges]
                    known = bound_here(time, store.manifest.edges[each])
                    found = _chained([one[time.attr] for one in times]) if known else np.full(len(src), ALWAYS)
                    columns["time"] = found.astype(np.int64, copy=False)
                pieces.append((counts, columns))
            counts, columns = _joined(spec.num_nodes, pieces)
            all_counts.append(counts)
            all_columns.append(columns)
            degrees.append(degree.astype(np.int32))
            kinds.append(np.full(spec.num_nodes, number, self._kind))
        none = np.empty(0, np.int64)
        columns = {
            name: _chained([each[name] for each in all_columns if name in each]) for name in ("src", "weight", "time")
        }
        ends = np.concatenate([[0], np.cumsum(_chained(all_counts), dtype=np.int64)])
        only = len(kinds) == 1
        return Rows(
            *map(
                read_only,
                (
                    ends[:-1], ends[1:], columns["src"], columns["weight"], columns["time"],
                    _chained(degrees), none.astype(self._kind) if only else _chained(kinds),
                ),
            )
        )  # fmt: skip


class InEdgesOf:
    """The ``_InEdges`` of a graph that were used last. Thread-safe."""

    def __init__(self, store: PartStore):
        self._store, self._lock = store, threading.Lock()
        self._made: OrderedDict[Walked, _InEdges] = OrderedDict()

    def __call__(self, walked: Walked) -> _InEdges:
        with self._lock:
            if walked not in self._made:
                self._made[walked] = _InEdges(self._store, walked)
            self._made.move_to_end(walked)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
            return self._made[walked]


def _checked(weights: Array, of: EdgeType, name: str) -> Array:
    """Return weights as float64. Raises ``DataError`` if one is negative or not finite."""
    found = weights.astype(np.float64, copy=False)
    if len(found) and not 0 <= found.min() <= found.max() < np.inf:
        raise DataError(
            f"{name!r} of {of} has the weight {found.min()} or {found.max()}; weights must be finite and not negative"
        )
    return found


def _chained(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.int32), *arrays][len(arrays) > 0 :])


def _joined(num_rows: int, pieces: Sequence[tuple[Array, dict[str, Array]]]) -> tuple[Array, dict[str, Array]]:
    """Join the rows of the same nodes by several edge types, in the order of the types.

    ``pieces``: for each edge type the number of edges of each node, and columns of the edges. Returns the same of all.
    """
    if len(pieces) == 1:
        return pieces[0]
    counts = np.zeros(num_rows, np.int64)
    for more, _ in pieces:
        counts += more
    begin = np.cumsum(counts) - counts
    names = {
        name: np.result_type(*(columns[name] for _, columns in pieces)) for name in (pieces[0][1] if pieces else ())
    }
    joined = {name: np.empty(int(counts.sum()), dtype) for name, dtype in names.items()}
    at = np.arange(num_rows)
    for more, columns in pieces:
        for name, out in joined.items():
            neighbor_kernels.scatter_runs(read_only(columns[name]), read_only(more), at, begin, out)
        begin += more
    return counts, joined
