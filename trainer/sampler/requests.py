"""The operations on a graph, each a ``GraphRequest``: how it is sent, split by the hosts that own parts, and merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.errors import ServiceError, WireError
from trainer.core.schema import EdgeType
from trainer.sampler import neighbor_kernels
from trainer.sampler.settings import check_type, row_spec
from trainer.sampler.types import HopRequest, HopSample, RowRequest
from trainer.store.part_store import BookKey, EndpointTable, PartStore
from trainer.wire.columns import Column, FormOf, restored, rounded
from trainer.wire.frames import MAX_ARRAYS, Kind, Message
from trainer.wire.request import A, Body, Request, check_ids, narrowed, pack, widened_ids

_MAX_ROWS = 1 << 25  #: nodes, excluded edges and allowed sources of all sample requests of a message

_MAX_FANOUT = (1 << 31) - 1  # counts are int32

PAIR_LOOKS = 16  #: a pair of nodes whose edges are excluded takes as long as a look at so many edges: it is sorted

_ROWS: Body[list[dict[str, Column]]] = Body(list[dict[str, Column]])

Places = Mapping[int, Array]  #: what a host answers of each array of ``GraphRequest.owned``: index -> positions


class GraphRequest(Request[A], frozen=True):
    """An operation on a graph. Each host that owns rows of it answers a share, which is a request of the same type."""

    of_topology: ClassVar[bool] = False  #: whether a host with the topology of all parts can answer the whole request

    def answer(self, graph: GraphAccess) -> A:
        raise NotImplementedError

    def owned(self, store: PartStore) -> list[tuple[BookKey, Ids]]:
        """Return arrays of the ids whose owners answer. Each array is split by itself.

        Raises ``PartitionError`` for an unknown type or attribute.
        """
        raise NotImplementedError

    def share(self, split: RequestSplit, host: int, places: Places) -> GraphRequest[A]:
        """Return the share of a host, the ids at ``places``."""
        raise NotImplementedError

    def merge(self, answers: Sequence[tuple[Places, A]]) -> A:
        """Merge the answers to all shares."""
        raise NotImplementedError

    def check_answer(self, answer: A, store: PartStore, host: str) -> None:
        """Raise ``ServiceError`` if the answer of ``host`` does not fit the partition of ``store``."""


class SampleHops(GraphRequest[list[HopSample]], frozen=True):
    """Sampled in-edges, one answer per request."""

    kind: ClassVar = Kind.SAMPLE
    of_topology: ClassVar = True
    requests: Sequence[HopRequest]

    def answer(self, graph: GraphAccess) -> list[HopSample]:
        return graph.sample_hops(self.requests)

    def owned(self, store: PartStore) -> list[tuple[BookKey, Ids]]:
        for one in self.requests:
            check_type(store, one.edge_type)
            if one.weight is not None:
                row_spec(store, one.edge_type, one.weight)
            if one.bound is not None and one.bound.on == "edge":
                row_spec(store, one.edge_type, one.bound.attr)
        return [(one.edge_type[2], one.nodes) for one in self.requests]

    def share(self, split: RequestSplit, host: int, places: Places) -> SampleHops:
        return SampleHops([split.hop(self.requests[number], host, at) for number, at in places.items()])

    def merge(self, answers: Sequence[tuple[Places, list[HopSample]]]) -> list[HopSample]:
        found: list[list[tuple[Array, HopSample]]] = [[] for _ in self.requests]
        for places, samples in answers:
            for (number, at), sample in zip(places.items(), samples, strict=True):
                found[number].append((at, sample))
        return [
            shares[0][1] if len(shares) == 1 else merge_samples(len(one.nodes), shares, one.with_edge)
            for one, shares in zip(self.requests, found, strict=True)
        ]

    def check_answer(self, answer: list[HopSample], store: PartStore, host: str) -> None:
        for one, sample in zip(self.requests, answer, strict=True):
            of, src = one.edge_type[0], sample.src
            if len(src) and not 0 <= src.min() <= src.max() < store.manifest.nodes[of].num_nodes:
                raise ServiceError(
                    f"{host}: sent neighbours by {one.edge_type} that are no {of!r} nodes; is its part damaged?"
                )

    def check(self) -> None:
        rows = 0
        for one in self.requests:
            if not -1 <= one.fanout <= _MAX_FANOUT or one.shuffle < 0 or not 0 <= one.key < 1 << 64:
                raise WireError(
                    f"a request has invalid values: fanout {one.fanout}, shuffle {one.shuffle}, key {one.key}"
                )
            if one.top and one.weight is None:
                raise WireError("a request for the heaviest neighbours names no weight")
            times = None if one.bound is None else one.bound.times
            lengths = {len(ids) for ids in (one.nodes, one.trees, times) if ids is not None}
            if len(lengths) > 1 or (one.exclude is not None and len(one.exclude[0]) != len(one.exclude[1])):
                raise WireError("the arrays of a request have different lengths")
            if one.sources is not None and np.any(one.sources[1:] < one.sources[:-1]):
                raise WireError("the allowed sources of a request are not in ascending order")
            rows += sum(len(ids) for ids in (one.nodes, one.exclude and one.exclude[0], one.sources) if ids is not None)
            if rows > _MAX_ROWS:  # many requests may refer to the same array
                raise WireError(
                    f"the requests have more than {_MAX_ROWS} nodes and excluded edges; ask for fewer at once"
                )
        if sum(2 + one.with_edge for one in self.requests) > MAX_ARRAYS:
            raise WireError(f"a reply to {len(self.requests)} requests would have more than {MAX_ARRAYS} arrays")

    def reply(self, message: Message, answer: Sequence[HopSample], form_of: FormOf) -> Message:
        """The reply has for each request in turn the arrays counts, sources and, if requested, edge ids."""
        arrays: list[Array] = []
        for sample in answer:
            arrays += sample.counts, narrowed(sample.src)
            if sample.edge is not None:
                arrays.append(narrowed(sample.edge))
        return message.reply(arrays)

    def read_reply(self, message: Message) -> list[HopSample]:
        if len(message.arrays) != sum(2 + one.with_edge for one in self.requests):
            raise WireError(f"the reply has {len(message.arrays)} arrays for {len(self.requests)} requests")
        arrays, samples = iter(message.arrays), []
        for one in self.requests:
            sample = HopSample(next(arrays), next(arrays), next(arrays) if one.with_edge else None)
            counts, num_nodes = sample.counts, len(one.nodes)
            if counts.dtype != np.int32 or counts.shape != (num_nodes,) or (num_nodes and counts.min() < 0):
                raise WireError(
                    f"the reply has counts of dtype {counts.dtype} and shape {counts.shape} for {num_nodes} nodes"
                )
            total = counts.sum(dtype=np.int64)
            for ids in (sample.src, sample.edge):
                if ids is not None and len(check_ids(ids)) != total:
                    raise WireError(f"the reply has {len(ids)} neighbours, but its counts add up to {total}")
            samples.append(sample)
        return samples


class Gather(GraphRequest[list[Mapping[str, Array]]], frozen=True):
    """Attributes: for each request a mapping of names to arrays [n, …] in the stored dtype."""

    kind: ClassVar = Kind.GATHER
    requests: Sequence[RowRequest]

    def answer(self, graph: GraphAccess) -> list[Mapping[str, Array]]:
        return graph.gather(self.requests)

    def owned(self, store: PartStore) -> list[tuple[BookKey, Ids]]:
        return [(one.of, one.ids) for one in self.requests]

    def share(self, split: RequestSplit, host: int, places: Places) -> Gather:
        asked = [(self.requests[number], at) for number, at in places.items()]
        return Gather([RowRequest(one.of, split.cut(one.ids, at), one.attrs) for one, at in asked])

    def merge(self, answers: Sequence[tuple[Places, list[Mapping[str, Array]]]]) -> list[Mapping[str, Array]]:
        merged: list[dict[str, Array]] = [{} for _ in self.requests]
        for places, answer in answers:
            for (number, at), rows in zip(places.items(), answer, strict=True):
                for name, values in rows.items():
                    if name not in merged[number]:
                        shape = len(self.requests[number].ids), *values.shape[1:]
                        merged[number][name] = slabs.empty(shape, values.dtype)
                    merged[number][name][at] = values
        return [*merged]

    def check_answer(self, answer: list[Mapping[str, Array]], store: PartStore, host: str) -> None:
        for one, rows in zip(self.requests, answer, strict=True):
            for name in one.attrs:
                found, expected = (rows[name].dtype, rows[name].shape[1:]), row_spec(store, one.of, name)
                if found != expected:
                    raise ServiceError(
                        f"{host}: sent rows of {name} as {found[0]} {found[1]}, but this host's manifest has "
                        f"{expected[0]} {expected[1]}; copy the same partition to all nodes"
                    )

    def check(self) -> None:
        if (number := sum(len(one.attrs) for one in self.requests)) > MAX_ARRAYS:
            raise WireError(f"{number} arrays requested; the limit is {MAX_ARRAYS}")

    def reply(self, message: Message, answer: list[Mapping[str, Array]], form_of: FormOf) -> Message:
        pairs = zip(self.requests, answer, strict=True)
        columns = [{a: rounded(a, np.asarray(rows[a]), form_of(one.of, a)) for a in one.attrs} for one, rows in pairs]
        return message.reply(*pack(columns, narrow=False))

    def read_reply(self, message: Message) -> list[Mapping[str, Array]]:
        """Decode attributes, in their stored dtype.

        Raises ``WireError`` unless each requested attribute has one row per id.
        """
        sent, used = _ROWS.read(message), set[int]()
        if [list(columns) for columns in sent] != [list(dict.fromkeys(one.attrs)) for one in self.requests]:
            raise WireError(f"the reply does not have the attributes {[one.attrs for one in self.requests]}")
        rows = [{name: restored(column, used) for name, column in columns.items()} for columns in sent]
        for one, columns in zip(self.requests, rows, strict=True):
            for name, array in columns.items():
                if array.shape[:1] != (len(one.ids),):
                    raise WireError(f"attribute {name} has shape {array.shape}, expected {len(one.ids)} rows")
        return [*rows]


class HasEdges(GraphRequest[npt.NDArray[np.bool_]], frozen=True):
    """Whether the edges ``src[i]`` -> ``dst[i]`` exist, bool [n]."""

    kind: ClassVar = Kind.HAS_EDGES
    of_topology: ClassVar = True
    edge_type: EdgeType
    src: Ids
    dst: Ids

    def answer(self, graph: GraphAccess) -> npt.NDArray[np.bool_]:
        return graph.has_edges(self.edge_type, self.src, self.dst)

    def owned(self, store: PartStore) -> list[tuple[BookKey, Ids]]:
        check_type(store, self.edge_type)
        return [(self.edge_type[2], self.dst)]

    def share(self, split: RequestSplit, host: int, places: Places) -> HasEdges:
        return HasEdges(self.edge_type, self.src[places[0]], self.dst[places[0]])

    def merge(self, answers: Sequence[tuple[Places, npt.NDArray[np.bool_]]]) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(self.dst), np.bool_)
        for places, exist in answers:
            found[places[0]] = exist
        return found

    def check(self) -> None:
        if len(self.src) != len(self.dst):
            raise WireError(f"the request has {len(self.src)} sources, {len(self.dst)} targets; expected equal numbers")

    def read_reply(self, message: Message) -> npt.NDArray[np.bool_]:
        found = [(str(array.dtype), array.shape) for array in message.arrays]
        if found != [("bool", self.dst.shape)]:
            raise WireError(f"the reply has the arrays {found}, expected bool [{len(self.dst)}]")
        return message.arrays[0]


class Endpoints(GraphRequest[tuple[Ids, Ids]], frozen=True):
    """The sources and the targets of edges, as *original* node ids, int64 [n] each."""

    kind: ClassVar = Kind.ENDPOINTS
    edge_type: EdgeType
    edges: Ids  #: *original* edge ids

    def answer(self, graph: GraphAccess) -> tuple[Ids, Ids]:
        return graph.endpoints(self.edge_type, self.edges)

    def owned(self, store: PartStore) -> list[tuple[BookKey, Ids]]:
        check_type(store, self.edge_type)
        return [(EndpointTable(self.edge_type), self.edges)]

    def share(self, split: RequestSplit, host: int, places: Places) -> Endpoints:
        return Endpoints(self.edge_type, self.edges[places[0]])

    def merge(self, answers: Sequence[tuple[Places, tuple[Ids, Ids]]]) -> tuple[Ids, Ids]:
        src, dst = np.empty(len(self.edges), np.int64), np.empty(len(self.edges), np.int64)
        for places, (sources, targets) in answers:
            src[places[0]], dst[places[0]] = sources, targets
        return src, dst

    def reply(self, message: Message, answer: tuple[Ids, Ids], form_of: FormOf) -> Message:
        return message.reply([narrowed(ids) for ids in answer])

    def read_reply(self, message: Message) -> tuple[Ids, Ids]:
        count = len(self.edges)
        if len(message.arrays) != 2 or any(check_ids(ids).shape != (count,) for ids in message.arrays):
            shapes = [array.shape for array in message.arrays]
            raise WireError(f"the reply has arrays of shapes {shapes} for {count} edges")
        src, dst = map(widened_ids, message.arrays)
        return src, dst


class GraphAccess(Protocol):
    """Access to a whole graph, whose parts may be on several hosts. Thread-safe.

    A class implements either ``ask``, or all other methods. All raise ``ServiceError`` if a host does not answer, and
    ``PartitionError`` for an unknown type or attribute, or an id outside all parts.
    """

    def ask(self, request: GraphRequest[A]) -> A:
        return request.answer(self)

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """Return sampled in-edges, one answer per request."""
        return self.ask(SampleHops(requests))

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        """Return for each request a mapping of attribute names to arrays [n, …] in the stored dtype."""
        return self.ask(Gather(requests))

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        """Return for each i whether an edge ``src[i]`` -> ``dst[i]`` exists: bool [n]."""
        return self.ask(HasEdges(edge_type, src, dst))

    def endpoints(self, edge_type: EdgeType, edges: Ids) -> tuple[Ids, Ids]:
        """Return the sources and the targets of edges, as *original* node ids, int64 [n] each.

        ``edges``: *original* edge ids.
        """
        return self.ask(Endpoints(edge_type, edges))

    def look(self, edges: int, chosen: int = 0) -> None:
        """Tell an access that has limits how many edges were looked at, and neighbours chosen, without a request."""
        return


Groups = Mapping[int, Array]  #: host -> int32 positions, ascending


class RequestSplit:
    """Splits the arrays of several requests by the host that answers for each id.

    Use an instance only while the arrays exist: it caches results by the ``id()`` of an array, and Python gives the
    ``id()`` of a deleted array to new arrays.
    """

    def __init__(self, group: Callable[[BookKey, Ids], Groups]):
        self._group = group  #: returns positions of ids by the host that answers for them
        self._groups: dict[tuple[BookKey, int], Groups] = {}
        self._cuts: dict[tuple[int, int], Ids] = {}

    def groups(self, of: BookKey, ids: Ids) -> Groups:
        """Group the positions in ``ids`` (int64 [n]) by the host that answers for the id."""
        key = of, id(ids)
        if key not in self._groups:
            self._groups[key] = self._group(of, ids)
        return self._groups[key]

    def cut(self, array: Ids, at: Array) -> Ids:
        """Return ``array[at]``. ``at`` must be an array that ``groups`` returned."""
        # Equal arguments give the same object, so that a message contains an array only once.
        if len(at) == len(array):
            return array
        key = id(array), id(at)
        if key not in self._cuts:
            self._cuts[key] = array[at]
        return self._cuts[key]

    def hop(self, request: HopRequest, host: int, at: Array) -> HopRequest:
        """Return the share of a request that ``host`` answers. ``at``: positions of its nodes, from ``groups``."""
        near = None
        if request.exclude is not None:
            near = self.groups(request.edge_type[2], request.exclude[0]).get(host, at[:0])
        return cut_request(request, at, near, self.cut)


def cut_request(
    request: HopRequest, at: Array, near: Array | None = None, cut: Callable[[Ids, Array], Ids] = np.take
) -> HopRequest:
    """Return the share of a request for its nodes at the positions ``at``.

    ``near``: positions of the excluded edges that end at these nodes; None: looked up. ``cut``: returns the elements of
    an array at some positions.
    """
    nodes, bound, exclude = cut(request.nodes, at), request.bound, request.exclude
    if exclude is not None:
        near = np.flatnonzero(np.isin(exclude[0], nodes)) if near is None else near
        exclude = (cut(exclude[0], near), cut(exclude[1], near)) if len(near) else None
    return replace(
        request,
        nodes=nodes,
        trees=None if request.trees is None else cut(request.trees, at),
        bound=None if bound is None else replace(bound, times=cut(bound.times, at)),
        exclude=exclude,
    )


def merge_samples(num_rows: int, answers: Sequence[tuple[Array, HopSample]], with_edge: bool) -> HopSample:
    """Merge the answers to the shares of a request into one answer, in request order.

    ``answers``: for each share, the positions of its nodes in the request, and the answer. ``with_edge``: whether
    answers contain edge ids.
    """
    counts = np.zeros(num_rows, np.int32)
    for positions, sample in answers:
        counts[positions] = sample.counts
    begins = np.zeros(num_rows + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    src = _merge_runs([(at, sample.counts, sample.src) for at, sample in answers], begins)
    if not with_edge:
        return HopSample(counts, src, None)
    edges = [(at, sample.counts, sample.edge) for at, sample in answers if sample.edge is not None]
    return HopSample(counts, src, _merge_runs(edges, begins))


def _merge_runs(runs: Sequence[tuple[Array, Array, Array]], begins: Ids) -> Array:
    dtypes = [values.dtype for _, _, values in runs]
    out: Array = np.empty(int(begins[-1]), np.result_type(np.int32, *dtypes))
    for positions, counts, values in runs:
        neighbor_kernels.scatter_runs(read_only(values), read_only(counts), positions, begins, out)
    return out
