"""Draws negative links.

Negative (i, j) is the j-th negative of the link at place i of the global batch. It depends on i, j and original ids,
and therefore neither on ranks nor on the partition.
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

_TRIES = 64  #: draws per negative before giving up, when real links are avoided

_IsLink = Callable[[Ids, Ids], npt.NDArray[np.bool_]]  #: (sources, targets), original ids -> bool [n]


@dataclass(frozen=True)
class NegativeRule:
    """Kind and number of negatives, as in ``NegativeSampling``, and whether links of the graph are avoided."""

    triplet: bool  #: draw targets for the source of each positive; else draw both ends
    amount: float  #: negatives per positive; an integer for triplets
    avoid_links: bool = False

    @property
    def most(self) -> int:
        return math.ceil(self.amount)

    def owners(self, places: Ids, global_size: int) -> tuple[Ids, Ids]:
        """List the m negatives of the positives at ``places`` in the global batch. Returns (owner, j), int64 [m] each.

        ``owner``: for each negative the index of its positive in ``places``. ``j``: number of the negative among
        those of its positive, from 0.

        The global batch has ceil(amount * global_size) negatives. With a fractional amount, positives at the first
        places of the batch have one negative more than the others.
        """
        total = math.ceil(self.amount * global_size)
        j, owner = np.divmod(np.arange(self.most * len(places)), max(len(places), 1))
        wanted = j * global_size + places[owner] < total
        return owner[wanted], j[wanted]


class NegativeDraw:
    """Draws nodes of one type (original ids): uniformly or by weight, among all nodes or those up to a given time."""

    def __init__(self, num_nodes: int, weight: Array | None = None, times: Array | None = None):
        """Args:
            weight: [num_nodes], non-negative; need not sum to 1.
            times: Integer [num_nodes].

        Raises ``SettingsError`` for invalid weights.
        """
        self.num_nodes = num_nodes
        self._by_time: Array | None = None
        if times is not None:
            order = np.argsort(times, kind="stable")
            self._sorted_times = times[order]
            self._by_time = order.astype(np.int32) if num_nodes < 2**31 else order
        self._sums: npt.NDArray[np.float64] | None = None
        if weight is not None:
            values = np.asarray(weight, np.float64)
            if values.shape != (num_nodes,):
                raise SettingsError(f"weights of negatives have shape {list(values.shape)}, expected [{num_nodes}]")
            if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
                raise SettingsError("weights of negatives must be finite, not negative, and not all 0")
            self._sums = np.cumsum(values if self._by_time is None else values[self._by_time])

    def draw(self, keys: npt.NDArray[np.uint64], times: Ids | None = None) -> Ids:
        """Draw one original id per key, int64 [n].

        If ``times`` [n] is given, the i-th id is drawn among the nodes whose time is at most ``times[i]``. Raises
        ``DataError`` if there is no such node.
        """
        if len(keys) == 0:
            return np.empty(0, np.int64)
        if self.num_nodes == 0:
            raise DataError("negatives cannot be drawn: the node type has no nodes")
        num_candidates: Ids = np.full(len(keys), self.num_nodes)
        if self._by_time is not None and times is not None:
            num_candidates = np.searchsorted(self._sorted_times, times, side="right")
            if (none := np.flatnonzero(num_candidates == 0)).size:
                raise DataError(f"no negative for a link of time {times[none[0]]}: all nodes are later")
        share = fractions(keys)
        if self._sums is None:
            found = (share * num_candidates).astype(np.int64)
        else:
            total = self._sums[num_candidates - 1]
            if (none := np.flatnonzero(total == 0)).size and times is not None:
                raise DataError(f"no negative for a link of time {times[none[0]]}: nodes up to it have weight 0")
            found = np.searchsorted(self._sums, share * total, side="right").astype(np.int64)
        return found if self._by_time is None else self._by_time[found].astype(np.int64)


def draw_negatives(
    rule: NegativeRule, key: int, places: Ids, owner: Ids, j: Ids, positives: tuple[Ids, Ids],
    ends: tuple[NegativeDraw, NegativeDraw], is_link: _IsLink, times: Ids | None = None,
) -> tuple[Ids, Ids]:  # fmt: skip
    """Draw negatives. Returns original ids (sources, targets), int64 [m] each.

    In triplets, a negative has the source of its positive. With ``rule.avoid_links``, raises ``DataError`` if 64 draws
    of a negative are all links of the graph.

    ``key``: random key of the batch. ``places`` [n]: places of the positives in the global batch. ``owner`` [m]: for
    each negative the index of its positive. ``j`` [m]: its number among the negatives of that positive. ``positives``:
    sources and targets of the positives, original ids. ``ends``: the ``NegativeDraw`` of sources and that of targets.
    ``is_link``: returns which pairs of nodes are links of the graph. ``times`` [n]: times of the positives.
    """
    src = np.empty(len(owner), np.int64)
    dst = np.empty(len(owner), np.int64)
    left = np.arange(len(owner))
    for attempt in range(_TRIES):
        with np.errstate(over="ignore"):
            of_place = hashed(places[owner[left]].astype(np.uint64) * GOLDEN + np.uint64(key))
            of_draw = hashed(j[left].astype(np.uint64) * GOLDEN + np.uint64(attempt + 1))
            keys = _uint64(hashed(of_place ^ of_draw))
        latest = None if times is None else times[owner[left]]
        src[left] = positives[0][owner[left]] if rule.triplet else ends[SRC].draw(_end_keys(keys, SRC), latest)
        dst[left] = ends[DST].draw(_end_keys(keys, DST), latest)
        if not rule.avoid_links or not len(left):
            return src, dst
        left = left[is_link(src[left], dst[left])]
        if not len(left):
            return src, dst
    raise DataError(
        f"no negative for the link from {positives[0][owner[left[0]]]} to {positives[1][owner[left[0]]]}: {_TRIES} "
        "draws were all links of the graph, which is too dense for avoid_links; pass avoid_links=False"
    )


def uniform_negatives(draw: NegativeDraw, count: int, key: int) -> Ids:
    """Return ``count`` nodes that all links of a step share, repeats possible; each node once if there are fewer."""
    if draw.num_nodes <= count:
        return np.arange(draw.num_nodes)
    places, zeros = np.arange(count), np.zeros(count, np.int64)
    _, drawn = draw_negatives(
        NegativeRule(triplet=True, amount=1), key, places, places, zeros, (zeros, zeros), (draw, draw),
        lambda src, dst: np.zeros(len(src), np.bool_),
    )  # fmt: skip
    return drawn


def linked_in_step(src: Ids, candidates: Ids, sources: Ids, targets: Ids) -> npt.NDArray[np.bool_]:
    """Return which candidates the links of a step have as a target of each source, bool [n, m].

    ``src`` [n]; ``candidates`` [m]: ascending, with all targets among them. ``sources``, ``targets``: the links.
    """
    found = np.zeros((len(src), len(candidates)), np.bool_)
    order = np.argsort(src, kind="stable")
    first = np.searchsorted(src[order], sources)
    count = np.searchsorted(src[order], sources, side="right") - first
    number = np.repeat(np.arange(len(sources)), count)
    within = np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)
    found[order[first[number] + within], np.searchsorted(candidates, targets[number])] = True
    return found


def _end_keys(keys: npt.NDArray[np.uint64], end: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return _uint64(hashed(keys + np.uint64(end + 1) * GOLDEN))


def _uint64(values: Any) -> npt.NDArray[np.uint64]:
    return np.asarray(values, np.uint64)
