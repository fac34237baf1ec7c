"""Which rows of other hosts a host caches, and what a rank will receive from other hosts in an epoch.

Sampling is a pure function of seed, epoch and step. A rank therefore samples some batches of its run in advance,
without gathering their rows, and counts the rows of other hosts that they request. The rows counted most are cached.
The same batches, taken through cache and held rows by the code that ``gather`` uses, predict an epoch's bytes.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from trainer.core import rounding
from trainer.core.arrays import Ids
from trainer.core.remote_settings import CacheSize, WireRows
from trainer.core.schema import AnyType, NodeType
from trainer.graph.seed_order import SeedOrder
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.feature_gather import GatherPiece, HeldRows, HostRows
from trainer.sampler.settings import blank_rows, row_spec
from trainer.sampler.subgraph_sampler import CountedAccess
from trainer.sampler.types import RowRequest
from trainer.store.part_store import PartStore
from trainer.store.row_cache import RowCache

LEAST_STEPS, MOST_STEPS = 12, 240  #: batches that are presampled

ENOUGH_ROWS = 2_000_000  #: requested by all presampled batches together, after which no further one is made

MOST_SECONDS = 30.0  #: after which no further one is made: other ranks wait meanwhile

Steps = npt.NDArray[np.float64]  #: a number for each presampled step


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a run."""

    order: SeedOrder
    columns: Mapping[NodeType, tuple[str, ...]]  #: attributes that are gathered of every sampled node
    requests: Callable[[int], Iterator[Sequence[RowRequest]]]  #: samples an epoch's batches, yields what each gathers
    threads: int = 1  #: batches that are made at the same time

    @property
    def epoch_steps(self) -> float:
        """Steps of an epoch; a short last step counts in part."""
        return min(float(self.order.num_steps), self.order.num_seeds / self.order.global_batch)


@dataclass(frozen=True)
class PresampledStep:
    """A batch that was sampled, but not gathered."""

    requests: tuple[RowRequest, ...]
    sampling_bytes: int  #: received from other hosts to sample it


@dataclass(frozen=True)
class RowCounts:
    """How often rows of one node type were requested."""

    ids: Ids  #: int64 [n] global ids, ascending
    counts: npt.NDArray[np.int64]  #: int64 [n], at least 1

    @classmethod
    def of(cls, requested: Sequence[Ids]) -> RowCounts:
        """Count the ids in all of these arrays."""
        return cls(*np.unique(np.concatenate([np.empty(0, np.int64), *requested]), return_counts=True))


@dataclass(frozen=True)
class CachedColumns:
    """The columns that are cached with a row, by node type: of the types that have columns of several dimensions."""

    names: Mapping[NodeType, tuple[str, ...]]
    row_bytes: Mapping[NodeType, int]  #: as they are stored

    @classmethod
    def of(cls, plan: BatchPlan, store: PartStore) -> CachedColumns:
        """With replicated topology columns of one dimension are on every host and need no cache."""
        names, row_bytes = {}, {}
        for of, every in plan.columns.items():
            shapes = {name: row_spec(store, of, name)[1] for name in every}
            if any(shapes.values()):
                names[of] = tuple(name for name in every if shapes[name] or not store.whole_topology)
                row_bytes[of] = sum(_stored_bytes(store, of, name) for name in names[of])
        return cls(names, row_bytes)


@dataclass(frozen=True)
class Prediction:
    """What a rank is expected to receive from other hosts in an epoch, and the cache that this takes into account."""

    steps: int
    presampled: int  #: steps that the prediction rests on; with all of them epoch 1 is predicted exactly
    remote_bytes: float
    remote_bytes_without_cache: float
    hit_rate: float  #: share of the rows of other hosts that the cache has
    cache_rows: int
    cache_bytes: int

    def line(self) -> dict[str, float]:
        """Its record in the metrics."""
        return {
            "steps": self.steps,
            "presampled": self.presampled,
            "remote_bytes": round(self.remote_bytes),
            "remote_bytes_without_cache": round(self.remote_bytes_without_cache),
            "hit_rate": round(self.hit_rate, 4),
            "cache_rows": self.cache_rows,
            "cache_bytes": self.cache_bytes,
        }


