"""Numba kernels that draw edges by weight or take the heaviest ones, or draw among edges that meet conditions.

Weighted draws without replacement are an exponential race (Efraimidis and Spirakis, "Weighted random sampling with a
reservoir", Information Processing Letters 97, 2006).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np

from trainer.core.compiled import njit
from trainer.core.rng import draw, draw_fraction, node_key, tree_key
from trainer.sampler.neighbor_kernels import first_at_least

_jit = njit(boundscheck=False)

_inlined = numba.njit(inline="always", boundscheck=False)

TOO_MANY = -2  #: returned in place of a slot: more picks than allowed

_ROUNDING = 1.0 + 1e-12


class Conditions(NamedTuple):
    """Conditions that edges must meet to be candidates. An empty array means no condition.

    e: number of edges of the part; n: number of requested nodes.
    """

    times: Any  #: integer [e]
    bounds: Any  #: int64 [n] latest time for each node
    excluded: Any  #: int64 [m] excluded sources, ascending for each node
    excluded_begin: Any  #: int64 [n] first position in ``excluded`` of each node's sources
    excluded_end: Any  #: int64 [n]
    allowed: Any  #: uint8: one bit per source node
    weights: Any  #: number [e]


class Draws(NamedTuple):
    fanout: int
    shuffle: int
    replace: bool
    last: bool
    weighted: bool
    top: bool  #: with ``weighted``: take the heaviest edges
    key: Any  #: uint64


@_jit
def pick_candidates(
    indptr: Any, indices: Any, rows: Any, orig_id: Any, trees: Any, conditions: Any, draws: Any, longest: int,
    counts: Any, most: int,
) -> Any:  # fmt: skip
    """Draw in-edges of the nodes ``rows`` that meet the conditions. Fills ``counts`` int32 [n]: edges per node.

    Returns (slots, -1): the slots of the drawn edges, int64, grouped by node. On an error, the slots are empty, and the
    second value is the slot of an edge with an invalid weight, or ``TOO_MANY`` if more than ``most`` edges would be
    drawn. ``longest``: the highest degree of a node.

    If edges have times and all candidates of a node are taken, the candidates are sorted by time, as in
    torch_geometric. They are not sorted if a later hop uses only the first of them (``draws.shuffle`` > 0).
    """
    slots, values = np.empty(longest, np.int64), np.empty(longest, np.float64)
    ranks = values.view(np.int64)
    out, used = np.empty(max(1024, len(rows)), np.int64), 0
    times, timed = conditions.times, len(conditions.bounds) > 0
    for i in range(len(rows)):
        found = collect_candidates(indptr, indices, rows[i], i, conditions, draws.weighted, slots, values)
        if found < 0:
            return out[:0], -1 - found
        count = count_drawn(found, draws)
        if used + count > most:
            return out[:0], TOO_MANY
        counts[i] = count
        out = _with_room(out, used, count)
        drawn = node_key(draws.key, orig_id[rows[i]])
        if len(trees):
            drawn = tree_key(drawn, trees[i])
        draw_candidates(
            times, timed, draws, indptr[rows[i]], drawn, slots[:found], values, ranks,
            out[used : used + count],
        )  # fmt: skip
        used += count
    return out[:used], -1


@_inlined
def count_drawn(found: int, draws: Any) -> int:
    """Return the number of edges to draw from ``found`` candidates."""
    if draws.fanout >= 0 and found > 0 and (found > draws.fanout or (draws.replace and not draws.last)):
        return draws.fanout  # type: ignore[no-any-return]
    return found


@_inlined
def draw_candidates(
    times: Any, timed: bool, draws: Any, begin: int, drawn: Any, slots: Any, values: Any, ranks: Any, picks: Any
) -> None:  # fmt: skip
    """Fill ``picks`` with edges drawn among the candidates ``slots`` of one node.

    ``begin``: slot of the node's first in-edge. ``times``: integer [e], used if the node's edges are restricted by time
    (``timed``). ``values``: float64, weights of the candidates. ``ranks``: the same memory as int64. ``values`` and
    ``ranks`` are overwritten. ``drawn``: uint64, key of the node's random numbers.
    """
    if draws.last:
        _take_last(times, slots, ranks, draws.shuffle, picks)
    elif draws.top:
        _take_heaviest(slots, ranks, draws.shuffle, picks)
    elif draws.replace and draws.fanout >= 0:
        _take_with_replacement(slots, values, draws.weighted, drawn, picks)
    elif draws.weighted:
        _take_race(slots, values, ranks, begin, draws.shuffle, drawn, picks)
    else:
        _take_shuffled(slots, draws.shuffle, drawn, picks)
    whole = len(picks) == len(slots) and (draws.last or not draws.replace or draws.fanout < 0)
    if timed and draws.shuffle == 0 and whole:
        _sort_by_time(times, picks, ranks)


@_jit
def allow(sources: Any, bits: Any) -> None:
    for i in range(len(sources)):
        bits[sources[i] >> 3] |= np.uint8(1 << (sources[i] & 7))


@_jit
def collect_candidates(
    indptr: Any, indices: Any, row: int, i: int, conditions: Any, weighted: bool, slots: Any, values: Any
) -> int:
    """Write the slots and weights of a node's candidates to ``slots`` and ``values``. Returns the number of candidates.

    ``row``: the node's row in the CSC of the part. ``i``: the node's index in the request. If the edge at slot s has an
    invalid weight, returns ``-1 - s`` instead.
    """
    timed, chosen = len(conditions.bounds) > 0, len(conditions.allowed) > 0
    low, high = 0, 0
    if len(conditions.excluded):
        low, high = conditions.excluded_begin[i], conditions.excluded_end[i]
    until = conditions.bounds[i] if timed else 0
    found = 0
    for slot in range(indptr[row], indptr[row + 1]):
        taken = not timed or np.int64(conditions.times[slot]) <= until
        if low < high and taken:
            at = first_at_least(conditions.excluded, low, high, indices[slot])
            taken = at == high or conditions.excluded[at] != indices[slot]
        if chosen and taken:
            taken = (conditions.allowed[indices[slot] >> 3] >> (indices[slot] & 7)) & 1 == 1
        if weighted and taken:
            weight = np.float64(conditions.weights[slot])
            if not 0.0 <= weight < np.inf:
                return -1 - slot
            values[found] = weight
            taken = weight > 0.0
        slots[found] = slot  # always written: a branch would be unpredictable
        found += int(taken)
    return found


@_jit
def _take_shuffled(slots: Any, shuffle: int, drawn: Any, picks: Any) -> None:
    """Fill ``picks`` with elements of ``slots``, drawn without replacement by Fisher-Yates.

    If all elements are taken, only the first ``shuffle`` elements of ``picks`` are in random order.
    """
    steps = len(picks) if len(picks) < len(slots) else min(shuffle, len(slots) - 1)
    for j in range(steps):
        other = j + draw(drawn, j, len(slots) - j)
        slots[j], slots[other] = slots[other], slots[j]
    for j in range(len(picks)):
        picks[j] = slots[j]


@_jit
def _take_with_replacement(slots: Any, values: Any, weighted: bool, drawn: Any, picks: Any) -> None:
    if not weighted:
        for j in range(len(picks)):
            picks[j] = slots[draw(drawn, j, len(slots))]
        return
    for k in range(1, len(slots)):
        values[k] += values[k - 1]
    for j in range(len(picks)):
        wanted = draw_fraction(drawn, j) * values[len(slots) - 1]
        low, high = 0, len(slots) - 1
        while low < high:
            middle = (low + high) >> 1
            if values[middle] <= wanted:
                low = middle + 1
            else:
                high = middle
        picks[j] = slots[low]


@_jit
def _take_race(slots: Any, values: Any, ranks: Any, begin: int, shuffle: int, drawn: Any, picks: Any) -> None:
    """Draw by weight without replacement: an exponential race, which the edges with the earliest arrival times win.

    Fills ``picks`` with edges among the candidates ``slots`` of one node. ``begin``: slot of the node's first edge.
    ``values``: weights; ``ranks``: the same memory as int64. Both are work arrays. ``drawn``: random key. If
    ``shuffle`` is 0 and all edges are taken, they keep their order.
    """
    wanted = len(picks)
    if wanted and (wanted < len(slots) or shuffle > 0):
        for k in range(wanted):
            # Arrival times are not negative, so their bits in ``ranks`` sort like the numbers.
            values[k] = _arrival(drawn, slots[k] - begin) / values[k]
        make_heap(ranks, slots, wanted)
        for k in range(wanted, len(slots)):
            # -log(1 - u) >= u, so most candidates need no logarithm; the factor covers rounding errors
            if draw_fraction(drawn, slots[k] - begin) < values[0] * values[k] * _ROUNDING:
                values[k] = _arrival(drawn, slots[k] - begin) / values[k]
                keep_smaller(ranks, slots, k, wanted)
        sort_heap(ranks, slots, wanted)
    for j in range(wanted):
        picks[j] = slots[j]


@_inlined
def _arrival(drawn: Any, place: Any) -> Any:
    return -math.log1p(-draw_fraction(drawn, place))


@_jit
def _take_last(times: Any, slots: Any, ranks: Any, shuffle: int, picks: Any) -> None:
    """Fill ``picks`` with the latest edges in ``slots``, the latest first.

    Among edges of equal time, those with higher slots come first.
    """
    wanted = len(picks)
    if wanted and (wanted < len(slots) or shuffle > 0):
        for k in range(len(slots)):
            ranks[k] = ~np.int64(times[slots[k]])
            slots[k] = ~slots[k]
        make_heap(ranks, slots, wanted)
        for k in range(wanted, len(slots)):
            keep_smaller(ranks, slots, k, wanted)
        sort_heap(ranks, slots, wanted)
        for j in range(wanted):
            slots[j] = ~slots[j]
    for j in range(wanted):
        picks[j] = slots[j]


@_jit
def _take_heaviest(slots: Any, ranks: Any, shuffle: int, picks: Any) -> None:
    """Fill ``picks`` with the heaviest edges in ``slots``, the heaviest first; of equal weights, lower slots first.

    ``ranks``: the bits of the weights as int64, which sort like the weights, as these are positive float64.
    """
    wanted = len(picks)
    if wanted and (wanted < len(slots) or shuffle > 0):
        for k in range(len(slots)):
            ranks[k] = ~ranks[k]
        make_heap(ranks, slots, wanted)
        for k in range(wanted, len(slots)):
            keep_smaller(ranks, slots, k, wanted)
        sort_heap(ranks, slots, wanted)
    for j in range(wanted):
        picks[j] = slots[j]


@_jit
def _sort_by_time(times: Any, picks: Any, ranks: Any) -> None:
    in_order = True
    for k in range(len(picks)):
        ranks[k] = np.int64(times[picks[k]])
        in_order = in_order and (
            k == 0 or ranks[k - 1] < ranks[k] or (ranks[k - 1] == ranks[k] and picks[k - 1] < picks[k])
        )
    if not in_order:
        make_heap(ranks, picks, len(picks))
        sort_heap(ranks, picks, len(picks))


@_jit
def make_heap(ranks: Any, slots: Any, size: int) -> None:
    for top in range(size // 2 - 1, -1, -1):
        _sift(ranks, slots, top, size)


@_jit
def keep_smaller(ranks: Any, slots: Any, k: int, size: int) -> None:
    if ranks[k] < ranks[0] or (ranks[k] == ranks[0] and slots[k] < slots[0]):
        ranks[0], slots[0] = ranks[k], slots[k]
        _sift(ranks, slots, 0, size)


@_jit
def sort_heap(ranks: Any, slots: Any, size: int) -> None:
    for end in range(size - 1, 0, -1):
        ranks[0], ranks[end] = ranks[end], ranks[0]
        slots[0], slots[end] = slots[end], slots[0]
        _sift(ranks, slots, 0, end)


@_jit
def _sift(ranks: Any, slots: Any, top: int, size: int) -> None:
    rank, slot = ranks[top], slots[top]
    while 2 * top + 1 < size:
        child = 2 * top + 1
        right = child + 1
        if right < size and (
            ranks[right] > ranks[child] or (ranks[right] == ranks[child] and slots[right] > slots[child])
        ):
            child = right
        if ranks[child] < rank or (ranks[child] == rank and slots[child] < slot):
            break
        ranks[top], slots[top] = ranks[child], slots[child]
        top = child
    ranks[top], slots[top] = rank, slot


@_jit
def _with_room(out: Any, used: int, more: int) -> Any:
    if used + more <= len(out):
        return out
    larger = np.empty(2 * (used + more), np.int64)
    for k in range(used):
        larger[k] = out[k]
    return larger
