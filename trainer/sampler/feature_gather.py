"""Gathers requested attributes: finds the source of each row, and copies rows from the sources to the result arrays."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Columns, Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import PartitionError
from trainer.core.schema import AnyType
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import HERE
from trainer.sampler.row_index import NO_INDEX, IdIndex, RowPlacement, SourceCodes, locate, put_rows
from trainer.sampler.types import RowRequest
from trainer.store.row_cache import RowCache

HELD_BATCHES = 2  #: number of batches whose answers are held

_MOST_ANSWERS = 16  #: largest number of held answers with the same type and attributes

MOST_BYTES = 1 << 28  #: largest size in bytes of the held answers with the same type and attributes

_ColumnKey = tuple[AnyType, tuple[str, ...]]  #: a type and names of its attributes


@dataclass(frozen=True)
class HostRows:
    ids: Ids  #: int64 [m]
    rows: Mapping[str, Array]  #: name -> [m, …]

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.rows.values())


@dataclass(frozen=True)
class _HeldAnswers:
    """Answers of other hosts for one type and set of attributes, kept for later batches.

    The oldest answer is first.
    """

    answers: tuple[HostRows, ...] = ()
    index: IdIndex = NO_INDEX


class HeldRows:
    """Keeps the newest answers of other hosts, by type and attributes, for reuse by the next batches. Thread-safe.

    The number of kept rows is at most the number of remote rows in the last ``batches`` batches.
    """

    def __init__(self, batches: int = HELD_BATCHES):
        self._batches = batches
        self._lock = threading.Lock()
        self._answers: dict[_ColumnKey, _HeldAnswers] = {}
        self._needed: dict[_ColumnKey, deque[int]] = {}  #: rows of other hosts that each of the last batches needed

    def of(self, columns: _ColumnKey) -> _HeldAnswers:
        return self._answers.get(columns, _HeldAnswers())

    def add(self, columns: _ColumnKey, needed: int, answers: Sequence[HostRows]) -> None:
        """Keep the answers that other hosts sent for a batch. ``needed``: number of remote rows in the batch."""
        if self._batches == 0 or needed == 0:
            return
        with self._lock:
            last = self._needed.setdefault(columns, deque(maxlen=self._batches))
            last.append(needed)
            self._answers[columns] = _with_more(self.of(columns), answers, sum(last))

    def clear(self) -> None:
        with self._lock:
            self._answers, self._needed = {}, {}


def _with_more(held: _HeldAnswers, answers: Sequence[HostRows], most_rows: int) -> _HeldAnswers:
    # The newest answers, as many as fit.
    every, newest = (*held.answers, *answers), deque[HostRows]()
    count = nbytes = 0
    for answer in reversed(every):
        count, nbytes = count + len(answer.ids), nbytes + answer.num_bytes
        if count > most_rows or nbytes > MOST_BYTES:
            break
        newest.appendleft(answer)
    if not newest:
        return _HeldAnswers()
    found = list(newest)
    if len(found) == len(every):
        index = held.index.with_more([answer.ids for answer in answers]) if answers else held.index
    else:
        index = None
    index = index or IdIndex.of([answer.ids for answer in found])
    # If they are too many, the smallest neighbours become one.
    while len(found) > _MOST_ANSWERS:
        pairs = [len(one.ids) + len(next_one.ids) for one, next_one in pairwise(found)]
        at = pairs.index(min(pairs))
        one, other = found[at : at + 2]
        rows = {name: np.concatenate([one.rows[name], other.rows[name]]) for name in one.rows}
        found[at : at + 2] = [HostRows(np.concatenate([one.ids, other.ids]), rows)]
    return _HeldAnswers(tuple(found), replace(index, ends=IdIndex.ends_of([answer.ids for answer in found])))


@dataclass(frozen=True)
class GatherPiece:
    """Some attributes of one request, and for each row the source to read it from.

    A source is a part of this host, the row cache, a held answer or another host.
    """

    ids: Ids  #: int64 [n]
    columns: _ColumnKey
    out: Columns  #: columns to be filled
    own: Mapping[int, RowPlacement]  #: rows of own parts, by part
    asked: Mapping[int, npt.NDArray[np.int32]]  #: positions of the rows to request, by node rank
    cached: tuple[Columns, RowPlacement] | None  #: cached columns, and which of their rows to copy
    held: Sequence[tuple[Columns, RowPlacement]]  #: held answers, and which of their rows to copy
    counts: bool  #: whether the request's rows are counted in this piece; true for one piece per request
    keeps: bool  #: whether answers are held for the next batches

    def copy_near(self, local: LocalGraph) -> None:
        local.fill(self.columns[0], self.out, self.own)
        for rows, placed in [self.cached, *self.held] if self.cached else self.held:
            self._put(rows, placed)

    def put(self, rows: Columns, at: npt.NDArray[np.int32]) -> None:
        """Copy ``rows``, sent by another host, to the positions ``at`` of the result arrays."""
        self._put(rows, RowPlacement.in_order(at))

    @property
    def cost(self) -> Cost:
        cached = len(self.cached[1].at) if self.cached else 0
        held = sum(len(placed.at) for _, placed in self.held)
        remote = cached + held + sum(map(len, self.asked.values()))
        return Cost(rows=len(self.ids), remote_rows=remote, cached_rows=cached, held_rows=held)

    def _put(self, rows: Columns, placed: RowPlacement) -> None:
        for name, values in self.out.items():
            put_rows(rows[name], placed, values)


class GatherPlan:
    """Divides the requests of one ``gather`` call into pieces.

    A piece has attributes of one kind: those that every host stores (replicated topology), those in the row cache, or
    all others. ``hosts``: the host that answers for each part (``PartHolders.table``).
    """

    def __init__(self, local: LocalGraph, hosts: Array, cache: RowCache | None, held: HeldRows):
        self._local, self._cache, self._held = local, cache, held
        self._codes = SourceCodes(local.store.manifest.num_parts, _MOST_ANSWERS)
        self._near = self._codes.of_parts(hosts, HERE)
        everywhere = hosts.copy()
        everywhere[1:-1] = HERE
        self._all_here = self._codes.of_parts(everywhere, HERE)
        self._located: dict[tuple[Any, ...], Mapping[int, RowPlacement]] = {}

    def pieces(self, request: RowRequest, out: Columns) -> Iterator[GatherPiece]:
        """Divide a request into pieces. ``out``: the arrays to be filled, by attribute.

        Raises ``PartitionError`` for an id outside all parts.
        """
        # 1-d columns, which every host has with replicated topology
        on_all_hosts = {name for name in out if self._local.store.whole_topology and out[name].ndim == 1}
        kept = self._cache.types.get(request.of) if self._cache and isinstance(request.of, str) else None
        cached_names = set(kept.rows) - on_all_hosts if kept else set()
        # In this order: on all hosts, in the cache, others.
        column_sets = [on_all_hosts, cached_names & set(out), set(out) - on_all_hosts - cached_names]
        name_groups = [tuple(name for name in out if name in names) for names in column_sets]
        # the widest kind, which counts the rows
        widths = [sum(math.prod(out[name].shape[1:]) * out[name].itemsize for name in names) for names in name_groups]
        main = max(range(3), key=lambda group: (widths[group], bool(name_groups[group])))
        for group, names in enumerate(name_groups):
            if not names and group != main:
                continue
            filled = {name: out[name] for name in names}
            columns = request.of, names
            keeps = group > 0 and isinstance(request.of, str) and any(values.ndim > 1 for values in filled.values())
            held = self._held.of(columns) if keeps else _HeldAnswers()
            from_cache = kept if group == 1 else None
            slots = None if from_cache is None else from_cache.slots
            # Equal arguments give the same arrays, so that a message contains the ids only once.
            index = id(held.index) if held.index is not NO_INDEX else 0
            key = request.of, id(request.ids), group == 0, id(slots), index
            if key not in self._located:
                book = self._local.books[request.of]
                of_part = self._all_here if group == 0 else self._near
                wrong, located = locate(request.ids, book.offsets, of_part, self._codes, slots, held.index)
                if wrong >= 0:
                    raise PartitionError(
                        f"no {request.of!r} with id {int(request.ids[wrong])}; ids go from 0 to {book.size - 1}"
                    )
                self._located[key] = located
            placed = self._located[key]
            first = self._codes.held(0)
            cached = placed.get(self._codes.cached)
            yield GatherPiece(
                ids=request.ids, columns=columns, out=filled, counts=group == main, keeps=keeps,
                own={code: rows for code, rows in placed.items() if code < self._codes.num_parts},
                asked={code - self._codes.first_host: rows.at for code, rows in placed.items()
                       if code >= self._codes.first_host},
                cached=None if from_cache is None or cached is None else (from_cache.rows, cached),
                held=[(held.answers[code - first].rows, rows) for code, rows in placed.items()
                      if first <= code < self._codes.first_host],
            )  # fmt: skip
