"""Draws negative links by place in the global batch, so that they do not depend on ranks or parts.

Negative (i, j) is the j-th of the positive at place i of the global batch. Candidates are original
ids, so the partition does not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError, SettingsError
from trainer.core.rng import GOLDEN, fractions, hashed

SRC, DST = 0, 1  #: which end of a link is drawn

_TRIES = 64  #: draws per negative that may hit a real link before giving up

IsLink = Callable[[Ids, Ids], npt.NDArray[np.bool_]]  #: (sources, targets), original ids -> bool [n]


@dataclass(frozen=True)
class NegativeRule:
    """How negatives are drawn; torch_geometric's ``NegativeSampling``, and whether real links are avoided."""

    triplet: bool  #: draw targets only, for each positive's source; else both ends
    amount: float  #: negatives per positive; whole for triplets
    avoid_links: bool = False

    @property
    def most(self) -> int:
        """Most negatives of one positive."""
        return math.ceil(self.amount)

    def owners(self, places: Ids, global_size: int) -> tuple[Ids, Ids]:
        """Which negatives belong to the positives at ``places``: index into ``places`` and j, int64 [m] each.

        In all there are ceil(amount * global_size); j = 0 of every positive comes first, so a fraction
        falls on the first places of the batch.
        """
        total = math.ceil(self.amount * global_size)
        j, owner = np.divmod(np.arange(self.most * len(places)), max(len(places), 1))
        wanted = j * global_size + places[owner] < total
        return owner[wanted], j[wanted]


class NegativeDraw:
    """Draws original ids of one node type: uniformly, by weight, or among nodes up to a time."""

    def __init__(self, num_nodes: int, weight: Array | None = None, times: Array | None = None):
        """``weight``: [num_nodes], not negative, need not sum to 1; ``times``: integer [num_nodes].

        Raises ``SettingsError`` for weights that do not fit, and for weights together with times.
        """
        self._num_nodes = num_nodes
        self._sums = None if weight is None else _running_sums(weight, num_nodes)
        self._by_time: Ids | None = None
        if times is not None:
            if weight is not None:
                raise SettingsError("negatives cannot be drawn by weight and by time at once; leave the weights out")
            self._by_time = np.argsort(times, kind="stable")
            self._sorted_times = times[self._by_time]

    def draw(self, keys: npt.NDArray[np.uint64], times: Ids | None = None) -> Ids:
        """One original id per key, int64 [n]; none later than ``times`` where given. Raises ``DataError``."""
        if len(keys) == 0:
            return np.empty(0, np.int64)
        if self._num_nodes == 0:
            raise DataError("there is no node to draw a negative from")
        share = fractions(keys)
        if self._sums is not None:
            return np.searchsorted(self._sums, share * self._sums[-1], side="right").astype(np.int64)
        if self._by_time is None or times is None:
            return (share * self._num_nodes).astype(np.int64)
        room = np.searchsorted(self._sorted_times, times, side="right")
        if (none := np.flatnonzero(room == 0)).size:
            raise DataError(f"no node is as old as time {times[none[0]]}: there is no negative for a link of that time")
        return self._by_time[(share * room).astype(np.int64)]


def draw_negatives(
    rule: NegativeRule, key: int, places: Ids, owner: Ids, j: Ids, positives: tuple[Ids, Ids],
    ends: tuple[NegativeDraw, NegativeDraw], is_link: IsLink, times: Ids | None = None,
) -> tuple[Ids, Ids]:  # fmt: skip
    """Original ids (sources, targets) of the negatives that ``rule.owners`` named, int64 [m] each.

    ``places`` [n] of the positives in the global batch; ``positives``: their original ids; ``times`` [n]:
    their times. A triplet's source is its positive's. With ``rule.avoid_links``, draws that hit a link are
    repeated. Raises ``DataError`` when a negative still is a link after 64 draws.
    """
    src = np.empty(len(owner), np.int64)
    dst = np.empty(len(owner), np.int64)
    left = np.arange(len(owner))
    for attempt in range(_TRIES):
        keys = _keys(key, places[owner[left]], j[left], attempt)
        bound = None if times is None else times[owner[left]]
        src[left] = positives[0][owner[left]] if rule.triplet else ends[SRC].draw(_end_keys(keys, SRC), bound)
        dst[left] = ends[DST].draw(_end_keys(keys, DST), bound)
        if not rule.avoid_links or not len(left):
            return src, dst
        left = left[is_link(src[left], dst[left])]
        if not len(left):
            return src, dst
    raise DataError(
        f"no negative for the link from {positives[0][owner[left[0]]]} to {positives[1][owner[left[0]]]}: {_TRIES} "
        "draws were all links of the graph; it is too dense to avoid them, allow false negatives"
    )


def _running_sums(weight: Array, num_nodes: int) -> npt.NDArray[np.float64]:
    values = np.asarray(weight, np.float64)
    if values.shape != (num_nodes,):
        raise SettingsError(f"weights of negatives have shape {list(values.shape)}, there are {num_nodes} nodes")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
        raise SettingsError("weights of negatives must be finite, not negative, and not all 0")
    return np.cumsum(values)


def _keys(key: int, places: Ids, j: Ids, attempt: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = hashed(places.astype(np.uint64) * GOLDEN + np.uint64(key))
        return _words(hashed(z ^ hashed(j.astype(np.uint64) * GOLDEN + np.uint64(attempt + 1))))


def _end_keys(keys: npt.NDArray[np.uint64], end: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _words(hashed(keys + np.uint64(end + 1) * GOLDEN))


def _words(values: Any) -> npt.NDArray[np.uint64]:
    return np.asarray(values, np.uint64)
