"""Answers the requests to a graph server, from the parts on its host or, for clients, from the whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import PartitionError, ServiceError
from trainer.core.schema import EdgeType
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.request_split import edge_slice
from trainer.sampler.settings import check_type, row_spec
from trainer.sampler.subgraph_sampler import BatchWork, CountedAccess, SubgraphSampler
from trainer.sampler.types import EdgeList, GraphAccess, HopRequest, HopSample, RowRequest, SampleSettings
from trainer.service.wire import batch_messages, hop_messages, messages
from trainer.service.wire.frames import Flag, Kind, Message
from trainer.service.wire.messages import FormOf, HelloInfo, ServerAddress, ServerStats, SharedSlice, form_of
from trainer.store.manifest import MANIFEST
from trainer.store.part_store import PartStore

_BYTES_OF_EDGE = 4  # a lower bound: the id of the edge's source

MAX_SHORT_ANSWER = 128 << 20  #: bytes of a reply other than a batch; clients request more in pieces


def check_rows(store: PartStore, requests: Sequence[RowRequest], limit: int) -> None:
    """Raise ``ServiceError`` if the answer to these requests is larger than ``limit`` bytes.

    Raises ``PartitionError`` for unknown attributes.
    """
    total = 0
    for request in requests:
        for name in request.attrs:
            dtype, shape = row_spec(store, request.of, name)
            total += len(request.ids) * math.prod(shape) * dtype.itemsize
    if total > limit:
        raise ServiceError(f"the answer takes {total} bytes, over the limit of {limit}; ask for fewer nodes at once")


class BoundedGraph:
    """Access to the whole graph for one request.

    Raises ``ServiceError`` if the sampled edges or the rows take more than ``limit`` bytes.
    """

    def __init__(self, graph: CountedAccess, store: PartStore, limit: int):
        self._graph, self._store, self._limit = graph, store, limit
        self._edges = 0

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        samples = self._graph.sample_hops(requests)
        self._edges += sum(len(sample.src) for sample in samples)
        if self._edges * _BYTES_OF_EDGE > self._limit:
            raise ServiceError(
                f"the {self._edges} edges sampled so far take over {self._limit} bytes; make batches or fanouts smaller"
            )
        return samples

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        check_rows(self._store, requests, self._limit)
        return self._graph.gather(requests)

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        return self._graph.has_edges(edge_type, src, dst)

    def edge_list(self, edge_type: EdgeType) -> EdgeList:
        return self._graph.edge_list(edge_type)

    def endpoints(self, edge_type: EdgeType, edges: Ids) -> tuple[Ids, Ids]:
        return self._graph.endpoints(edge_type, edges)

    def take_cost(self) -> Cost:
        return self._graph.take_cost()


#: Returns the version of cluster.json, and all graph servers in it.
Topology = Callable[[], tuple[int, tuple[ServerAddress, ...]]]

_GRAPH_KINDS = (Kind.SAMPLE, Kind.GATHER, Kind.HAS_EDGES, Kind.EDGES, Kind.ENDPOINTS)


class ServedGraph(GraphAccess, Protocol):
    """The parts on the host of a graph server, as ``Handlers`` uses them."""

    @property
    def store(self) -> PartStore: ...


class RoutedGraph(CountedAccess, Protocol):
    """Access to the whole graph: parts on the host of a graph server and those of other servers."""

    def edges_of(self, part_id: int, edge_type: EdgeType, first: int, count: int) -> EdgeList: ...


def is_long(request: Message) -> bool:
    # These may have to wait for other servers.
    return request.kind == Kind.BATCH or (bool(request.flags & Flag.ROUTE) and request.kind in _GRAPH_KINDS)


class Handlers:
    """Answers the requests to a graph server. All methods raise ``TrainerError`` for invalid requests."""

    def __init__(
        self, graph: ServedGraph, info: HelloInfo, stats: Callable[[], ServerStats], topology: Topology, limit: int
    ):
        self.routed: RoutedGraph | None = None  #: may be replaced at any time
        self._graph, self._info, self._stats, self._topology = graph, info, stats, topology
        self._limit, self._batch_limit = min(limit, MAX_SHORT_ANSWER), limit
        self._sampler: SubgraphSampler | None = None
        self._short: dict[Kind, Callable[[Message], Message]] = {
            Kind.HELLO: self._hello,
            Kind.STATS: lambda request: request.reply(text=messages.info_text(self._stats())),
            Kind.SAMPLE: self._sample,
            Kind.GATHER: self._gather,
            Kind.HAS_EDGES: lambda request: self._has_edges(self._graph, request),
            Kind.EDGES: self._edges,
            Kind.ENDPOINTS: lambda request: self._endpoints(self._graph, request),
            Kind.MANIFEST: self._manifest,
            Kind.SHARED: self._shared,
            Kind.TO_GLOBAL: self._to_global,
        }

    def short(self, request: Message) -> Message:
        """Answer a request with the parts on this host only, without waiting for other servers."""
        if request.kind not in self._short:
            raise ServiceError(f"{request.kind.name.lower()} is not a kind of request")
        return self._short[request.kind](request)

    def routed_answer(self, request: Message) -> Message:
        """Answer a request, other than for a batch, from the whole graph. May wait for other servers."""
        graph = BoundedGraph(self._whole(), self._graph.store, self._limit)
        if request.kind == Kind.SAMPLE:
            return request.reply(
                hop_messages.sample_arrays(graph.sample_hops(hop_messages.read_sample_request(request)))
            )
        if request.kind == Kind.GATHER:
            asked = messages.read_gather_request(request)
            return messages.rows_reply(request, asked, graph.gather(asked), self._forms(request))
        if request.kind == Kind.HAS_EDGES:
            return self._has_edges(graph, request)
        if request.kind == Kind.ENDPOINTS:
            return self._endpoints(graph, request)
        return request.reply(messages.edge_arrays(self._whole().edges_of(*messages.read_edges_request(request))))

    def batch(self, request: Message, work: BatchWork) -> Message:
        if self._sampler is None:  # kept for its relabel tables, one per thread
            self._sampler = SubgraphSampler(self._whole(), self._graph.store.manifest, SampleSettings({}), {})
        graph = BoundedGraph(self._whole(), self._graph.store, self._batch_limit)
        sampler = replace(
            self._sampler, access=graph, settings=work.settings, attrs=work.attrs, labels=work.labels
        )  # fmt: skip
        return batch_messages.batch_reply(request, sampler.sample(work.seeds, work.key), self._forms(request))

    def _whole(self) -> RoutedGraph:
        if self.routed is None:
            raise ServiceError("this graph server serves only its own parts, and no clients")
        return self.routed

    def _hello(self, request: Message) -> Message:
        version, servers = self._topology()
        return request.reply(text=messages.info_text(replace(self._info, version=version, servers=servers)))

    def _sample(self, request: Message) -> Message:
        samples, edges = [], 0
        requests = hop_messages.read_sample_request(request)
        if isinstance(self._graph, LocalGraph):
            most = sum(map(self._graph.most_edges, requests))
            if most * _BYTES_OF_EDGE > self._limit:
                raise ServiceError(
                    f"the answer could have {most} edges, which take over {self._limit} bytes; ask for fewer nodes "
                    "at once"
                )
        for asked in requests:
            samples += self._graph.sample_hops([asked])
            edges += len(samples[-1].src)
            if edges * _BYTES_OF_EDGE > self._limit:
                raise ServiceError(
                    f"the {edges} edges sampled so far take over {self._limit} bytes; ask for fewer nodes at once"
                )
        return request.reply(hop_messages.sample_arrays(samples))

    def _gather(self, request: Message) -> Message:
        asked = messages.read_gather_request(request)
        if isinstance(self._graph, LocalGraph):
            check_rows(self._graph.store, asked, self._limit)
        return messages.rows_reply(request, asked, self._graph.gather(asked), self._forms(request))

    def _forms(self, request: Message) -> FormOf:
        form = form_of(request.flags)
        if not isinstance(self._graph, LocalGraph):
            return lambda of, name: form
        specs = self._graph.store.manifest.attrs_of
        return lambda of, name: specs(of)[name].travels_as(form) if name in specs(of) else form

    @staticmethod
    def _has_edges(graph: GraphAccess, request: Message) -> Message:
        return request.reply([graph.has_edges(*messages.read_has_edges_request(request))])

    def _endpoints(self, graph: GraphAccess, request: Message) -> Message:
        edge_type, edges = messages.read_endpoints_request(request)
        if (size := 16 * len(edges)) > self._limit:
            raise ServiceError(
                f"the answer takes {size} bytes, over the limit of {self._limit}; ask for fewer edges at once"
            )
        return request.reply(messages.endpoint_arrays(graph.endpoints(edge_type, edges)))

    def _edges(self, request: Message) -> Message:
        edges = edge_slice(self._graph.store, *messages.read_edges_request(request))
        return request.reply(messages.edge_arrays(edges))

    def _manifest(self, request: Message) -> Message:
        path = self._graph.store.folder / MANIFEST
        try:
            return request.reply([np.frombuffer(path.read_bytes(), np.uint8)])
        except OSError as error:
            raise PartitionError(f"{path} cannot be read: {error.strerror}") from None

    def _shared(self, request: Message) -> Message:
        asked = messages.read_shared_request(request)
        array = self._shared_array(asked)
        rows = array if array.ndim else array[None]
        if asked.first + asked.count > len(rows):
            raise PartitionError(
                f"{asked.name} has {len(rows)} rows, but {asked.count} rows from row {asked.first} on were requested"
            )
        if (size := asked.count * rows.dtype.itemsize * math.prod(rows.shape[1:])) > self._limit:
            raise ServiceError(
                f"the answer takes {size} bytes, over the limit of {self._limit}; ask for fewer rows at once"
            )
        return request.reply([array if not array.ndim else rows[asked.first : asked.first + asked.count]])

    def _shared_array(self, asked: SharedSlice) -> Array:
        store = self._graph.store
        if asked.of is not None:
            return store.seeds(asked.of, asked.name)
        if asked.name not in store.graph_attrs:
            raise PartitionError(f"no attribute {asked.name!r} of the graph; there are {sorted(store.graph_attrs)}")
        return store.graph_attrs[asked.name]

    def _to_global(self, request: Message) -> Message:
        of, ids = messages.read_to_global_request(request)
        check_type(self._graph.store, of)
        last = self._graph.store.manifest.nodes[of].num_nodes - 1
        if len(ids) and not 0 <= ids.min() <= ids.max() <= last:
            raise PartitionError(
                f"ids of {of!r} nodes from {ids.min()} to {ids.max()} were requested; valid ids are 0 to {last}"
            )
        return request.reply([self._graph.store.to_global(of, ids)])
