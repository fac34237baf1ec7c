"""A whole graph for one process: local parts by memory map, the others through their hosts."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.errors import PartitionError, ServiceError
from trainer.sample.edge_slice import EDGES_AT_ONCE, edge_slice
from trainer.sample.grouping import group_by, merge_rows, merge_samples
from trainer.sample.one_hop import LocalGraph
from trainer.sample.specs import check_type, row_spec
from trainer.sample.split import Groups, Split
from trainer.sample.types import EdgeList, HopRequest, HopSample, RowRequest
from trainer.schema import AnyType, EdgeType

_HERE, _NOBODY = -1, -2  #: instead of a node rank

T = TypeVar("T", HopRequest, RowRequest)
_RowSpec = tuple[np.dtype[Any], tuple[int, ...]]  #: dtype and shape of one row


class Pending(Protocol):
    """An answer under way; ``result`` waits at most the client's deadline."""

    def result(self) -> Any: ...


class RemoteHost(Protocol):
    """What routing needs of ``service.client.HostClient``."""

    @property
    def part_ids(self) -> Sequence[int]: ...

    @property
    def name(self) -> str: ...

    def submit_sample(self, requests: Sequence[HopRequest]) -> Pending: ...

    def submit_gather(self, requests: Sequence[RowRequest]) -> Pending: ...

    def submit_has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> Pending: ...

    def submit_edges(self, part_id: int, edge_type: EdgeType, first: int, count: int) -> Pending: ...


@dataclass(frozen=True)
class _Share(Generic[T]):
    """What one host is asked of one request."""

    number: int  #: of the request in the call
    at: Ids  #: its rows
    request: T


_Shares = dict[int, list[_Share[T]]]  #: by host


