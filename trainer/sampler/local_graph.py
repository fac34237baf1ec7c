"""``LocalGraph``: samples one hop and reads attributes in the parts on this host, from memory maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.errors import PartitionError
from trainer.core.rounding import take_scaled
from trainer.core.schema import AnyType, EdgeType
from trainer.sampler import neighbor_kernels
from trainer.sampler.neighbor import sample_rows
from trainer.sampler.requests import GraphAccess, cut_request, merge_samples
from trainer.sampler.row_index import RowPlacement, SourceCodes, locate, put_rows
from trainer.sampler.settings import blank_rows, check_type, row_spec
from trainer.sampler.types import HopRequest, HopSample, RowRequest
from trainer.store.manifest import LOOPLESS_DEGREE
from trainer.store.part_store import BookKey, EdgePart, EndpointTable, NodePart, Part, PartStore
from trainer.store.read_ahead import touch_neighbours, touch_rows


class LocalGraph(GraphAccess):
    """Answers requests from the opened parts of a ``PartStore``. Thread-safe."""

    def __init__(self, store: PartStore):
        self.store = store
        self.books = store.books
        self._codes = SourceCodes(store.manifest.num_parts, 0)
        numbers = range(self._codes.num_parts)
        self._own, self._topology = (
            read_only(np.array([-1, *(part if part in parts else -1 for part in numbers), -1], np.int32))
            for parts in (store.parts, store.topology)
        )
        self._singles: dict[tuple[int, EdgeType, str], Array] = {}
        self._loop_counts: dict[tuple[int, AnyType], Array] = {}

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """Return sampled neighbours of nodes in the opened parts, one answer per request.

        Raises ``PartitionError`` for a node of another part or an unknown type or attribute, ``DataError`` for a weight
        that is negative or not finite.
        """
        return [self._sample(request) for request in requests]

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        """Return attributes of nodes or edges in the opened parts: a mapping of names to arrays [n, …] per request.

        Raises ``PartitionError``.
        """
        found: list[Mapping[str, Array]] = []
        for request in requests:
            out = self.new_rows(request)
            all_1d = all(values.ndim == 1 for values in out.values())
            placed = self._by_part(request.of, request.ids, self._topology if all_1d else self._own)
            self.fill(request.of, out, placed)
            found.append(out)
        return found

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        """Return for each i whether an edge ``src[i]`` -> ``dst[i]`` exists: bool [n].

        Raises ``PartitionError`` for a target of another part.
        """
        check_type(self.store, edge_type)
        found: npt.NDArray[np.bool_] = np.zeros(len(dst), np.bool_)
        for part_id, placed in self.by_part(edge_type[2], dst).items():
            nodes, edges = _ends(self.store.topology[part_id], edge_type)
            at = placed.at
            order = at[np.lexsort((src[at], dst[at]))]
            neighbor_kernels.find_edges(edges.indptr, edges.indices, dst[order] - nodes.start, src[order], order, found)
        return found

    def endpoints(self, edge_type: EdgeType, edges: Ids) -> tuple[Ids, Ids]:
        """Return sources and targets of edges, given by original id: original node ids, int64 [n] each.

        Raises ``PartitionError`` if no opened part stores the source and target of an edge.
        """
        check_type(self.store, edge_type)
        table = EndpointTable(edge_type)
        src, dst = np.empty(len(edges), np.int64), np.empty(len(edges), np.int64)
        for part_id, placed in self._by_part(table, edges, self._own).items():
            ends = self.store.parts[part_id].edges[edge_type].endpoints
            assert ends is not None
            if self.store.larger_than_memory:
                touch_rows([(ends, placed.rows)])
            both = ends[placed.rows]
            src[placed.at], dst[placed.at] = both[:, 0], both[:, 1]
        return src, dst

    def _sample(self, request: HopRequest) -> HopSample:
        check_type(self.store, request.edge_type)
        num_sources = self.store.manifest.nodes[request.edge_type[0]].num_nodes
        groups = self.by_part(request.edge_type[2], request.nodes)
        if self.store.larger_than_memory:
            for part_id, placed in groups.items():
                nodes, edges = _ends(self.store.topology[part_id], request.edge_type)
                of_edges = [edges.indices]
                if request.weight is not None and request.weight in edges.attrs:
                    of_edges.append(edges.attrs[request.weight])
                if request.bound is not None:
                    times = edges.src_times if request.bound.on == "node" else edges.attrs
                    of_edges += [times[request.bound.attr]] if request.bound.attr in times else []
                if request.with_edge and request.orig_edge:
                    of_edges.append(edges.orig_id)
                touch_rows([(nodes.orig_id, placed.rows)])
                touch_neighbours(edges.indptr, of_edges, placed.rows)
        answers = [
            (placed.at, sample_rows(*self._read(self.store.topology[p], request), cut, num_sources))
            for p, placed in groups.items()
            for cut in [request if len(groups) == 1 else cut_request(request, placed.at)]
        ]
        return answers[0][1] if len(groups) == 1 else merge_samples(len(request.nodes), answers, request.with_edge)

    def degrees(self, edge_type: EdgeType, nodes: Ids) -> Ids:
        """Return the number of in-edges of each node, int64 [n]; 0 for nodes of parts that are not opened."""
        check_type(self.store, edge_type)
        degree = np.zeros(len(nodes), np.int64)
        for part in self.store.topology.values():
            own, edges = _ends(part, edge_type)
            at = np.flatnonzero((nodes >= own.start) & (nodes < own.start + own.num_nodes))
            rows = nodes[at] - own.start
            degree[at] = edges.indptr[rows + 1] - edges.indptr[rows]
        return degree

    def _read(self, part: Part, request: HopRequest) -> tuple[NodePart, EdgePart]:
        nodes, edges = _ends(part, request.edge_type)
        name = request.weight
        # float16 weights are converted to float32 at first use, because the kernels cannot read float16.
        if name is None or name not in edges.attrs or edges.attrs[name].dtype != np.float16:
            return nodes, edges
        key = (part.part_id, request.edge_type, name)
        if key not in self._singles:
            self._singles[key] = edges.attrs[name].astype(np.float32)
        return nodes, replace(edges, attrs={**edges.attrs, name: self._singles[key]})

    def new_rows(self, request: RowRequest) -> dict[str, Array]:
        """Return uninitialized arrays for the answer to a request.

        Raises ``PartitionError`` for an unknown type or attribute.
        """
        specs = self._row_specs(request)
        return {name: slabs.empty((len(request.ids), *shape), dtype) for name, (dtype, shape) in specs.items()}

    def no_rows(self, request: RowRequest) -> dict[str, Array]:
        """Return placeholders for the arrays of ``new_rows``: read-only zeros that take no memory."""
        specs = self._row_specs(request)
        return {name: blank_rows(len(request.ids), *spec) for name, spec in specs.items()}

    def _row_specs(self, request: RowRequest) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        check_type(self.store, request.of)
        return {name: row_spec(self.store, request.of, name) for name in request.attrs}

    def fill(self, of: AnyType, out: Mapping[str, Array], placed: Mapping[int, RowPlacement]) -> None:
        """Copy rows of parts on this host into the arrays ``out`` [n, …].

        ``placed``: for each part, which rows to copy, and to which positions. Raises ``PartitionError`` for a part that
        is not on this host.
        """
        all_1d = all(values.ndim == 1 for values in out.values())
        parts = self.store.topology if all_1d else self.store.parts
        if foreign := set(placed) - set(parts):
            raise self._foreign(of, foreign)
        if self.store.larger_than_memory:
            touch_rows([(array, rows.rows) for p, rows in placed.items() for array in _mapped(parts[p], of, out)])
        for part_id, rows in placed.items():
            part = parts[part_id]
            for name, values in out.items():
                if name in ("in_degree", LOOPLESS_DEGREE):
                    degree = _in_degree(part, of, rows.rows)
                    if name == LOOPLESS_DEGREE:
                        degree -= self._loops(part, of)[rows.rows]
                    put_rows(degree, RowPlacement.in_order(rows.at), values)
                elif name in (table := part.table(of)).scales:
                    take_scaled(table.attrs[name], table.scales[name], rows.rows, rows.at, values)
                else:
                    put_rows(_column(table, name), rows, values)

    def _loops(self, part: Part, of: AnyType) -> Array:
        """Return the number of self loops of each node of a part: int32 [nodes]. The first call reads all edges."""
        found = self._loop_counts.get((part.part_id, of))
        if found is None:
            found = np.zeros(part.nodes[of].num_nodes, np.int32)  # type: ignore[index]  # only nodes have degrees
            for edge_type, edges in part.edges.items():
                if edge_type[0] == edge_type[2] == of:
                    neighbor_kernels.count_loops(edges.indptr, edges.indices, part.nodes[of].start, found)
            self._loop_counts[part.part_id, of] = found
        return found

    def by_part(self, of: AnyType, ids: Ids) -> Mapping[int, RowPlacement]:
        """Group ids by part.

        Raises ``PartitionError`` if this host does not store the topology of a part.
        """
        return self._by_part(of, ids, self._topology)

    def _by_part(self, of: BookKey, ids: Ids, of_part: Array) -> Mapping[int, RowPlacement]:
        wrong, placed = locate(ids, self.books[of].offsets, of_part, self._codes)
        if wrong >= 0:
            raise self._foreign(of, set(self.books[of].part_of(ids).tolist()) - set(self.store.parts))
        return placed

    def _foreign(self, of: BookKey, part_ids: set[int]) -> PartitionError:
        book = self.books[of]
        unknown = {p for p in part_ids if not 0 <= p < book.num_parts}
        wrong = f"ids outside 0..{book.size - 1}" if unknown else f"ids of parts {sorted(part_ids)}"
        return PartitionError(f"asked for {wrong} of {of!r}; this process holds parts {sorted(self.store.parts)}")


def _ends(part: Part, edge_type: EdgeType) -> tuple[NodePart, EdgePart]:
    return part.nodes[edge_type[2]], part.edges[edge_type]


def _column(table: NodePart | EdgePart, name: str) -> Array:
    return table.orig_id if name == "orig_id" else table.attrs[name]


def _mapped(part: Part, of: AnyType, names: Iterable[str]) -> Iterator[Array]:
    table = part.table(of)
    for name in names:
        if name not in ("in_degree", LOOPLESS_DEGREE):
            yield _column(table, name)
            if name in table.scales:
                yield table.scales[name]


def _in_degree(part: Part, of: AnyType, rows: Ids) -> Ids:
    """Return the in-degree of each node, summed over all edge types that end at the node: int64 [n]."""
    degree = np.zeros(len(rows), np.int64)
    for edge_type, edges in part.edges.items():
        if edge_type[2] == of:
            degree += edges.indptr[rows + 1] - edges.indptr[rows]
    return degree
