"""Rows of other hosts that came for the batches just before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.arrays import Array, Ids
from trainer.sample.places import NO_INDEX, IdIndex
from trainer.schema import AnyType

HELD = 2  #: batches
MOST_ANSWERS = 16  #: that are looked into for one kind of rows
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

    The oldest answers go once the others hold as many rows as the last ``batches`` batches needed of other hosts. What
    is kept is what came, not what was handed out: that is the user's to change.
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
            found = _newest((*kept.held.answers, *answers), sum(kept.needed))
            if answers or len(found) < len(kept.held.answers):
                kept.held = Held(found, IdIndex.of([answer.ids for answer in found])) if found else Held()

    def clear(self) -> None:
        with self._lock:
            self._kinds = {}


def _newest(answers: Sequence[Answer], most_rows: int) -> tuple[Answer, ...]:
    """As many of the last ones as the bounds allow."""
    kept: deque[Answer] = deque()
    rows = nbytes = 0
    for answer in reversed(answers):
        rows, nbytes = rows + len(answer.ids), nbytes + answer.num_bytes
        if rows > most_rows or nbytes > MOST_BYTES or len(kept) == MOST_ANSWERS:
            break
        kept.appendleft(answer)
    return tuple(kept)
