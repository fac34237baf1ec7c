"""``DistGraph``: access to a whole graph, from this host's parts and by requests to other hosts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.batch_cost import ByHost, Cost, CostMeter, FromHost
from trainer.core.errors import PartitionError, ServerGone
from trainer.core.remote_settings import SERVER_WAIT, WireRows
from trainer.core.schema import EdgeType
from trainer.sampler.feature_gather import HELD_BATCHES, GatherPiece, GatherPlan, HeldRows, HostRows
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import HERE, NOBODY, PartHolders, PendingAnswer, RemoteHost
from trainer.sampler.request_split import Groups, RequestSplit, cut_request, merge_samples
from trainer.sampler.row_index import RowPlacement, SourceCodes, locate
from trainer.sampler.settings import check_type, row_spec
from trainer.sampler.types import HopRequest, HopSample, RowRequest
from trainer.store.part_store import BookKey, EndpointTable
from trainer.store.row_cache import RowCache


@dataclass(frozen=True)
class _EdgeQuery:
    edge_type: EdgeType
    src: Ids
    dst: Ids


@dataclass(frozen=True)
class _EndpointQuery:
    edge_type: EdgeType
    edges: Ids


T = TypeVar("T", HopRequest, RowRequest, _EdgeQuery, _EndpointQuery)


@dataclass(frozen=True)
class _HostRequest(Generic[T]):
    number: int  #: index of the request in the call
    at: Array  #: int32 positions of these rows in the request
    request: T


_HostRequests = dict[int, list[_HostRequest[T]]]  #: requests by host


@dataclass(frozen=True)
class _RequestKind(Generic[T]):
    submit: Callable[[RemoteHost, Sequence[T]], PendingAnswer]
    local: Callable[[Sequence[T]], Sequence[Any]]
    rows: Callable[[T], tuple[BookKey, Ids]]
    cut: Callable[[T, Array], T]
    arrays: Callable[[Any], Iterable[Array | None]]  #: arrays of one answer


@dataclass(frozen=True)
class _SingleAnswer:
    pending: PendingAnswer

    @property
    def received(self) -> int | None:
        return getattr(self.pending, "received", None)

    def result(self, timeout: float | None = None) -> list[Any]:
        return [self.pending.result()]


class DistGraph:
    """Access to the whole graph: splits each request by the host that owns its rows, and merges the answers.

    If a host is lost, its rows are requested from the next holder of their part. If all holders are lost, a request
    waits up to ``server_wait`` seconds for one of them to return. ``turn``: a number that differs between the nodes of
    a run, so that they do not all ask the same holder first.

    ``held``: number of batches whose remote rows are kept for reuse. ``wire_rows``: dtype to which other hosts round
    the rows that they send. If this host has the topology of all parts, edges and 1-d attributes are never requested
    from other hosts.
    """

    def __init__(
        self, local: LocalGraph, remotes: Mapping[int, RemoteHost], *,
        server_wait: float = SERVER_WAIT, turn: int = 0, held: int = HELD_BATCHES, wire_rows: WireRows = "stored",
    ):  # fmt: skip
        self.local, self.books = local, local.books
        self.held, self.wire_rows = held, wire_rows
        self._holders = PartHolders(local.store.manifest.num_parts, local.store.parts, remotes, turn, server_wait)
        # without a reference to self, so that a deleted graph closes its files at once, without garbage collection
        self._hops = _RequestKind[HopRequest](
            lambda host, asked: host.submit_sample(asked),
            lambda asked: local.sample_hops(asked),
            lambda request: (request.edge_type[2], request.nodes),
            cut_request,
            lambda sample: (sample.counts, sample.src, sample.edge),
        )
        self._rows = _RequestKind[RowRequest](
            lambda host, asked: host.submit_gather(asked),
            lambda asked: local.gather(asked),
            lambda request: (request.of, request.ids),
            lambda request, at: replace(request, ids=request.ids[at]),
            lambda rows: rows.values(),
        )
        self._pairs = _RequestKind[_EdgeQuery](
            lambda host, asked: _SingleAnswer(host.submit_has_edges(asked[0].edge_type, asked[0].src, asked[0].dst)),
            lambda asked: [local.has_edges(pairs.edge_type, pairs.src, pairs.dst) for pairs in asked],
            lambda pairs: (pairs.edge_type[2], pairs.dst),
            lambda pairs, at: _EdgeQuery(pairs.edge_type, pairs.src[at], pairs.dst[at]),
            lambda found: (found,),
        )
        self._ends = _RequestKind[_EndpointQuery](
            lambda host, asked: _SingleAnswer(host.submit_endpoints(asked[0].edge_type, asked[0].edges)),
            lambda asked: [local.endpoints(query.edge_type, query.edges) for query in asked],
            lambda query: (EndpointTable(query.edge_type), query.edges),
            lambda query, at: _EndpointQuery(query.edge_type, query.edges[at]),
            lambda ends: ends,
        )
        self._meter = CostMeter()
        self._cache: RowCache | None = None
        self._held = HeldRows(held)
        self._codes = SourceCodes(local.store.manifest.num_parts, 0)

    @property
    def remotes(self) -> Mapping[int, RemoteHost]:
        return self._holders.remotes

    def set_remotes(self, remotes: Mapping[int, RemoteHost]) -> None:
        self._holders.set_remotes(remotes)

    def use_cache(self, cache: RowCache | None) -> None:
        self._cache = cache
        self._held.clear()

    def lost(self) -> frozenset[int]:
        """Node ranks of the hosts that currently do not answer."""
        return self._holders.lost_hosts()

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        if self._edges_here:
            return self.local.sample_hops(requests)
        split = RequestSplit(self._by_host)
        shares: _HostRequests[HopRequest] = defaultdict(list)
        for number, request in enumerate(requests):
            check_type(self.local.store, request.edge_type)
            if request.weight is not None:
                row_spec(self.local.store, request.edge_type, request.weight)
            if request.bound is not None and request.bound.on == "edge":
                row_spec(self.local.store, request.edge_type, request.bound.attr)
            for host, at in self._owners(split, request.edge_type[2], request.nodes).items():
                shares[host].append(_HostRequest(number, at, split.hop(request, host, at)))
        answers: list[list[tuple[Array, HopSample]]] = [[] for _ in requests]
        for _, share, sample in self._ask(shares, self._hops):
            answers[share.number].append((share.at, sample))
        return [
            found[0][1] if len(found) == 1 else merge_samples(len(request.nodes), found, request.with_edge)
            for request, found in zip(requests, answers, strict=True)
        ]

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        if not self.remotes:
            return self.local.gather(requests)
        columns = [self.local.new_rows(request) for request in requests]
        pieces = self._pieces(requests, columns, self._cache, self._held)
        split = RequestSplit(self._by_host)
        shares: _HostRequests[RowRequest] = defaultdict(list, {HERE: []})
        for number, piece in enumerate(pieces):
            for host, at in piece.asked.items():
                of, names = piece.columns
                shares[host].append(_HostRequest(number, at, RowRequest(of, split.cut(piece.ids, at), names)))
        answers: list[list[HostRows]] = [[] for _ in pieces]
        # Own, cached and held rows are copied while the other hosts answer; HERE itself has no request to answer.
        for host, share, rows in self._ask(shares, replace(self._rows, local=lambda _: self._copy_near(pieces))):
            pieces[share.number].put(self.remotes[host].name, rows, share.at)
            answers[share.number].append(HostRows(share.request.ids, rows))
        for piece, found in zip(pieces, answers, strict=True):
            if piece.keeps:
                self._held.add(piece.columns, piece.cost.remote_rows, found)
        return [*columns]

    def pieces(self, requests: Sequence[RowRequest], cache: RowCache | None, held: HeldRows) -> list[GatherPiece]:
        """Return the source from which ``gather`` would read each row, without sending a request.

        The sources depend on ``cache`` and ``held``. ``GatherPiece.out`` has placeholder arrays that take no memory.
        Raises ``PartitionError`` for an unknown type or attribute, or an id outside all parts.
        """
        return self._pieces(requests, [self.local.no_rows(request) for request in requests], cache, held)

    def _pieces(
        self, requests: Sequence[RowRequest], columns: Sequence[Mapping[str, Array]], cache: RowCache | None,
        held: HeldRows,
    ) -> list[GatherPiece]:  # fmt: skip
        plan = GatherPlan(self.local, self._holders.table(), cache, held)
        return [piece for asked, out in zip(requests, columns, strict=True) for piece in plan.pieces(asked, out)]

    def _copy_near(self, pieces: Sequence[GatherPiece]) -> tuple[()]:
        for piece in pieces:
            piece.copy_near(self.local)
            if not piece.counts:
                continue
            cached = self._owned(piece, [piece.cached[1]] if piece.cached else [])
            held = self._owned(piece, [placed for _, placed in piece.held])
            asked = {host: len(at) for host, at in piece.asked.items()}
            rows = {
                host: FromHost(0, asked.get(host, 0) + kept + again, kept, again)
                for host in sorted({*asked, *cached, *held})
                for kept, again in [(cached.get(host, 0), held.get(host, 0))]
            }
            self._meter.add(replace(piece.cost, by_host=ByHost(rows)))
        return ()

    def _owned(self, piece: GatherPiece, placed: Sequence[RowPlacement]) -> dict[int, int]:
        if not placed:
            return {}
        ids = np.concatenate([piece.ids[one.at] for one in placed])
        parts = np.bincount(self.books[piece.columns[0]].part_of(ids), minlength=1)
        hosts: dict[int, int] = defaultdict(int)
        for part in np.flatnonzero(parts).tolist():
            hosts[int(self._holders.table()[part + 1])] += int(parts[part])
        return hosts

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        if self._edges_here:
            return self.local.has_edges(edge_type, src, dst)
        check_type(self.local.store, edge_type)
        shares: _HostRequests[_EdgeQuery] = {
            host: [_HostRequest(0, at, _EdgeQuery(edge_type, src[at], dst[at]))]
            for host, at in self._owners(RequestSplit(self._by_host), edge_type[2], dst).items()
        }
        found = np.zeros(len(dst), np.bool_)
        for _, share, answer in self._ask(shares, self._pairs):
            found[share.at] = answer
        return found

    def endpoints(self, edge_type: EdgeType, edges: Ids) -> tuple[Ids, Ids]:
        if not self.remotes:
            return self.local.endpoints(edge_type, edges)
        check_type(self.local.store, edge_type)
        shares: _HostRequests[_EndpointQuery] = {
            host: [_HostRequest(0, at, _EndpointQuery(edge_type, edges[at]))]
            for host, at in self._owners(RequestSplit(self._by_host), EndpointTable(edge_type), edges).items()
        }
        src, dst = np.empty(len(edges), np.int64), np.empty(len(edges), np.int64)
        for _, share, (sources, targets) in self._ask(shares, self._ends):
            src[share.at], dst[share.at] = sources, targets
        return src, dst

    def take_cost(self) -> Cost:
        """Return the cost of this thread's requests since it last called this: bytes, waiting time and rows by source.

        Rows are counted only if there are other hosts.
        """
        return self._meter.take()

    def _ask(self, shares: _HostRequests[T], kind: _RequestKind[T]) -> Iterator[tuple[int, _HostRequest[T], Any]]:
        """Send each host its requests, and yield (host, request, answer) for each.

        If a host is lost, its requests are sent again to other holders of the parts.
        """
        while shares:
            asked = {host: [share.request for share in mine] for host, mine in shares.items()}
            in_flight = {
                host: kind.submit(self.remotes[host], requests) for host, requests in asked.items() if host != HERE
            }
            if HERE in shares:
                for share, answer in zip(shares[HERE], kind.local(asked[HERE]), strict=True):
                    yield HERE, share, answer
            unanswered: list[_HostRequest[T]] = []
            for host, pending in in_flight.items():
                began = time.perf_counter()
                try:
                    answers = pending.result()
                except ServerGone as error:
                    self._holders.lost(host, error)
                    unanswered += shares[host]
                    continue
                finally:
                    self._meter.add(Cost(wait_s=time.perf_counter() - began))
                received = getattr(pending, "received", None)
                if received is None:
                    arrays = (array for answer in answers for array in kind.arrays(answer))
                    received = sum(array.nbytes for array in arrays if array is not None)
                self._meter.add(Cost(remote_bytes=received, by_host=ByHost({host: FromHost(remote_bytes=received)})))
                for share, answer in zip(shares[host], answers, strict=True):
                    yield host, share, answer
            shares = defaultdict(list)
            if not unanswered:
                continue
            # What lost hosts have not answered goes to other holders, for which this may have to wait.
            rows = [kind.rows(share.request) for share in unanswered]
            self._holders.wait_for(part for of, ids in rows for part in np.unique(self.books[of].part_of(ids)).tolist())
            for share, (of, ids) in zip(unanswered, rows, strict=True):
                for host, at in self._by_host(of, ids).items():
                    shares[host].append(_HostRequest(share.number, share.at[at], kind.cut(share.request, at)))

    def _owners(self, split: RequestSplit, of: BookKey, ids: Ids) -> Groups:
        groups = split.groups(of, ids)
        if NOBODY in groups:
            wrong = int(ids[groups[NOBODY][0]])
            raise PartitionError(f"no {of!r} with id {wrong}; ids go from 0 to {self.books[of].size - 1}")
        return groups

    def _by_host(self, of: BookKey, ids: Ids) -> Groups:
        table = self._holders.table()
        wrong, placed = locate(ids, self.books[of].offsets, self._codes.of_hosts(table), self._codes)
        if wrong >= 0:
            return {NOBODY: np.array([wrong])}
        first = self._codes.first_host
        return {code - first - 1: rows.at for code, rows in placed.items()}

    @property
    def _edges_here(self) -> bool:
        return not self.remotes or self.local.store.whole_topology
