"""Splits edges by time: validation after training, test after validation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.memory import size_text
from trainer.data.work_arrays import slices

_TIME_BYTES = 64  #: of memory per different time while they are counted


@dataclass(frozen=True)
class TimeSplit:
    """The time of the first validation edges, and that of the first test edges. Earlier edges are for training.

    A time is None if its split has no edges.
    """

    val: int | None
    test: int | None

    def of(self, times: Array) -> tuple[Array, Array]:
        """Return two masks, bool [E]: the edges for validation, and those for test. ``times``: the edges' times."""
        test = np.zeros(len(times), bool) if self.test is None else times >= self.test
        later = test if self.val is None else times >= self.val
        return later & ~test, test


def counted_times(times: Array, memory: int | None, where: str) -> tuple[Array, Array]:
    """Return the different times in order, and how often each occurs, int64 [n] both. Reads the times in pieces.

    ``times``: integers [E] or [E, 1]. Raises ``DataError`` if the different times need more than ``memory`` bytes.
    """
    known, counts = np.empty(0, times.dtype), np.empty(0, np.int64)
    for piece in slices(len(times)):
        more, often = np.unique(times[piece].reshape(-1), return_counts=True)
        known, place = np.unique(np.concatenate([known, more]), return_inverse=True)
        counts = np.bincount(place.reshape(-1), np.concatenate([counts, often]), len(known)).astype(np.int64)
        if memory is not None and _TIME_BYTES * len(known) > memory:
            raise DataError(
                f"{where}: there are so many different times that they take more than the {size_text(memory)} of "
                "memory that may be used; give coarser times, such as days, or raise data.partition.memory (--memory)"
            )
    return known, counts


def split_times(known: Array, counts: Array, val: float, test: float, where: str) -> TimeSplit:
    """Choose the times at which the validation and the test split of edges begin.

    Edges of equal time are in the same split, so the sizes of the splits may differ from the wanted sizes. Each split
    begins at the time that makes its size nearest to the wanted size. If two times are equally good, the split begins
    at the earlier time. Training and every wanted split get at least one time. The result does not depend on the order
    of the edges.

    Args:
        known: The different times of the edges, ascending, integers [n].
        counts: Number of edges at each of them, int64 [n].
        val: Wanted share of the edges for validation, 0 to 1; 0: none.
        test: As ``val``.
        where: Names the edges and the attribute at the beginning of messages.

    Raises ``DataError`` if there are fewer different times than splits, training included.
    """
    least = 1 + (val > 0) + (test > 0)
    if len(known) < least:
        found = f"all equal ({known[0]})" if len(known) == 1 else f"only {len(known)} different ones"
        raise DataError(
            f"{where}: {found}, so these edges cannot be split into {least} sets by time; use more precise times, or "
            "leave out option hold_out_time"
        )
    from_on = np.append(np.cumsum(counts[::-1])[::-1], 0)  # edges at this time and later
    test_at = val_at = len(known)
    if test > 0:
        test_at = _nearest(from_on, 1 + (val > 0), test_at, test * int(from_on[0]))
    if val > 0:
        val_at = _nearest(from_on, 1, test_at, from_on[test_at] + val * int(from_on[0]))
    first = [int(known[at]) if at < len(known) else None for at in (val_at, test_at)]
    return TimeSplit(first[0] if val > 0 else None, first[1])


def _nearest(sizes: Array, begin: int, end: int, wanted: float) -> int:
    """Return the first index i, ``begin <= i < end``, for which ``sizes[i]`` is nearest to ``wanted``."""
    return begin + int(np.argmin(np.abs(sizes[begin:end] - wanted)))