class DistGraph:
    """Routes each row to its owner: one message per remote host and call, local work meanwhile."""

    def __init__(self, local: LocalGraph, remotes: Mapping[int, RemoteHost]):
        self.local, self.remotes, self.books = local, remotes, local.books
        self._host_of_part = _host_of_part(local, remotes)
        self._count = threading.local()

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """Neighbours of any nodes, in request order. Raises ``ServiceError`` and ``PartitionError``."""
        if not self.remotes:
            return self.local.sample_hops(requests)
        split = Split(self._by_host)
        shares: _Shares[HopRequest] = defaultdict(list)
        for number, request in enumerate(requests):
            self._check_hop(request)
            for host, at in self._owners(split, request.edge_type[2], request.nodes).items():
                shares[host].append(_Share(number, at, split.hop(request, host, at)))
        answers: list[list[tuple[Ids, HopSample]]] = [[] for _ in requests]
        for host, share, sample in self._ask(shares, lambda at, asked: at.submit_sample(asked), self.local.sample_hops):
            if host != _HERE:
                self._add_bytes(sample.counts, sample.src, sample.edge)
            answers[share.number].append((share.at, sample))
        return [_merged(request, found) for request, found in zip(requests, answers, strict=True)]

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        """Rows of any nodes and edges, in request order. Raises ``ServiceError`` and ``PartitionError``."""
        if not self.remotes:
            return self.local.gather(requests)
        specs = [self._row_specs(request) for request in requests]
        split = Split(self._by_host)
        shares: _Shares[RowRequest] = defaultdict(list)
        for number, request in enumerate(requests):
            for host, at in self._owners(split, request.of, request.ids).items():
                self._add_rows(len(at), host != _HERE)
                mine = RowRequest(request.of, split.cut(request.ids, at), request.attrs)
                shares[host].append(_Share(number, at, mine))
        answers: list[list[tuple[Ids, Mapping[str, Array]]]] = [[] for _ in requests]
        for host, share, rows in self._ask(shares, lambda at, asked: at.submit_gather(asked), self.local.gather):
            if host != _HERE:
                self._add_bytes(*rows.values())
                self._check_rows(host, rows, specs[share.number])
            answers[share.number].append((share.at, rows))
        return [
            found[0][1] if len(found) == 1 else _merged_rows(len(request.ids), found, columns)
            for request, found, columns in zip(requests, answers, specs, strict=True)
        ]

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        """Which of any edges exist: bool [n]. Raises ``ServiceError`` and ``PartitionError``."""
        check_type(self.local.store, edge_type)
        groups = dict(self._owners(Split(self._by_host), edge_type[2], dst))
        here = groups.pop(_HERE, None)
        under_way = [
            (at, self.remotes[host].submit_has_edges(edge_type, src[at], dst[at])) for host, at in groups.items()
        ]
        found = np.zeros(len(dst), np.bool_)
        if here is not None:
            found[here] = self.local.has_edges(edge_type, src[here], dst[here])
        for at, pending in under_way:
            found[at] = pending.result()
            self._add_bytes(found[at])
        return found

    def edge_list(self, edge_type: EdgeType) -> EdgeList:
        """All edges of a type, by global id; at most two slices of a part under way per host.

        Memory: 24 bytes an edge. Raises ``ServiceError`` and ``PartitionError``.
        """
        check_type(self.local.store, edge_type)
        book = self.books[edge_type]
        whole = EdgeList(*(np.empty(book.size, np.int64) for _ in range(3)))
        under_way: deque[tuple[int, Pending]] = deque()
        for host, part_id, first, count in self._slices(edge_type):
            at = book.range_of(part_id)[0] + first
            if host == _HERE:
                _put(whole, at, edge_slice(self.local.store, part_id, edge_type, first, count))
                continue
            under_way.append((at, self.remotes[host].submit_edges(part_id, edge_type, first, count)))
            if len(under_way) > 2 * len(self.remotes):
                self._put_received(whole, *under_way.popleft())
        for at, pending in under_way:
            self._put_received(whole, at, pending)
        return whole

    def take_remote_bytes(self) -> int:
        """Payload bytes this thread received from other hosts since it last asked."""
        received = getattr(self._count, "bytes", 0)
        self._count.bytes = 0
        return int(received)

    def take_rows(self) -> tuple[int, int]:
        """Rows this thread gathered since it last asked, and how many came from other hosts; 0, 0 with one host."""
        rows = getattr(self._count, "rows", (0, 0))
        self._count.rows = (0, 0)
        return rows

    def _ask(
        self, shares: _Shares[T], submit: Callable[[RemoteHost, Sequence[T]], Pending], local: Callable[..., Any]
    ) -> Iterator[tuple[int, _Share[T], Any]]:
        """Each share with its host and answer; the remote hosts work while this one does."""
        asked = {host: [share.request for share in mine] for host, mine in shares.items()}
        under_way = {host: submit(self.remotes[host], requests) for host, requests in asked.items() if host != _HERE}
        if _HERE in shares:
            for share, answer in zip(shares[_HERE], local(asked[_HERE]), strict=True):
                yield _HERE, share, answer
        for host, pending in under_way.items():
            for share, answer in zip(shares[host], pending.result(), strict=True):
                yield host, share, answer

    def _slices(self, edge_type: EdgeType) -> Iterator[tuple[int, int, int, int]]:
        """Host, part, first slot and number of edges of every slice, the parts taking turns."""
        book = self.books[edge_type]
        of_parts = []
        for part_id in range(book.num_parts):
            begin, end = book.range_of(part_id)
            host = int(self._host_of_part[part_id + 1])
            of_parts.append(
                [
                    (host, part_id, first, min(EDGES_AT_ONCE, end - begin - first))
                    for first in range(0, end - begin, EDGES_AT_ONCE)
                ]
            )
        return (one for turn in zip_longest(*of_parts) for one in turn if one is not None)

    def _owners(self, split: Split, of: AnyType, ids: Ids) -> Groups:
        """Rows by host. Raises ``PartitionError`` for an id nobody owns."""
        groups = split.groups(of, ids)
        if _NOBODY in groups:
            wrong = int(ids[groups[_NOBODY][0]])
            raise PartitionError(f"asked for {of!r} {wrong}; its ids go from 0 to {self.books[of].size - 1}")
        return groups

    def _by_host(self, of: AnyType, ids: Ids) -> Groups:
        if not self.remotes or len(ids) == 0:
            return {_HERE: np.arange(len(ids))}
        return group_by(self._host_of_part[self.books[of].part_of(ids) + 1])

    def _check_hop(self, request: HopRequest) -> None:
        """Raise ``PartitionError`` for an unknown type or attribute, whoever owns the rows."""
        check_type(self.local.store, request.edge_type)
        if request.weight is not None:
            row_spec(self.local.store, request.edge_type, request.weight)
        if request.bound is not None and request.bound.on == "edge":
            row_spec(self.local.store, request.edge_type, request.bound.attr)

    def _row_specs(self, request: RowRequest) -> dict[str, _RowSpec]:
        """What each attribute has to be. Raises ``PartitionError`` for an unknown type or attribute."""
        check_type(self.local.store, request.of)
        return {name: row_spec(self.local.store, request.of, name) for name in request.attrs}

    def _check_rows(self, host: int, rows: Mapping[str, Array], specs: Mapping[str, _RowSpec]) -> None:
        for name, (dtype, shape) in specs.items():
            found = rows[name]
            if found.dtype != dtype or found.shape[1:] != shape:
                raise ServiceError(
                    f"{self.remotes[host].name}: rows of {name} came as {found.dtype} {found.shape[1:]}, "
                    f"the manifest says {dtype} {shape}; do both nodes have the same partition?"
                )

    def _put_received(self, whole: EdgeList, at: int, pending: Pending) -> None:
        edges: EdgeList = pending.result()
        self._add_bytes(edges.src, edges.dst, edges.orig_id)
        _put(whole, at, edges)

    def _add_rows(self, number: int, remote: bool) -> None:
        gathered, from_others = getattr(self._count, "rows", (0, 0))
        self._count.rows = (gathered + number, from_others + number * remote)

    def _add_bytes(self, *arrays: Array | None) -> None:
        received = sum(array.nbytes for array in arrays if array is not None)
        self._count.bytes = getattr(self._count, "bytes", 0) + received


