"""A whole graph for one process: local parts by memory map, the others through their hosts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from trainer.arrays import Array, Ids
from trainer.partition.book import PartitionBook
from trainer.sample.grouping import group_by, merge_rows, merge_samples
from trainer.sample.one_hop import LocalGraph
from trainer.sample.types import HopRequest, HopSample

_HERE = -1


class Pending(Protocol):
    """An answer under way; ``result`` waits at most the client's deadline."""

    def result(self) -> Any: ...


class RemoteHost(Protocol):
    """What routing needs of ``service.client.HostClient``."""

    @property
    def part_ids(self) -> Sequence[int]: ...

    def submit_sample(self, request: HopRequest) -> Pending: ...

    def submit_gather(self, nodes: Ids, attrs: Sequence[str]) -> Pending: ...


class DistGraph:
    """Routes each node to its owner: one request per remote host and hop, local work meanwhile."""

    def __init__(self, local: LocalGraph, remotes: Mapping[int, RemoteHost]):
        self.local, self.remotes, self.book = local, remotes, local.book
        self._host_of_part = _host_of_part(self.book, local, remotes)
        self._count = threading.local()

    def sample_hop(self, request: HopRequest) -> HopSample:
        """Neighbours of any nodes, in request order. Raises ``ServiceError``."""
        groups = self._by_host(request.nodes)
        if set(groups) == {_HERE}:
            return self.local.sample_hop(request)
        under_way = {
            host: self.remotes[host].submit_sample(replace(request, nodes=request.nodes[at]))
            for host, at in groups.items()
            if host != _HERE
        }
        answers: list[tuple[Ids, HopSample]] = []
        if _HERE in groups:
            at = groups[_HERE]
            answers.append((at, self.local.sample_hop(replace(request, nodes=request.nodes[at]))))
        for host, pending in under_way.items():
            sample: HopSample = pending.result()
            self._add_bytes(sample.counts, sample.src, sample.edge_id)
            answers.append((groups[host], sample))
        return merge_samples(len(request.nodes), answers, request.with_edge_id, self.local.id_dtype)

    def gather(self, nodes: Ids, attrs: Sequence[str]) -> Mapping[str, Array]:
        """Rows of any nodes, in request order. Raises ``ServiceError``."""
        groups = self._by_host(nodes)
        if set(groups) == {_HERE}:
            return self.local.gather(nodes, attrs)
        under_way = {
            host: self.remotes[host].submit_gather(nodes[at], attrs) for host, at in groups.items() if host != _HERE
        }
        here = {_HERE: self.local.gather(nodes[groups[_HERE]], attrs)} if _HERE in groups else {}
        rows = here | {host: pending.result() for host, pending in under_way.items()}
        for host in under_way:
            self._add_bytes(*rows[host].values())
        return {name: self._merge(len(nodes), name, groups, rows) for name in attrs}

    def take_remote_bytes(self) -> int:
        """Payload bytes this thread received from other hosts since it last asked."""
        received = getattr(self._count, "bytes", 0)
        self._count.bytes = 0
        return int(received)

    def _merge(
        self, num_nodes: int, name: str, groups: Mapping[int, Ids], rows: Mapping[int, Mapping[str, Array]]
    ) -> Array:
        first = next(iter(rows.values()))[name]
        answers = [(at, rows[host][name], np.arange(len(at))) for host, at in groups.items()]
        return merge_rows(num_nodes, answers, first.dtype, first.shape[1:])

    def _by_host(self, nodes: Ids) -> dict[int, Ids]:
        if not self.remotes or len(nodes) == 0:
            return {_HERE: np.arange(len(nodes))}
        return group_by(self._host_of_part[self.book.part_of(nodes)])

    def _add_bytes(self, *arrays: Array | None) -> None:
        received = sum(array.nbytes for array in arrays if array is not None)
        self._count.bytes = getattr(self._count, "bytes", 0) + received


def _host_of_part(book: PartitionBook, local: LocalGraph, remotes: Mapping[int, RemoteHost]) -> Ids:
    """Node rank serving each part, ``_HERE`` for opened ones: int64 [num_parts]."""
    hosts = np.full(book.num_parts, _HERE, np.int64)
    for node_rank, client in remotes.items():
        for part_id in client.part_ids:
            if part_id not in local.store.parts:
                hosts[part_id] = node_rank
    return hosts
