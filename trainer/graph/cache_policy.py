"""Chooses the rows of other hosts that a host caches, and predicts the bytes that a rank receives in an epoch.

A rank samples some of its batches in advance, without gathering rows. It counts the remote rows that the batches
request, and caches the most requested ones.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from trainer.core import rounding
from trainer.core.arrays import Ids
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import AnyType, NodeType
from trainer.graph.seed_order import SeedOrder
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.feature_gather import GatherPiece, HeldRows, HostRows
from trainer.sampler.settings import blank_rows, row_spec
from trainer.sampler.subgraph_sampler import CountedAccess
from trainer.sampler.types import RowRequest
from trainer.store.part_store import PartStore
from trainer.store.row_cache import RowCache

LEAST_STEPS, MOST_STEPS = 12, 240  #: number of presampled batches

_ENOUGH_ROWS = 2_000_000  #: presampling stops after this many requested rows, but not before LEAST_STEPS batches

_MOST_SECONDS = 30.0  #: presampling stops after this time, as other ranks wait for it

Steps = npt.NDArray[np.float64]  #: one number for each presampled step


@dataclass(frozen=True)
class BatchPlan:
    """The batches that a rank will make in a run."""

    order: SeedOrder
    columns: Mapping[NodeType, tuple[str, ...]]  #: attributes gathered of every sampled node
    #: samples the batches of an epoch and yields the row requests of each
    requests: Callable[[int], Iterator[Sequence[RowRequest]]]
    threads: int = 1  #: number of batches made at the same time
    keeps_edges: bool = False  #: edges that a batch has requested are kept for later ones (PageRank)

    @property
    def epoch_steps(self) -> float:
        """Number of steps of an epoch. A last step with fewer seeds counts as a fraction."""
        return min(float(self.order.num_steps), self.order.num_seeds / self.order.global_batch)


@dataclass(frozen=True)
class _PresampledStep:
    requests: tuple[RowRequest, ...]
    sampling_bytes: int  #: bytes received from other hosts while sampling


@dataclass(frozen=True)
class RowCounts:
    ids: Ids  #: int64 [n] global ids, ascending
    counts: npt.NDArray[np.int64]  #: int64 [n], at least 1

    @classmethod
    def of(cls, requested: Sequence[Ids]) -> RowCounts:
        return cls(*np.unique(np.concatenate([np.empty(0, np.int64), *requested]), return_counts=True))


@dataclass(frozen=True)
class CachedColumns:
    """The columns that are cached for each row, by node type."""

    names: Mapping[NodeType, tuple[str, ...]]
    row_bytes: Mapping[NodeType, int]  #: bytes of one row of these columns, as stored

    @classmethod
    def of(cls, plan: BatchPlan, store: PartStore) -> CachedColumns:
        """Choose the columns to cache, for the node types that have a multi-dimensional column.

        With replicated topology only multi-dimensional columns are cached, because every host has all 1-d columns.
        """
        names, row_bytes = {}, {}
        for of, every in plan.columns.items():
            shapes = {name: row_spec(store, of, name)[1] for name in every}
            if any(shapes.values()):
                names[of] = tuple(name for name in every if shapes[name] or not store.whole_topology)
                row_bytes[of] = sum(_stored_bytes(store, of, name) for name in names[of])
        return cls(names, row_bytes)


@dataclass(frozen=True)
class Prediction:
    """The bytes that a rank is expected to receive in an epoch, with the row cache and without."""

    steps: int
    presampled: int  #: number of presampled steps of epoch 1; if all, the prediction of epoch 1 is exact
    remote_bytes: float  #: bytes received with the cache
    remote_bytes_without_cache: float
    hit_rate: float  #: fraction of the requested rows of other hosts that are cached
    cache_rows: int  #: number of cached rows
    cache_bytes: int  #: size of the cache

    def __str__(self) -> str:
        traffic = f"expected traffic: {self.remote_bytes / 1e6:,.1f} MB per rank and epoch"
        if not self.cache_rows:
            return f"no rows of other hosts cached; {traffic}"
        without = f"({self.remote_bytes_without_cache / 1e6:,.1f} MB without cache)"
        size = f"({self.cache_bytes / 1e6:,.1f} MB)"
        return f"{self.cache_rows:,} rows of other hosts cached {size}; {traffic} {without}"

    def line(self) -> dict[str, float]:
        """Return the values as fields of a metrics line."""
        return {
            "steps": self.steps,
            "presampled": self.presampled,
            "remote_bytes": round(self.remote_bytes),
            "remote_bytes_without_cache": round(self.remote_bytes_without_cache),
            "hit_rate": round(self.hit_rate, 4),
            "cache_rows": self.cache_rows,
            "cache_bytes": self.cache_bytes,
        }


def presample(access: CountedAccess, plan: BatchPlan) -> list[_PresampledStep]:
    """Sample the first batches of a run, epoch after epoch, without gathering rows.

    Stops when ``_ENOUGH_ROWS`` rows are requested, but not before ``LEAST_STEPS`` batches; at the latest after
    ``MOST_STEPS`` batches or ``_MOST_SECONDS`` seconds. Memory: 8 bytes per requested row. Raises ``ServiceError``.
    """
    steps: list[_PresampledStep] = []
    if plan.order.num_steps == 0:
        return steps
    rows, began = 0, time.perf_counter()
    for requests in (requests for epoch in count(1) for requests in plan.requests(epoch)):
        steps.append(_PresampledStep(tuple(requests), access.take_cost().remote_bytes))
        rows += sum(len(request.ids) for request in requests)
        if len(steps) >= MOST_STEPS or (len(steps) >= LEAST_STEPS and rows >= _ENOUGH_ROWS):
            break
        if time.perf_counter() - began > _MOST_SECONDS:
            break
    if plan.keeps_edges and len(steps) >= plan.order.num_steps:
        return [replace(step, sampling_bytes=0) for step in steps]
    return steps


def counted_steps(steps: Sequence[_PresampledStep], plan: BatchPlan) -> Sequence[_PresampledStep]:
    """Return the presampled steps whose requests decide which rows are cached.

    These are all ``steps`` if they cover an epoch, else the first two thirds of ``steps``.
    """
    # ``predict`` extrapolates from the last third, for which the cache must not be chosen.
    return steps if len(steps) >= plan.order.num_steps else steps[: len(steps) - _third(steps)]


def count_remote_rows(
    access: DistGraph, steps: Sequence[_PresampledStep], columns: CachedColumns
) -> dict[NodeType, RowCounts]:
    """Count how often ``steps`` request each remote row, for the node types in ``columns``."""
    requested: dict[NodeType, list[Ids]] = defaultdict(list)
    nothing = HeldRows(0)
    for step in steps:
        for piece in access.pieces(step.requests, None, nothing):
            of, names = piece.columns
            if piece.keeps and isinstance(of, str) and set(names) <= set(columns.names.get(of, ())):
                requested[of] += [piece.ids[at] for at in piece.asked.values()]
    return {of: RowCounts.of(ids) for of, ids in requested.items()}


def most_requested(
    counts: Mapping[NodeType, RowCounts], row_bytes: Mapping[NodeType, int], budget: int,
    candidates: Callable[[NodeType], Sequence[tuple[int, int]]],
) -> dict[NodeType, Ids]:  # fmt: skip
    """Choose the rows with most requests per byte, up to ``budget`` bytes in total. Returns ascending global ids.

    ``counts``: number of requests of each requested row. ``row_bytes``: size of a row of each type. Between rows with
    equally many requests per byte, the earlier type is preferred, then the lower id.

    If all requested rows fit, the rest of the budget is filled with other rows, in the order of ``candidates(type)``,
    which returns half-open ranges of global ids. Memory: 8 bytes per requested and per chosen row.
    """
    types = [of for of, width in row_bytes.items() if width and of in counts and len(counts[of].ids)]
    chosen, left = {}, budget
    if types:
        sizes = np.repeat([row_bytes[of] for of in types], [len(counts[of].ids) for of in types])
        order = np.argsort(-np.concatenate([counts[of].counts for of in types]) / sizes, kind="stable")
        fits = np.zeros(len(order), np.bool_)
        fits[order] = np.cumsum(sizes[order]) <= budget
        ends = np.cumsum([len(counts[of].ids) for of in types])[:-1]
        chosen = {of: counts[of].ids[fit] for of, fit in zip(types, np.split(fits, ends), strict=True)}
        left -= int(sizes[fits].sum())
        types = types if fits.all() else []
    for of in types:
        more = _first_others(candidates(of), chosen[of], left // row_bytes[of])
        chosen[of] = np.sort(np.concatenate([chosen[of], more]))
        left -= row_bytes[of] * len(more)
    return chosen


def _first_others(ranges: Sequence[tuple[int, int]], known: Ids, count: int) -> Ids:
    found = [np.empty(0, np.int64)]
    for begin, end in ranges:
        first, last = np.searchsorted(known, [begin, end])
        some = np.arange(begin, min(end, begin + count + last - first))
        found.append(some[~np.isin(some, known[first:last], assume_unique=True)][:count])
        count -= len(found[-1])
    return np.concatenate(found)


def budget_of(size: CacheSize, store: PartStore, row_bytes: Mapping[NodeType, int]) -> int:
    """Return the size of the cache in bytes. A ``size`` in percent refers to the bytes of all rows of other hosts.

    ``row_bytes``: size of a row of each node type.
    """
    if size.bytes is not None:
        return size.bytes
    here = {of: [store.books[of].range_of(part) for part in store.parts] for of in row_bytes}
    remote = {of: store.books[of].size - sum(end - begin for begin, end in ranges) for of, ranges in here.items()}
    return round(size.share * sum(remote[of] * width for of, width in row_bytes.items()))


def predict(access: DistGraph, plan: BatchPlan, steps: Sequence[_PresampledStep], cache: RowCache | None) -> Prediction:
    """Predict the bytes that a rank receives in an epoch, with and without ``cache``, from the presampled steps.

    Only presampled steps of epoch 1 are used. If the epoch has more steps, each further step is assumed to cost as much
    as the mean of the last third of the presampled steps.
    """
    steps = steps[: plan.order.num_steps]
    without = _Replay(access, None, plan.threads)
    without.run(steps)
    cached = without
    if cache is not None:
        cached = _Replay(access, cache, plan.threads)
        cached.run(steps)

    def of_epoch(values: Sequence[float]) -> float:
        more = max(0.0, plan.epoch_steps - len(steps))
        return sum(values) + (more * float(np.mean(values[-_third(steps) :])) if steps else 0.0)

    return Prediction(
        steps=plan.order.num_steps,
        presampled=len(steps),
        remote_bytes=of_epoch(cached.received),
        remote_bytes_without_cache=of_epoch(without.received),
        hit_rate=of_epoch(cached.cached_rows) / max(1.0, of_epoch(cached.remote_rows)),
        cache_rows=0 if cache is None else cache.num_rows,
        cache_bytes=0 if cache is None else cache.num_bytes,
    )


class _Replay:
    """Counts the bytes and rows that gathering would receive in presampled steps, without sending requests."""

    def __init__(self, access: DistGraph, cache: RowCache | None, threads: int):
        self.received: list[float] = []  #: bytes from other hosts
        self.remote_rows: list[float] = []  #: requested rows of other hosts that can be cached
        self.cached_rows: list[float] = []  #: rows counted in ``remote_rows`` that are in the cache
        self._access, self._cache, self._threads = access, cache, threads
        self._held = HeldRows(access.held)
        #: Batches that are still being made when the next batch is gathered, so that it cannot use their rows.
        self._in_flight: deque[Sequence[GatherPiece]] = deque()

    def run(self, steps: Sequence[_PresampledStep]) -> None:
        store = self._access.local.store
        for step in steps:
            pieces = self._access.pieces(step.requests, self._cache, self._held)
            received = step.sampling_bytes
            for piece in pieces:
                of, names = piece.columns
                known, width = store.manifest.attrs_of(of), 0
                for name in names:
                    if (spec := known.get(name)) is None:
                        width += _stored_bytes(store, of, name)
                    else:
                        as_sent = spec.travels_as(self._access.wire_rows)
                        width += rounding.row_bytes(name, spec.stored, spec.shape, as_sent)
                received += width * sum(map(len, piece.asked.values()))
            self.received.append(received)
            self.remote_rows.append(sum(piece.cost.remote_rows for piece in pieces if piece.keeps))
            self.cached_rows.append(sum(piece.cost.cached_rows for piece in pieces if piece.keeps))
            self._in_flight.append(pieces)
            if len(self._in_flight) >= self._threads:
                for piece in self._in_flight.popleft():
                    if piece.keeps:
                        answers = []
                        for at in piece.asked.values():
                            blank = {of: blank_rows(len(at), to.dtype, to.shape[1:]) for of, to in piece.out.items()}
                            answers.append(HostRows(piece.ids[at], blank))
                        self._held.add(piece.columns, piece.cost.remote_rows, answers)


def _third(steps: Sequence[_PresampledStep]) -> int:
    return max(1, len(steps) // 3)


def _stored_bytes(store: PartStore, of: AnyType, name: str) -> int:
    dtype, shape = row_spec(store, of, name)
    return dtype.itemsize * math.prod(shape)