def _merged(request: HopRequest, answers: Sequence[tuple[Ids, HopSample]]) -> HopSample:
    if len(answers) == 1:
        return answers[0][1]
    return merge_samples(len(request.nodes), answers, request.with_edge)


def _merged_rows(
    num_rows: int, answers: Sequence[tuple[Ids, Mapping[str, Array]]], specs: Mapping[str, _RowSpec]
) -> dict[str, Array]:
    found = [(at, np.arange(len(at)), rows) for at, rows in answers]
    return {
        name: merge_rows(num_rows, [(at, rows[name], order) for at, order, rows in found], *spec)
        for name, spec in specs.items()
    }


def _put(whole: EdgeList, at: int, edges: EdgeList) -> None:
    end = at + len(edges.src)
    whole.src[at:end], whole.dst[at:end], whole.orig_id[at:end] = edges.src, edges.dst, edges.orig_id


def _host_of_part(local: LocalGraph, remotes: Mapping[int, RemoteHost]) -> Array:
    """int16 [num_parts + 2]: node rank serving part p at p + 1, ``_HERE`` for opened ones; the ends are no part."""
    hosts = np.full(local.store.manifest.num_parts + 2, _HERE, np.int16)  # 16 bits are sorted by radix
    hosts[0] = hosts[-1] = _NOBODY
    for node_rank, client in remotes.items():
        for part_id in client.part_ids:
            if part_id not in local.store.parts:
                hosts[part_id + 1] = node_rank
    return hosts
