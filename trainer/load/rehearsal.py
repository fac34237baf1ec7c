"""What the first batches of an epoch will ask other hosts for: they are made without their rows.

A sample depends on seed, epoch and step only, so these are the run's own batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.load.asked import wire_bytes
from trainer.load.hot import BatchPlan
from trainer.sample.collect import Piece
from trainer.sample.held import Answer, HeldRows
from trainer.sample.routing import DistGraph
from trainer.sample.specs import blank_rows
from trainer.sample.types import RowRequest
from trainer.store.cache import RowCache

LEAST_STEPS, MOST_STEPS = 12, 48
ENOUGH_ROWS = 2_000_000  #: of all steps, after which no further one is made


@dataclass(frozen=True)
class Rehearsal:
    """Of one rank."""

    with_cache: npt.NDArray[np.float64]  #: bytes received, by step
    without: npt.NDArray[np.float64]
    hit_rate: float  #: share of the rows of others that the cache has


def rehearse(access: DistGraph, plan: BatchPlan, cache: RowCache | None) -> Rehearsal | None:
    """None where it is not known what the batches will gather, or that depends on edges of other hosts."""
    if plan.coming is None or not access.local.store.whole_topology:
        return None
    with_cache, without = _Played(access, cache, plan.threads), _Played(access, None, plan.threads)
    for requests in _first(plan.coming()):
        without.step(requests)
        if cache is not None:
            with_cache.step(requests)
    if cache is None:
        with_cache = without
    remote = with_cache.remote_rows
    return Rehearsal(np.array(with_cache.received), np.array(without.received), with_cache.cached_rows / max(1, remote))


def _first(coming: Iterator[Sequence[RowRequest]]) -> Iterator[Sequence[RowRequest]]:
    """As many as are needed."""
    rows = 0
    for step, requests in enumerate(coming):
        yield requests
        rows += sum(len(request.ids) for request in requests)
        if step + 1 >= MOST_STEPS or (step + 1 >= LEAST_STEPS and rows >= ENOUGH_ROWS):
            return


class _Played:
    """A graph of this host that only counts what it would ask for."""

    def __init__(self, access: DistGraph, cache: RowCache | None, threads: int):
        self.received: list[float] = []
        self.remote_rows = self.cached_rows = 0
        self._access, self._cache, self._held = access, cache, HeldRows(access.held)
        self._late: deque[Sequence[Piece]] = deque()  #: batches that are made beside the next one
        self._threads = threads

    def step(self, requests: Sequence[RowRequest]) -> None:
        pieces = self._access.pieces(requests, self._cache, self._held)
        self.received.append(sum(self._asked_bytes(piece) for piece in pieces))
        for piece in pieces:
            if piece.keeps:
                self.remote_rows += piece.cost.remote_rows
                self.cached_rows += piece.cost.cached_rows
        self._late.append(pieces)
        if len(self._late) >= self._threads:
            self._hold(self._late.popleft())

    def _asked_bytes(self, piece: Piece) -> float:
        (of, names), store = piece.columns, self._access.local.store
        width = sum(wire_bytes(store, of, name, self._access.wire_rows) for name in names)
        return width * sum(map(len, piece.asked.values()))

    def _hold(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.keeps:
                self._held.add(
                    piece.columns, piece.cost.remote_rows, [_blank(piece, at) for at in piece.asked.values()]
                )


def _blank(piece: Piece, at: npt.NDArray[np.int32]) -> Answer:
    """As a host would answer, without memory."""
    rows = {name: blank_rows(len(at), values.dtype, values.shape[1:]) for name, values in piece.out.items()}
    return Answer(piece.ids[at], rows)
