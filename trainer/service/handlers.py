"""Answers the requests to a graph server, from the parts on its host or, for clients, from the whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import PartitionError, ServiceError
from trainer.core.schema import EdgeType
from trainer.sampler.in_edges import InEdgesOf
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.requests import (
    PAIR_LOOKS,
    Endpoints,
    Gather,
    GraphAccess,
    GraphRequest,
    HasEdges,
    SampleHops,
    cut_request,
)
from trainer.sampler.settings import check_type, row_spec
from trainer.sampler.subgraph_sampler import CountedAccess, SubgraphSampler
from trainer.sampler.types import HopRequest, HopSample, RowRequest, SampleSettings
from trainer.service.messages import (
    BatchRequest,
    Hello,
    HelloInfo,
    ManifestText,
    ServerAddress,
    ServerStats,
    SharedSlice,
    Stats,
    ToGlobal,
)
from trainer.store.manifest import MANIFEST
from trainer.store.part_store import PartStore
from trainer.wire.columns import FormOf, form_of
from trainer.wire.frames import Flag, Kind, Message
from trainer.wire.request import Request

_MAX_SHORT_ANSWER = 128 << 20  #: bytes of a reply other than a batch; clients request more in pieces

_MAX_SAMPLE = 2 * _MAX_SHORT_ANSWER  #: bytes of a reply with sampled neighbours

MAX_LOOKS = 1 << 29  #: edges that a request may make the server look at; some seconds of work

_FEW_EDGES = 1 << 22  # degrees are not added up if a request cannot have more edges than this

#: A larger request is answered in pieces of so many nodes, or edges to look at. A piece takes some tenths of a second.
_PIECE_NODES, _PIECE_LOOKS = 1 << 20, 1 << 24

_PAIR_BYTES = 48  # bytes that a pair of has_edges takes: both ids, their order, and both ids in this order

_NODE_BYTES = 12  # bytes of a node of a request for neighbours: its degree, and its number of edges in the answer

_LEAST_ROW = 8  # bytes that a row counts at least, as even rows without values take time

_CHOSEN_BYTES = 17  # bytes of a neighbour that a rule has chosen: id, score, distance and batch position

_IN_BATCH, _IN_TREES = 16, 56  # bytes per edge of a batch, and of a disjoint one, besides the ids in answers (measured)

_EDGE_ID_IN_BATCH = 12  # further bytes of an edge whose id is in the batch


class BoundedGraph(GraphAccess):
    """Access to a graph for one request, whose memory and work are limited before they are spent.

    All methods raise ``ServiceError`` if the answers would take more than ``limit`` bytes in total or need a look at
    more than ``MAX_LOOKS`` edges. Long ones raise it once ``is_open`` returns False: nobody waits any more.
    """

    def __init__(
        self, graph: GraphAccess, local: ServedGraph, limit: int, is_open: Callable[[], bool], in_batch: int = 0
    ):
        """``local``: the parts on this host; nodes of other parts count once sampled, and their servers have limits of
        their own. ``in_batch``: further bytes that an edge takes.
        """
        self._graph, self._limit, self._is_open, self._in_batch = graph, limit, is_open, in_batch
        self._served = local
        self._used = self._looks = 0

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        bytes_of_nodes = _NODE_BYTES * sum(len(request.nodes) for request in requests)
        self._check(bytes_of_nodes)
        self.look(PAIR_LOOKS * sum(len(request.exclude[0]) for request in requests if request.exclude is not None))
        looks = [self._looks_of(request) for request in requests]
        most = bytes_of_nodes
        for request, each in zip(requests, looks, strict=True):
            if each is None:
                edges = len(request.nodes) * max(request.fanout, 0)
            elif not _is_conditional(request):
                edges = int(each.sum())
            else:  # far fewer edges may fulfil the conditions: they are counted piece by piece
                edges = 0
            most += edges * self._edge_bytes(request)
        self._check(most)
        self._looks += sum(int(each.sum()) for each in looks if each is not None)
        if self._looks > MAX_LOOKS:
            raise ServiceError(
                f"the nodes have {self._looks} edges, over the limit of {MAX_LOOKS} of one request; make batches "
                "smaller, or ask for fewer nodes at once"
            )
        pieces = [_pieces(request, each) for request, each in zip(requests, looks, strict=True)]
        if all(len(each) == 1 for each in pieces):
            return self._sampled(requests)
        return [_joined([self._sampled([piece])[0] for piece in each]) for each in pieces]

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        self._check(0)
        if isinstance(self._served, LocalGraph):
            total, limit = 0, self._limit - self._used
            for request in requests:
                width = 0
                for name in request.attrs:
                    dtype, shape = row_spec(self._served.store, request.of, name)
                    width += max(math.prod(shape) * dtype.itemsize, _LEAST_ROW)
                total += len(request.ids) * max(width, _LEAST_ROW)  # ids are looked up, even without attributes
            if total > limit:
                raise ServiceError(
                    f"the answer takes {total} bytes, over the limit of {limit}; ask for fewer nodes at once"
                )
        return self._graph.gather(requests)

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        if (size := _PAIR_BYTES * len(src)) > _MAX_SAMPLE:
            raise ServiceError(
                f"{len(src)} pairs take {size} bytes while they are looked up, over the limit of {_MAX_SAMPLE}; "
                "ask for fewer pairs at once"
            )
        if isinstance(self._served, LocalGraph):  # the edges of each target are looked at once
            self.look(int(self._served.degrees(edge_type, np.unique(dst)).sum()))
        return self._graph.has_edges(edge_type, src, dst)

    def endpoints(self, edge_type: EdgeType, edges: Ids) -> tuple[Ids, Ids]:
        if (size := 16 * len(edges)) > self._limit:
            raise ServiceError(
                f"the answer takes {size} bytes, over the limit of {self._limit}; ask for fewer edges at once"
            )
        return self._graph.endpoints(edge_type, edges)

    def look(self, edges: int, chosen: int = 0) -> None:
        self._used += chosen * (_CHOSEN_BYTES + self._in_batch)
        self._check(0)
        self._looks += edges
        if self._looks > MAX_LOOKS:
            raise ServiceError(
                f"the request looks at more than {MAX_LOOKS} edges, its limit; make batches smaller, or eps of a rule "
                "larger, or ask for fewer pairs at once"
            )

    def take_cost(self) -> Cost:
        cost: Cost = getattr(self._graph, "take_cost", Cost)()
        return cost

    def _sampled(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        self._check(0)
        samples = self._graph.sample_hops(requests)
        self._used += sum(
            sample.counts.nbytes + len(sample.src) * self._edge_bytes(request)
            for request, sample in zip(requests, samples, strict=True)
        )
        self._check(0)
        return samples

    def _check(self, more: int) -> None:
        if self._used + more > self._limit:
            raise ServiceError(
                f"the answer could take {self._used + more} bytes, over the limit of {self._limit}; make batches or "
                "fanouts smaller, or ask for fewer nodes at once"
            )
        if not self._is_open():
            raise ServiceError("the connection was closed")

    def _looks_of(self, request: HopRequest) -> Ids | None:
        """Return how many edges must be looked at for each node, 0 for nodes of other parts: int64 [n].

        None if they are few, whatever the degrees of the nodes are.
        """
        num_nodes, conditional = len(request.nodes), _is_conditional(request)
        few = 0 <= num_nodes * request.fanout <= _FEW_EDGES and num_nodes <= _PIECE_NODES
        if not isinstance(self._served, LocalGraph) or (few and not conditional):
            return None
        degrees = self._served.degrees(request.edge_type, request.nodes)
        if conditional or request.fanout < 0:
            return degrees
        return np.where(degrees > 0, request.fanout, 0) if request.replace else degrees.clip(max=request.fanout)

    def _edge_bytes(self, request: HopRequest) -> int:
        nodes = self._served.store.manifest.nodes if isinstance(self._served, LocalGraph) else {}
        source = nodes.get(request.edge_type[0])
        wide = source is not None and source.num_nodes > 1 << 31
        return (4 + 4 * wide) * (1 + request.with_edge) + self._in_batch


def _is_conditional(request: HopRequest) -> bool:
    """Return whether all edges of some nodes must be looked at, whatever the fanout is."""
    conditions = (request.bound, request.weight, request.sources, request.exclude)
    return any(condition is not None for condition in conditions)


def _pieces(request: HopRequest, looks: Ids | None) -> list[HopRequest]:
    """Cut a request into pieces of at most ``_PIECE_NODES`` nodes, or a node, and ``_PIECE_LOOKS`` edges."""
    if looks is None:
        return [request]
    cost = np.cumsum(looks // (_PIECE_LOOKS // _PIECE_NODES) + 1) // _PIECE_NODES
    firsts = np.flatnonzero(np.diff(cost, prepend=-1))
    if len(firsts) <= 1:
        return [request]
    return [cut_request(request, at) for at in np.split(np.arange(len(cost)), firsts[1:])]


def _joined(samples: Sequence[HopSample]) -> HopSample:
    edges = [sample.edge for sample in samples if sample.edge is not None]
    return HopSample(
        np.concatenate([sample.counts for sample in samples]), np.concatenate([sample.src for sample in samples]),
        np.concatenate(edges) if edges else None,
    )  # fmt: skip


#: Returns the version of cluster.json, and all graph servers in it.
Topology = Callable[[], tuple[int, tuple[ServerAddress, ...]]]


class ServedGraph(GraphAccess, Protocol):
    """The parts on the host of a graph server, as ``Handlers`` uses them."""

    @property
    def store(self) -> PartStore: ...


#: All requests that have a reply, by kind.
REQUESTS: Mapping[Kind, type[Request[Any]]] = {
    of.kind: of
    for of in (
        Hello, Stats, ManifestText, SharedSlice, ToGlobal, SampleHops, Gather, HasEdges, Endpoints, BatchRequest
    )
}  # fmt: skip


def is_long(message: Message) -> bool:
    # These may have to wait for other servers.
    asked = REQUESTS.get(message.kind, Hello)
    return asked is BatchRequest or (bool(message.flags & Flag.ROUTE) and issubclass(asked, GraphRequest))


class Handlers:
    """Answers the requests to a graph server. All methods raise ``TrainerError`` for invalid requests."""

    def __init__(
        self, graph: ServedGraph, info: HelloInfo, stats: Callable[[], ServerStats], topology: Topology, limit: int,
        routed: CountedAccess | None = None,
    ):  # fmt: skip
        """``routed``: access to the whole graph; None: this server answers from its own parts only."""
        self._routed = routed
        self._graph, self._info, self._stats, self._topology = graph, info, stats, topology
        self._limit, self._sample_limit = min(limit, _MAX_SHORT_ANSWER), min(limit, _MAX_SAMPLE)
        self._batch_limit = limit
        self._sampler: SubgraphSampler | None = None

    def short(self, message: Message, is_open: Callable[[], bool] = lambda: True) -> Message:
        """Answer a request with the parts on this host only, without waiting for other servers.

        ``is_open``: returns whether the connection is open; long work ends once it is not.
        """
        return self._answer(message, self._graph, is_open)

    def routed_answer(self, message: Message, is_open: Callable[[], bool] = lambda: True) -> Message:
        """Answer a request, other than for a batch, from the whole graph. May wait for other servers."""
        return self._answer(message, self._whole(), is_open)

    def batch(self, message: Message, request: BatchRequest, is_open: Callable[[], bool] = lambda: True) -> Message:
        if self._sampler is None:  # kept for its relabel tables, one per thread
            store = self._graph.store
            self._sampler = SubgraphSampler(
                self._whole(), store.manifest, SampleSettings({}), {}, in_edges=InEdgesOf(store)
            )
        work = request.work
        per_edge = (_IN_TREES if work.settings.disjoint else _IN_BATCH) + _EDGE_ID_IN_BATCH * work.settings.edge_ids
        graph = BoundedGraph(self._whole(), self._graph, self._batch_limit, is_open, per_edge)
        sampler = replace(
            self._sampler, access=graph, settings=work.settings, attrs=work.attrs, labels=work.labels
        )  # fmt: skip
        return request.reply(message, sampler.sample(work.seeds, work.key), self._forms(message))

    def _answer(self, message: Message, graph: GraphAccess, is_open: Callable[[], bool]) -> Message:
        if message.kind not in REQUESTS:
            raise ServiceError(f"{message.kind.name.lower()} is not a kind of request")
        request, answer = REQUESTS[message.kind].read(message), None
        if isinstance(request, GraphRequest):
            limit = self._sample_limit if isinstance(request, SampleHops) else self._limit
            answer = request.answer(BoundedGraph(graph, self._graph, limit, is_open))

        elif isinstance(request, Hello):
            version, servers = self._topology()
            answer = replace(self._info, version=version, servers=servers)

        elif isinstance(request, Stats):
            answer = self._stats()

        elif isinstance(request, SharedSlice):
            store, name, first, count = self._graph.store, request.name, request.first, request.count
            if request.of is None and name not in store.graph_attrs:
                raise PartitionError(f"no attribute {name!r} of the graph; there are {sorted(store.graph_attrs)}")
            array = store.graph_attrs[name] if request.of is None else store.seeds(request.of, name)
            rows = array if array.ndim else array[None]
            if first + count > len(rows):
                raise PartitionError(
                    f"{name} has {len(rows)} rows, but {count} rows from row {first} on were requested"
                )
            if (size := count * rows.dtype.itemsize * math.prod(rows.shape[1:])) > self._limit:
                raise ServiceError(
                    f"the answer takes {size} bytes, over the limit of {self._limit}; ask for fewer rows at once"
                )
            answer = rows[first : first + count] if array.ndim else array

        elif isinstance(request, ToGlobal):
            store, of, ids = self._graph.store, request.of, request.ids
            check_type(store, of)
            last = store.manifest.nodes[of].num_nodes - 1
            if len(ids) and not 0 <= ids.min() <= ids.max() <= last:
                raise PartitionError(
                    f"ids of {of!r} nodes from {ids.min()} to {ids.max()} were requested; valid ids are 0 to {last}"
                )
            answer = store.to_global(of, ids)

        else:
            path = self._graph.store.folder / MANIFEST
            try:
                answer = path.read_bytes()
            except OSError as error:
                raise PartitionError(f"{path} cannot be read: {error.strerror}") from None
        return request.reply(message, answer, self._forms(message))

    def _whole(self) -> CountedAccess:
        if self._routed is None:
            raise ServiceError("this graph server serves only its own parts, and no clients")
        return self._routed

    def _forms(self, message: Message) -> FormOf:
        form = form_of(message.flags)
        if not isinstance(self._graph, LocalGraph):
            return lambda of, name: form
        specs = self._graph.store.manifest.attrs_of
        return lambda of, name: specs(of)[name].travels_as(form) if name in specs(of) else form
