"""Rows of other hosts that came for the batches just before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.schema import AnyType
from trainer.sampler.row_index import NO_INDEX, IdIndex

HELD = 2  #: batches

MOST_ANSWERS = 16  #: arrays that the answers of one kind are kept in

MOST_BYTES = 1 << 28  #: of one kind of rows

Columns = tuple[AnyType, tuple[str, ...]]  #: a type and its attributes


@dataclass(frozen=True)
class Answer:
    """What a host has answered; nobody else writes to it."""

    ids: Ids  #: int64 [m]
    rows: Mapping[str, Array]  #: name -> [m, …]

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.rows.values())


@dataclass(frozen=True)
class Held:
    """Answers of one kind, the oldest first, and where each id is in them."""

    answers: tuple[Answer, ...] = ()
    index: IdIndex = NO_INDEX


@dataclass
class _Kept:
    needed: deque[int]  #: rows of others that each of the last batches needed
    held: Held = field(default_factory=Held)


class HeldRows:
    """Answers by kind. Safe to use from several threads: what one has got stays as it was.

    The oldest answers go once the others hold as many rows as the last ``batches`` batches needed of other hosts, those
    that a cache had included: with a cache the same room lasts for more batches. What is kept is what came, not what
    was handed out: that is the user's to change.
    """

    def __init__(self, batches: int = HELD):
        self._batches = batches
        self._lock = threading.Lock()
        self._kinds: dict[Columns, _Kept] = {}

    def of(self, columns: Columns) -> Held:
        kept = self._kinds.get(columns)
        return Held() if kept is None else kept.held

    def add(self, columns: Columns, needed: int, answers: Sequence[Answer]) -> None:
        """``answers`` came for a batch that needed ``needed`` rows of other hosts."""
        if self._batches == 0 or needed == 0:
            return
        with self._lock:
            kept = self._kinds.setdefault(columns, _Kept(deque(maxlen=self._batches)))
            kept.needed.append(needed)
            kept.held = _with_more(kept.held, answers, sum(kept.needed))

    def clear(self) -> None:
        with self._lock:
            self._kinds = {}


def _with_more(held: Held, answers: Sequence[Answer], most_rows: int) -> Held:
    """The answers the bounds allow, in few arrays; the index is made anew only where some have gone."""
    every = (*held.answers, *answers)
    found = _newest(every, most_rows)
    if not found:
        return Held()
    if len(found) == len(every):
        index = held.index.with_more([answer.ids for answer in answers]) if answers else held.index
    else:
        index = None
    index = index or IdIndex.of([answer.ids for answer in found])
    while len(found) > MOST_ANSWERS:
        found = _joined(found)
    return Held(found, replace(index, ends=IdIndex.ends_of([answer.ids for answer in found])))


def _joined(answers: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """One fewer: the two neighbours with the fewest rows become one, so that every id stays in its place."""
    pairs = [len(one.ids) + len(next_one.ids) for one, next_one in pairwise(answers)]
    at = pairs.index(min(pairs))
    one, other = answers[at : at + 2]
    rows = {name: np.concatenate([one.rows[name], other.rows[name]]) for name in one.rows}
    return (*answers[:at], Answer(np.concatenate([one.ids, other.ids]), rows), *answers[at + 2 :])


def _newest(answers: Sequence[Answer], most_rows: int) -> tuple[Answer, ...]:
    """As many of the last ones as the bounds allow."""
    kept: deque[Answer] = deque()
    rows = nbytes = 0
    for answer in reversed(answers):
        rows, nbytes = rows + len(answer.ids), nbytes + answer.num_bytes
        if rows > most_rows or nbytes > MOST_BYTES:
            break
        kept.appendleft(answer)
    return tuple(kept)