def presample(access: CountedAccess, plan: BatchPlan) -> list[PresampledStep]:
    """Sample the first batches of a run, of one epoch after the other: ``MOST_STEPS``, or fewer where they request
    ``ENOUGH_ROWS`` or take ``MOST_SECONDS``. The more are counted, the better the cache fits those that are not.

    With partitioned topology this asks the graph servers of other hosts. Memory: 8 bytes for each requested row.
    Raises ``ServiceError``.
    """
    steps: list[PresampledStep] = []
    if plan.order.num_steps == 0:
        return steps
    rows, began = 0, time.perf_counter()
    for requests in (requests for epoch in count(1) for requests in plan.requests(epoch)):
        steps.append(PresampledStep(tuple(requests), access.take_cost().remote_bytes))
        rows += sum(len(request.ids) for request in requests)
        if len(steps) >= MOST_STEPS or (len(steps) >= LEAST_STEPS and rows >= ENOUGH_ROWS):
            break
        if time.perf_counter() - began > MOST_SECONDS:
            break
    return steps


def counted_steps(steps: Sequence[PresampledStep], plan: BatchPlan) -> Sequence[PresampledStep]:
    """The steps whose rows are counted: all of whole epochs, else all but the last third.

    ``predict`` takes the last third for the steps that were not presampled. The cache fits batches that were counted
    better than others, so these must not be among them.
    """
    return steps if len(steps) >= plan.order.num_steps else steps[: len(steps) - _third(steps)]


def count_remote_rows(
    access: DistGraph, steps: Sequence[PresampledStep], columns: CachedColumns
) -> dict[NodeType, RowCounts]:
    """How often ``steps`` request each row of other hosts, of the types in ``columns``."""
    requested: dict[NodeType, list[Ids]] = defaultdict(list)
    nothing = HeldRows(0)
    for step in steps:
        for piece in access.pieces(step.requests, None, nothing):
            of, names = piece.columns
            if piece.keeps and isinstance(of, str) and set(names) <= set(columns.names.get(of, ())):
                requested[of] += [piece.ids[at] for at in piece.asked.values()]
    return {of: RowCounts.of(ids) for of, ids in requested.items()}


def count_rows(steps: Sequence[PresampledStep], name: str) -> dict[NodeType, RowCounts]:
    """How often ``steps`` request column ``name`` of each node, whoever owns it."""
    requested: dict[NodeType, list[Ids]] = defaultdict(list)
    for request in (request for step in steps for request in step.requests if name in request.attrs):
        if isinstance(request.of, str):
            requested[request.of].append(request.ids)
    return {of: RowCounts.of(ids) for of, ids in requested.items()}


