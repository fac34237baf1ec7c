"""Numba kernels of personalised PageRank: forward push around each seed, and the nodes of the highest score.

The push is that of Andersen, Chung and Lang, "Local Graph Partitioning using PageRank Vectors", FOCS 2006, in rounds:
each round pushes all nodes whose residual is large enough, from the residuals at its beginning (Wu, Gan, Wei, Zhang,
"Unifying the Global and Local Approaches", SIGMOD 2021). Residuals are whole numbers of 2^-62, so that their sums do
not depend on an order.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from trainer.core.compiled import njit
from trainer.core.rng import GOLDEN
from trainer.sampler.neighbor_kernels import prefetch
from trainer.sampler.weighted_temporal import keep_smaller, make_heap, sort_heap

UNIT = 1 << 62  #: a probability of 1

_S32, _LOW, _EMPTY = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)

ENOUGH = 1 << 24  #: edges that a call looks at: some tenths of a second

_AHEAD = 12  #: number of edges by which entries are prefetched

_WAITING = np.iinfo(np.int64).max  # as threshold of a node that is already pushed in the next round

_REST, _NEED, _DONE, _LEAST = 0, 1, 2, 3  # columns of the state of a node

_jit = njit(boundscheck=False)

_inlined = numba.njit(inline="always", boundscheck=False)


@_jit
def push(
    rows: Any, hidden: Any, roots: Any, bounds: Any, alpha: float, eps: float, loops: bool, column: Any, bits: int,
    found: Any, scores: Any, hops: Any, counts: Any, lacking: Any,
) -> Any:  # fmt: skip
    """Compute the personalised PageRank around the nodes ``roots``, and choose the nodes of the highest score.

    ``rows``: ``in_edges.Rows``. ``hidden``: ``in_edges.Hidden``, edges that are not followed. ``bounds``: int64 [n],
    edges later than this are not followed, or empty. ``column``: int64 by node type, where in ``counts`` [n, columns]
    and ``found``, ``scores``, ``hops`` [n, columns, k] neighbours of the type are written; -1: nowhere. Nodes of equal
    score are in the order in which the push met them, nearer ones first. ``counts[i, 0]`` is -1 if the rows of some
    nodes are not known: these are written to ``lacking``.

    Returns the number of roots that are done, whether the push around the next one meets more than ``2**bits`` nodes,
    the number of nodes written to ``lacking``, and the number of edges looked at. No root is begun after ``ENOUGH``
    edges.
    """
    # passing the tuple on, or reading it in the loops, would count references
    firsts, lasts, sources, weights, times, degrees, kinds = rows
    hidden_targets, hidden_begins, hidden_sources = hidden
    slots, mask, shift = np.zeros(2 << bits, np.uint64), (2 << bits) - 1, np.uint64(63 - bits)
    room = 1 << bits  # arrays that could be made longer here would cost two thirds of the speed
    node, place, hop = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int8)
    state = np.empty((room, 4), np.int64)
    now, amount, later = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    ranks, order = np.empty(room, np.int64), np.empty(room, np.int64)
    num_lacking, looks = 0, 0
    scale = eps * UNIT
    for i in range(len(roots)):
        if looks > ENOUGH:
            return i, False, num_lacking, looks
        # the root, which waits for the first round
        size, waiting, round_ = 1, 1, 0
        slot = np.int64((np.uint64(roots[i]) * GOLDEN) >> shift)
        slots[slot] = np.uint64(roots[i]) << _S32 | np.uint64(1)
        node[0], place[0], hop[0], later[0] = roots[i], slot, 0, 0
        state[0, _REST], state[0, _NEED], state[0, _DONE] = UNIT, _WAITING, 0
        state[0, _LEAST] = _threshold(degrees[roots[i]], scale)
        complete = True
        while waiting:
            now, later = later, now
            pushed, waiting = waiting, 0
            round_ = min(round_ + 1, 127)
            for j in range(pushed):
                at = now[j]
                amount[j] = state[at, _REST]
                state[at, _REST], state[at, _NEED] = 0, state[at, _LEAST]
            for j in range(pushed):
                at = now[j]
                kept = np.int64(alpha * amount[j])
                state[at, _DONE] += kept
                begin, end = firsts[node[at]], lasts[node[at]]
                if begin < 0:
                    complete = False
                    if num_lacking < len(lacking):
                        lacking[num_lacking] = node[at]
                        num_lacking += 1
                    continue
                looks += end - begin
                low, high = 0, 0  # of the sources of hidden edges
                if len(hidden_targets):
                    k = np.searchsorted(hidden_targets, node[at])
                    if k < len(hidden_targets) and hidden_targets[k] == node[at]:
                        low, high = hidden_begins[k], hidden_begins[k + 1]
                # how much each edge gets
                edges, total = end - begin, 0.0
                if len(bounds) or low < high:
                    edges = 0
                    for edge in range(begin, end):
                        in_time = len(bounds) == 0 or times[edge] <= bounds[i]
                        edges += in_time and not _among(sources[edge], hidden_sources, low, high)
                if edges == 0:
                    continue
                if len(weights):
                    for edge in range(begin, end):
                        in_time = len(bounds) == 0 or times[edge] <= bounds[i]
                        if in_time and not _among(sources[edge], hidden_sources, low, high):
                            total += np.float64(weights[edge])
                    if total == 0.0:
                        continue
                rest = amount[j] - kept
                share = rest // edges
                for edge in range(begin, end):
                    ahead = np.int64(sources[min(edge + _AHEAD, end - 1)])
                    prefetch(slots, np.int64((np.uint64(ahead) * GOLDEN) >> shift))
                    prefetch(degrees, ahead)
                    if len(bounds) and times[edge] > bounds[i]:
                        continue
                    if low < high and _among(sources[edge], hidden_sources, low, high):
                        continue
                    if len(weights):
                        share = np.int64(rest * (np.float64(weights[edge]) / total))
                        if share == 0:
                            continue
                    source = np.int64(sources[edge])
                    slot = np.int64((np.uint64(source) * GOLDEN) >> shift)
                    while (slots[slot] != _EMPTY) & (slots[slot] >> _S32 != np.uint64(source)):
                        slot = (slot + 1) & mask
                    at = np.int64(slots[slot] & _LOW) - 1
                    if at < 0:  # met for the first time
                        if size == room:
                            return i, True, num_lacking, looks
                        at = size
                        size += 1
                        slots[slot] = np.uint64(source) << _S32 | np.uint64(size)
                        node[at], place[at], hop[at] = source, slot, round_
                        least = _threshold(degrees[source], scale)
                        state[at, _REST], state[at, _NEED], state[at, _DONE], state[at, _LEAST] = 0, least, 0, least
                    state[at, _REST] += share
                    if state[at, _REST] >= state[at, _NEED]:
                        state[at, _NEED] = _WAITING
                        later[waiting] = at
                        waiting += 1
        for k in range(size):
            slots[place[k]] = _EMPTY
        if not complete:
            counts[i, 0] = -1
            continue
        for c in range(counts.shape[1]):
            met = 0
            for k in range(0 if loops else 1, size):
                kind = kinds[node[k]] if len(kinds) else 0
                if state[k, _DONE] > 0 and column[kind] == c:
                    ranks[met], order[met] = -state[k, _DONE], k
                    met += 1
            taken = min(found.shape[2], met)
            _take_smallest(ranks, order, met, taken)
            counts[i, c] = taken
            for k in range(taken):
                found[i, c, k], scores[i, c, k], hops[i, c, k] = node[order[k]], -ranks[k], hop[order[k]]
    return len(roots), False, num_lacking, looks


@_jit
def _take_smallest(ranks: Any, order: Any, size: int, wanted: int) -> None:
    """Move the ``wanted`` smallest of the first ``size`` pairs (rank, order) to the beginning, in ascending order."""
    if wanted == 0:
        return
    make_heap(ranks, order, wanted)
    for k in range(wanted, size):
        keep_smaller(ranks, order, k, wanted)
    sort_heap(ranks, order, wanted)


@_inlined
def _among(node: Any, nodes: Any, low: Any, high: Any) -> Any:
    """Return whether ``node`` is among ``nodes[low:high]``, which are ascending."""
    first, last = low, high
    while first < last:
        middle = (first + last) // 2
        if nodes[middle] < node:
            first = middle + 1
        else:
            last = middle
    return first < high and nodes[first] == node


@_inlined
def _threshold(degree: Any, scale: float) -> Any:
    return np.int64(max(1.0, min(scale * degree, 4.0e18)))


@_jit
def count_visits(
    seeds: Any, visits: Any, distances: Any, loops: bool, found: Any, scores: Any, hops: Any, counts: Any
) -> None:  # fmt: skip
    """Choose for each seed the nodes that its walks visited most often.

    ``visits`` int64 [n, v]: visited nodes, -1 for none; ``distances`` int8 [n, v]: steps since the seed. Fills
    ``found``, ``scores`` and ``hops`` [n, k] with the nodes, how often they were visited, and their lowest distance,
    and ``counts`` [n]. Nodes visited equally often are in the order in which walks met them.
    """
    bits = 1
    while (1 << bits) < 2 * visits.shape[1]:
        bits += 1
    slots, mask, shift = np.empty(1 << bits, np.int64), (1 << bits) - 1, np.uint64(64 - bits)
    first, times, hop = (
        np.empty(visits.shape[1], np.int64), np.empty(visits.shape[1], np.int64), np.empty(visits.shape[1], np.int8)
    )  # fmt: skip
    order = np.empty(visits.shape[1], np.int64)
    for i in range(len(seeds)):
        for k in range(len(slots)):
            slots[k] = -1
        met = 0
        for j in range(visits.shape[1]):
            node = visits[i, j]
            if node < 0 or (node == seeds[i] and not loops):
                continue
            slot = np.int64((np.uint64(node) * GOLDEN) >> shift)
            while slots[slot] >= 0 and first[slots[slot]] != node:
                slot = (slot + 1) & mask
            if slots[slot] < 0:
                slots[slot], first[met], times[met], hop[met], order[met] = met, node, 0, distances[i, j], met
                met += 1
            at = slots[slot]
            times[at] -= 1
            hop[at] = min(hop[at], distances[i, j])
        counts[i] = min(found.shape[1], met)
        _take_smallest(times, order, met, counts[i])
        for k in range(counts[i]):
            found[i, k], scores[i, k], hops[i, k] = first[order[k]], -times[k], hop[order[k]]
