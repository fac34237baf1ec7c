"""``DistGraph``: access to a whole graph, from this host's parts and by requests to other hosts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.batch_cost import ByHost, Cost, CostMeter, FromHost
from trainer.core.errors import PartitionError, ServerGone
from trainer.core.remote_settings import SERVER_WAIT, WireRows
from trainer.sampler.feature_gather import HELD_BATCHES, GatherPiece, GatherPlan, HeldRows, HostRows
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import HERE, NOBODY, PartHolders, PendingAnswer, RemoteHost
from trainer.sampler.requests import Gather, GraphAccess, GraphRequest, Groups, Places, RequestSplit
from trainer.sampler.row_index import RowPlacement, SourceCodes, locate
from trainer.sampler.types import RowRequest
from trainer.store.part_store import BookKey
from trainer.store.row_cache import RowCache
from trainer.wire.request import A


@dataclass(frozen=True)
class _Share(Generic[A]):
    """What one host answers of a request."""

    places: Places
    request: GraphRequest[A]


class DistGraph(GraphAccess):
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

    def ask(self, request: GraphRequest[A]) -> A:
        if not self.remotes or (request.of_topology and self.local.store.whole_topology):
            return request.answer(self.local)
        places: dict[int, dict[int, Array]] = defaultdict(dict)
        split = RequestSplit(self._by_host)
        for number, (of, ids) in enumerate(request.owned(self.local.store)):
            groups = split.groups(of, ids)
            if NOBODY in groups:
                wrong = int(ids[groups[NOBODY][0]])
                raise PartitionError(f"no {of!r} with id {wrong}; ids go from 0 to {self.books[of].size - 1}")
            for host, positions in groups.items():
                places[host][number] = positions
        own = places.pop(HERE, None)
        in_flight = self._send(request, split, places)
        answers = [(own, request.share(split, HERE, own).answer(self.local))] if own else []
        return request.merge([*answers, *((share.places, answer) for share, answer in self._receive(in_flight))])

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        if not self.remotes:
            return self.local.gather(requests)
        columns = [self.local.new_rows(request) for request in requests]
        pieces = self._pieces(requests, columns, self._cache, self._held)
        split = RequestSplit(self._by_host)
        places: dict[int, dict[int, Array]] = defaultdict(dict)
        for number, piece in enumerate(pieces):
            for host, at in piece.asked.items():
                places[host][number] = at
        whole = Gather([RowRequest(piece.columns[0], piece.ids, piece.columns[1]) for piece in pieces])
        in_flight = self._send(whole, split, places)
        for piece in pieces:  # own, cached and held rows, while the other hosts answer
            piece.copy_near(self.local)
            if not piece.counts:
                continue
            cached = self._owned(piece, [piece.cached[1]] if piece.cached else [])
            held = self._owned(piece, [placed for _, placed in piece.held])
            counts = {host: len(at) for host, at in piece.asked.items()}
            by_host = {
                host: FromHost(0, counts.get(host, 0) + kept + again, kept, again)
                for host in sorted({*counts, *cached, *held})
                for kept, again in [(cached.get(host, 0), held.get(host, 0))]
            }
            self._meter.add(replace(piece.cost, by_host=ByHost(by_host)))
        answers: list[list[HostRows]] = [[] for _ in pieces]
        for share, answer in self._receive(in_flight):
            for (number, at), rows in zip(share.places.items(), answer, strict=True):
                pieces[number].put(rows, at)
                answers[number].append(HostRows(split.cut(pieces[number].ids, at), rows))
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

    def _owned(self, piece: GatherPiece, placed: Sequence[RowPlacement]) -> dict[int, int]:
        if not placed:
            return {}
        ids = np.concatenate([piece.ids[one.at] for one in placed])
        parts = np.bincount(self.books[piece.columns[0]].part_of(ids), minlength=1)
        hosts: dict[int, int] = defaultdict(int)
        for part in np.flatnonzero(parts).tolist():
            hosts[int(self._holders.table()[part + 1])] += int(parts[part])
        return hosts

    def take_cost(self) -> Cost:
        """Return the cost of this thread's requests since it last called this: bytes, waiting time and rows by source.

        Rows are counted only if there are other hosts.
        """
        return self._meter.take()

    def _send(
        self, request: GraphRequest[A], split: RequestSplit, places: Mapping[int, Places]
    ) -> dict[int, tuple[_Share[A], PendingAnswer[A]]]:
        shares = {host: _Share(at, request.share(split, host, at)) for host, at in places.items()}
        return {host: (share, self.remotes[host].submit(share.request)) for host, share in shares.items()}

    def _receive(
        self, in_flight: Mapping[int, tuple[_Share[A], PendingAnswer[A]]]
    ) -> Iterator[tuple[_Share[A], A]]:  # fmt: skip
        """Wait for the answers, and yield each with its share.

        If a host is lost, its share is requested from other holders of the parts, for which this may have to wait.
        """
        unanswered = []
        for host, (share, pending) in in_flight.items():
            began = time.perf_counter()
            try:
                answer = pending.result()
            except ServerGone as error:
                self._holders.lost(host, error)
                unanswered.append(share)
                continue
            finally:
                self._meter.add(Cost(wait_s=time.perf_counter() - began))
            received = pending.received
            self._meter.add(Cost(remote_bytes=received, by_host=ByHost({host: FromHost(remote_bytes=received)})))
            share.request.check_answer(answer, self.local.store, self.remotes[host].name)
            yield share, answer
        owned = [one for share in unanswered for one in share.request.owned(self.local.store)]
        self._holders.wait_for(part for of, ids in owned for part in np.unique(self.books[of].part_of(ids)).tolist())
        for share in unanswered:
            yield share, self.ask(share.request)

    def _by_host(self, of: BookKey, ids: Ids) -> Groups:
        table = self._holders.table()
        wrong, placed = locate(ids, self.books[of].offsets, self._codes.of_hosts(table), self._codes)
        if wrong >= 0:
            return {NOBODY: np.array([wrong])}
        first = self._codes.first_host
        return {code - first - 1: rows.at for code, rows in placed.items()}