def most_requested(
    counts: Mapping[NodeType, RowCounts], row_bytes: Mapping[NodeType, int], budget: int,
    candidates: Callable[[NodeType], Ids],
) -> dict[NodeType, Ids]:  # fmt: skip
    """Global ids, ascending, of the rows counted most per byte; together they take at most ``budget`` bytes.

    Of equal rows those of the earlier type come first, then those of lower id. Where all counted rows fit, the other
    ``candidates`` of the same types follow in this order: an epoch may request rows that were not counted.
    """
    types = [of for of in row_bytes if of in counts and len(counts[of].ids)]
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
        every = candidates(of)
        more = every[~np.isin(every, chosen[of], assume_unique=True)][: left // row_bytes[of]]
        chosen[of] = np.sort(np.concatenate([chosen[of], more]))
        left -= row_bytes[of] * len(more)
    return chosen


def remote_ids(store: PartStore, of: NodeType) -> Ids:
    """Global ids of the nodes of parts that are not on this host, int64, ascending."""
    book = store.books[of]
    ranges = [book.range_of(part) for part in range(book.num_parts) if part not in store.parts]
    return np.concatenate([np.empty(0, np.int64), *(np.arange(begin, end) for begin, end in ranges)])


def budget_of(size: CacheSize, store: PartStore, row_bytes: Mapping[NodeType, int]) -> int:
    """Bytes that a cache of ``size`` may take; a share is one of all rows of parts that are not on this host."""
    if size.bytes is not None:
        return size.bytes
    here = {of: [store.books[of].range_of(part) for part in store.parts] for of in row_bytes}
    remote = {of: store.books[of].size - sum(end - begin for begin, end in ranges) for of, ranges in here.items()}
    return round(size.share * sum(remote[of] * width for of, width in row_bytes.items()))


def predict(access: DistGraph, plan: BatchPlan, steps: Sequence[PresampledStep], cache: RowCache | None) -> Prediction:
    """Take the steps of epoch 1 through ``cache`` and held rows; those that were not presampled are like the last third
    of the others."""
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
    """Runs presampled steps as ``DistGraph.gather`` would, but requests nothing and only counts, step by step."""

    def __init__(self, access: DistGraph, cache: RowCache | None, threads: int):
        self.received: list[float] = []  #: bytes
        self.remote_rows: list[float] = []  #: rows of other hosts that can be cached
        self.cached_rows: list[float] = []  #: of them, those that the cache has
        self._access, self._cache, self._threads = access, cache, threads
        self._held = HeldRows(access.held)
        self._under_way: deque[Sequence[GatherPiece]] = (
            deque()
        )  #: batches made beside the next one, which finds none of them

    def run(self, steps: Sequence[PresampledStep]) -> None:
        for step in steps:
            pieces = self._access.pieces(step.requests, self._cache, self._held)
            self.received.append(step.sampling_bytes + sum(self._received_bytes(piece) for piece in pieces))
            self.remote_rows.append(sum(piece.cost.remote_rows for piece in pieces if piece.keeps))
            self.cached_rows.append(sum(piece.cost.cached_rows for piece in pieces if piece.keeps))
            self._under_way.append(pieces)
            if len(self._under_way) >= self._threads:
                self._hold(self._under_way.popleft())

    def _received_bytes(self, piece: GatherPiece) -> int:
        (of, names), store = piece.columns, self._access.local.store
        width = sum(_wire_bytes(store, of, name, self._access.wire_rows) for name in names)
        return width * sum(map(len, piece.asked.values()))

    def _hold(self, pieces: Sequence[GatherPiece]) -> None:
        for piece in pieces:
            if piece.keeps:
                answers = [_blank_answer(piece, at) for at in piece.asked.values()]
                self._held.add(piece.columns, piece.cost.remote_rows, answers)


def _blank_answer(piece: GatherPiece, at: npt.NDArray[np.int32]) -> HostRows:
    """An answer with the ids of these rows of ``piece``; its rows are blank and take no memory."""
    rows = {name: blank_rows(len(at), values.dtype, values.shape[1:]) for name, values in piece.out.items()}
    return HostRows(piece.ids[at], rows)


def _third(steps: Sequence[PresampledStep]) -> int:
    return max(1, len(steps) // 3)


def _wire_bytes(store: PartStore, of: AnyType, name: str, wire_rows: WireRows) -> int:
    """Bytes of one row of a column as it is sent."""
    spec = store.manifest.attrs_of(of).get(name)
    if spec is None:
        return _stored_bytes(store, of, name)
    return rounding.row_bytes(name, spec.stored, spec.shape, spec.travels_as(wire_rows))


def _stored_bytes(store: PartStore, of: AnyType, name: str) -> int:
    dtype, shape = row_spec(store, of, name)
    return dtype.itemsize * math.prod(shape)
