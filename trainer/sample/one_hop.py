"""One hop on the parts of this process: neighbours and rows straight from the memory maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trainer import slabs
from trainer.arrays import Array, Ids, read_only
from trainer.errors import PartitionError
from trainer.sample import kernels
from trainer.sample.draw import sample_rows
from trainer.sample.grouping import cut_request, group_by, merge_rows, merge_samples
from trainer.sample.specs import check_type, row_spec
from trainer.sample.types import EdgeList, HopRequest, HopSample, RowRequest
from trainer.schema import AnyType, EdgeType
from trainer.store.part import EdgePart, NodePart, Part, PartStore

_FEW_PARTS = 4  #: all of which are looked into for every id
_LINEAR_PARTS = 16  #: among which an id's is found without a binary search


class LocalGraph:
    """Answers for the opened parts of a ``PartStore``; safe to call from several threads."""

    def __init__(self, store: PartStore):
        self.store = store
        self.books = store.books
        self._singles: dict[tuple[int, EdgeType, str], Array] = {}

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """Neighbours of owned nodes.

        Raises ``PartitionError`` for a node of another part and for an unknown type or attribute,
        ``DataError`` for a weight that is negative or not a number.
        """
        return [self._sample(request) for request in requests]

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        """Rows of owned nodes or edges; attribute name -> [n, …]. Raises ``PartitionError``."""
        return [self._gather(request) for request in requests]

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        """Whether there is an edge ``src[i]`` -> ``dst[i]`` (owned): bool [n]. Raises ``PartitionError``."""
        check_type(self.store, edge_type)
        found: npt.NDArray[np.bool_] = np.zeros(len(dst), np.bool_)
        for part_id, at in self._by_part(edge_type[2], dst).items():
            nodes, edges = _ends(self.store.parts[part_id], edge_type)
            order = at[np.lexsort((src[at], dst[at]))]
            kernels.find_edges(edges.indptr, edges.indices, dst[order] - nodes.start, src[order], order, found)
        return found

    def edge_list(self, edge_type: EdgeType) -> EdgeList:
        """All edges of a type that end in the opened parts. Raises ``PartitionError``."""
        check_type(self.store, edge_type)
        ends = [_ends(part, edge_type) for part in self.store.parts.values()]
        nothing = [np.empty(0, np.int64)]
        return EdgeList(
            src=np.concatenate(nothing + [edges.indices for _, edges in ends], dtype=np.int64),
            dst=np.concatenate(nothing + [_targets(*pair) for pair in ends], dtype=np.int64),
            orig_id=np.concatenate(nothing + [edges.orig_id for _, edges in ends], dtype=np.int64),
        )

    def _sample(self, request: HopRequest) -> HopSample:
        check_type(self.store, request.edge_type)
        num_sources = self.store.manifest.nodes[request.edge_type[0]].num_nodes
        groups = self._by_part(request.edge_type[2], request.nodes)
        answers = [
            (at, sample_rows(*self._read(self.store.parts[p], request), cut, num_sources))
            for p, at in groups.items()
            for cut in [request if len(groups) == 1 else cut_request(request, at)]
        ]
        return answers[0][1] if len(groups) == 1 else merge_samples(len(request.nodes), answers, request.with_edge)

    def _read(self, part: Part, request: HopRequest) -> tuple[NodePart, EdgePart]:
        """What to sample from. Weights in half precision, which kernels cannot read, are converted once."""
        nodes, edges = _ends(part, request.edge_type)
        name = request.weight
        if name is None or name not in edges.attrs or edges.attrs[name].dtype != np.float16:
            return nodes, edges
        key = (part.part_id, request.edge_type, name)
        if key not in self._singles:
            self._singles[key] = edges.attrs[name].astype(np.float32)
        return nodes, replace(edges, attrs={**edges.attrs, name: self._singles[key]})

    def _gather(self, request: RowRequest) -> Mapping[str, Array]:
        check_type(self.store, request.of)
        if request.attrs == ("orig_id",) and len(self.store.parts) <= _FEW_PARTS:
            found = self._orig_ids_of_few(request)
            if found is not None:
                return {"orig_id": found}
        groups = self._by_part(request.of, request.ids)
        return {name: self._rows(request, name, groups) for name in request.attrs}

    def _rows(self, request: RowRequest, name: str, groups: Mapping[int, Ids]) -> Array:
        if name == "orig_id":
            return self._orig_ids(request, groups)
        dtype, shape = row_spec(self.store, request.of, name)
        answers = [(at, *_column(self.store.parts[p], request.of, name, request.ids[at])) for p, at in groups.items()]
        return merge_rows(len(request.ids), answers, dtype, shape)

    def _orig_ids(self, request: RowRequest, groups: Mapping[int, Ids]) -> Ids:
        out = slabs.empty(len(request.ids), np.int64)
        for part_id, at in groups.items():
            table = _table(self.store.parts[part_id], request.of)
            kernels.take_numbers(read_only(table.orig_id), table.start, request.ids, at, out)
        return out

    def _orig_ids_of_few(self, request: RowRequest) -> Ids | None:
        """Without finding out each id's part first; None when some are of other parts."""
        out, taken = slabs.empty(len(request.ids), np.int64), 0
        for part in self.store.parts.values():
            table = _table(part, request.of)
            taken += kernels.take_numbers_between(read_only(table.orig_id), table.start, request.ids, out)
        return out if taken == len(out) else None

    def _by_part(self, of: AnyType, ids: Ids) -> dict[int, Ids]:
        if len(self.store.parts) == 1:
            ((part_id, _),) = self.store.parts.items()
            start, end = self.books[of].range_of(part_id)
            if len(ids) == 0 or (ids.min() >= start and ids.max() < end):
                return {part_id: np.arange(len(ids))}
        book = self.books[of]
        few = book.num_parts <= _LINEAR_PARTS
        groups = group_by(kernels.owners(book.offsets, ids) if few else book.part_of(ids))
        if foreign := set(groups) - set(self.store.parts):
            raise self._foreign(of, foreign)
        return groups

    def _foreign(self, of: AnyType, part_ids: set[int]) -> PartitionError:
        book = self.books[of]
        unknown = {p for p in part_ids if not 0 <= p < book.num_parts}
        what = f"ids outside 0..{book.size - 1}" if unknown else f"ids of parts {sorted(part_ids)}"
        return PartitionError(f"asked for {what} of {of!r}; this process holds parts {sorted(self.store.parts)}")


def _ends(part: Part, edge_type: EdgeType) -> tuple[NodePart, EdgePart]:
    """The targets and the edges of one edge type."""
    return part.nodes[edge_type[2]], part.edges[edge_type]


def _targets(nodes: NodePart, edges: EdgePart) -> Ids:
    return np.repeat(nodes.start + np.arange(nodes.num_nodes), np.diff(edges.indptr))


def _column(part: Part, of: AnyType, name: str, ids: Ids) -> tuple[Array, Ids]:
    """The array to take from and the rows to take."""
    table = _table(part, of)
    rows = ids - table.start
    if name == "in_degree":
        return _in_degree(part, of, rows), np.arange(len(rows))
    return table.attrs[name], rows


def _table(part: Part, of: AnyType) -> NodePart | EdgePart:
    return part.nodes[of] if isinstance(of, str) else part.edges[of]


def _in_degree(part: Part, of: AnyType, rows: Ids) -> Ids:
    """In-edges of every type, int64 [n]."""
    degree = np.zeros(len(rows), np.int64)
    for edge_type, edges in part.edges.items():
        if edge_type[2] == of:
            degree += edges.indptr[rows + 1] - edges.indptr[rows]
    return degree
