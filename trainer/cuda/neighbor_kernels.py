"""CUDA kernels that draw neighbours, one thread per node. They draw the same edges as the CPU's kernels.

Nodes are global ids, which are also their rows in the CSC arrays of an edge type (``topology.DeviceEdges``). The
functions that draw are compiled from the sources of the CPU's kernels, so weighted draws compute the same float64
operations in the same order. Only ``log1p``, in weighted draws without replacement, may differ from the CPU's in the
last bit. These draws take the edges with the smallest ``-log1p(-u) / weight``. A draw changes only if two of these
values are almost equal: in about one weighted batch of 10^9.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.core import rng
from trainer.cuda.launch import cuda, device_function, kernel
from trainer.sampler import neighbor_kernels, weighted_temporal
from trainer.sampler.weighted_temporal import Conditions, Draws

#: Up to this many edges of a longer row are drawn with a list in the thread's own memory, more with work memory.
LIST_PICKS = 64

_draw = device_function(rng.draw)
_node_key = device_function(rng.node_key)
_tree_key = device_function(rng.tree_key)
_shuffle_listed = device_function(neighbor_kernels._shuffle_listed)
_collect_candidates = device_function(weighted_temporal.collect_candidates)
_count_drawn = device_function(weighted_temporal.count_drawn)
_draw_candidates = device_function(weighted_temporal.draw_candidates)


@kernel
def count_picks(
    indptr: Any, nodes: Any, fanout: Any, replace: Any, conditional: Any, excluded_begin: Any, excluded_end: Any,
    counts: Any, work: Any,
) -> None:  # fmt: skip
    """Fill ``counts``, int32 [n], and ``work``, int64 [n].

    ``counts`` gets the number of neighbours to draw for each node, as if there were no conditions. Conditions are
    weights, times and excluded edges.

    ``work`` gets the number of entries of work memory that each node needs. This is the node's degree if its draws have
    conditions or need more memory than a thread has, else 0.

    ``excluded_begin``, ``excluded_end``: int64 [n], range of each node among the excluded sources.
    """
    for i in range(cuda.grid(1), len(nodes), cuda.gridsize(1)):
        degree = indptr[nodes[i] + 1] - indptr[nodes[i]]
        count = degree
        if fanout >= 0 and (degree > fanout or replace):
            count = fanout if degree > 0 else 0
        counts[i] = count
        shuffled = count > LIST_PICKS and count < degree and not replace
        excludes = len(excluded_begin) > 0 and excluded_begin[i] < excluded_end[i]
        work[i] = degree if conditional or excludes or shuffled else 0


@kernel
def collect(
    indptr: Any, indices: Any, nodes: Any, fanout: Any, shuffle: Any, replace: Any, last: Any, weighted: Any, top: Any,
    times: Any, bounds: Any, excluded: Any, excluded_begin: Any, excluded_end: Any, weights: Any, allowed: Any,
    work: Any, work_begin: Any, slots: Any, values: Any, found: Any, counts: Any,
) -> None:  # fmt: skip
    """List the candidates of each node that has work memory: the edges that it may draw.

    Writes the candidates of node i to ``slots``, and their weights to ``values``, both from ``work_begin[i]`` on. Fills
    ``found``, int64 [n], with the number of candidates of each node, or with -1 - edge if an edge has an invalid
    weight. Corrects ``counts``, the numbers of edges to draw, for nodes with work memory.
    """
    draws = Draws(fanout, shuffle, replace, last, weighted, top, np.uint64(0))
    conditions = Conditions(times, bounds, excluded, excluded_begin, excluded_end, allowed, weights)
    for i in range(cuda.grid(1), len(nodes), cuda.gridsize(1)):
        found[i] = 0
        if work[i] > 0:
            begin, end = work_begin[i], work_begin[i] + work[i]
            listed = _collect_candidates(
                indptr, indices, nodes[i], i, conditions, weighted, slots[begin:end], values[begin:end]
            )
            found[i] = listed
            counts[i] = _count_drawn(max(listed, 0), draws)


@kernel
def draw_picks(
    indptr: Any, nodes: Any, orig_id: Any, trees: Any, fanout: Any, shuffle: Any, replace: Any, key: Any, counts: Any,
    begins: Any, work: Any, work_begin: Any, slots: Any, picks: Any,
) -> None:  # fmt: skip
    """Draw edges without conditions. Writes those of node i to ``picks``, from ``begins[i]`` on."""
    for i in range(cuda.grid(1), len(nodes), cuda.gridsize(1)):
        drawn = _node_key(key, orig_id[nodes[i]])
        if len(trees) > 0:
            drawn = _tree_key(drawn, trees[i])
        row_picks = picks[begins[i] : begins[i] + counts[i]]
        own_slots = slots[work_begin[i] : work_begin[i] + work[i]]
        first = indptr[nodes[i]]
        _draw_row(row_picks, first, indptr[nodes[i] + 1] - first, fanout, shuffle, replace, drawn, own_slots)


@kernel
def draw_conditional(
    indptr: Any, nodes: Any, orig_id: Any, trees: Any, fanout: Any, shuffle: Any, replace: Any, last: Any,
    weighted: Any, top: Any, timed: Any, key: Any, times: Any, found: Any, counts: Any, begins: Any, work: Any,
    work_begin: Any, slots: Any, values: Any, ranks: Any, picks: Any,
) -> None:  # fmt: skip
    """As ``draw_picks``, but a node with work memory draws only among the candidates that ``collect`` listed for it.

    ``slots``, ``values``, ``found`` and ``counts``: as ``collect`` filled them. ``ranks``: a view of ``values`` as
    int64.
    """
    draws = Draws(fanout, shuffle, replace, last, weighted, top, key)
    for i in range(cuda.grid(1), len(nodes), cuda.gridsize(1)):
        drawn = _node_key(key, orig_id[nodes[i]])
        if len(trees) > 0:
            drawn = _tree_key(drawn, trees[i])
        row_picks = picks[begins[i] : begins[i] + counts[i]]
        first, begin = indptr[nodes[i]], work_begin[i]
        if work[i] > 0:
            end = begin + found[i]
            _draw_candidates(
                times, timed, draws, first, drawn, slots[begin:end], values[begin:end], ranks[begin:end], row_picks
            )
        else:
            degree = indptr[nodes[i] + 1] - first
            _draw_row(row_picks, first, degree, fanout, shuffle, replace, drawn, slots[:0])


def _draw_row_of(
    picks: Any, first: Any, degree: Any, fanout: Any, shuffle: Any, replace: Any, drawn: Any, slots: Any
) -> None:  # fmt: skip
    """Draw ``len(picks)`` edges of one node, the same ones as ``draw_edges`` on the CPU.

    ``first``: the node's first edge. ``drawn``: the node's random key. ``slots``: the node's work memory.
    """
    count = len(picks)
    if replace and fanout >= 0:
        for j in range(count):
            picks[j] = first + _draw(drawn, j, degree)
    elif count == degree:
        for j in range(count):
            picks[j] = first + j
        for j in range(min(shuffle, degree - 1)):
            other = j + _draw(drawn, j, degree - j)
            picks[j], picks[other] = picks[other], picks[j]
    elif count <= LIST_PICKS:
        where = cuda.local.array(LIST_PICKS, np.int64)
        what = cuda.local.array(LIST_PICKS, np.int64)
        _shuffle_listed(picks, first, degree, drawn, where, what)
    else:
        for j in range(degree):
            slots[j] = first + j
        for j in range(count):
            other = j + _draw(drawn, j, degree - j)
            slots[j], slots[other] = slots[other], slots[j]
            picks[j] = slots[j]


_draw_row = device_function(_draw_row_of)
