"""Numba kernels for sampling and relabelling. They release the GIL, and write results to arrays that the caller passes.

``nodes`` are global ids. A global id minus ``first_node``, the first id of the part, is a row of the part's CSC arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from trainer.core.compiled import njit
from trainer.core.rng import draw, node_key, tree_key

_READ, _EVERY_CACHE, _DATA = 0, 3, 1


def _prefetch(_typing: Any, array: Any, at: Any) -> Any:
    """Define ``prefetch(array, at)``, which loads ``array[at]`` into the CPU cache. ``at`` may be out of range."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        line = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, flag, flag, flag])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        builder.call(hint, [line, flag(_READ), flag(_EVERY_CACHE), flag(_DATA)])
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


prefetch: Any = intrinsic(_prefetch)

_jit = njit(boundscheck=False)

#: Up to _LIST_PICKS edges of a row longer than _LONG are drawn with a list of exchanged positions, not an array of all.
_LIST_PICKS, _LONG = 64, 4096

_AT_ONCE = 256  #: number of slots drawn before the first of them is read

_IDS_AHEAD = 16  #: number of ids by which table entries are prefetched

_ROWS_AHEAD = 16  #: number of rows by which indptr and orig_id are prefetched


@_jit
def count_picks(indptr: Any, nodes: Any, first_node: int, fanout: int, replace: bool, counts: Any) -> int:
    """Fill ``counts`` int32 [n] with the number of neighbours to draw per node, and return the largest degree."""
    longest = 0
    for i in range(len(nodes)):
        row = nodes[i] - first_node
        degree = indptr[row + 1] - indptr[row]
        longest = max(longest, degree)
        if fanout < 0 or (degree <= fanout and not replace):
            counts[i] = degree
        else:
            counts[i] = fanout if degree > 0 else 0
    return longest


@_jit
def draw_edges(
    indptr: Any, indices: Any, nodes: Any, first_node: int, orig_id: Any, trees: Any, counts: Any, replace: bool,
    fanout: int, shuffle: int, key: Any, longest: int, first_edge: int, orig_edge: Any, src: Any, edge: Any,
) -> None:  # fmt: skip
    """Draw ``counts[i]`` in-edges of each node ``nodes[i]``, and write their sources to ``src``.

    Writes the edge ids to ``edge``, unless ``edge`` is empty: original ids if ``orig_edge``, those of the part's edges,
    is not empty, else global ids. Without replacement, the edges drawn for a smaller count
    are a prefix of those drawn for a larger count. If all edges of a node are taken, only the first ``shuffle`` of them
    are in random order. ``indptr`` and ``indices``: CSC of the part. ``first_node`` and ``first_edge``: first ids
    of the part's nodes and edges. ``longest``: highest degree of a node. ``trees``: int64 [n], tree of each node in
    disjoint sampling, else empty.
    """
    slots = np.empty(_AT_ONCE + (max(longest, fanout) if replace else longest), np.int64)
    order, moved = np.empty(longest, np.int32), np.empty(longest, np.int32)
    where, what = np.empty(_LIST_PICKS, np.int64), np.empty(_LIST_PICKS, np.int64)
    ordered, waiting, done = 0, 0, 0  # ``order`` is 0, 1, 2, … up to ``ordered``
    # The slots of several hundred edges are drawn and prefetched before any of them is read.
    for i in range(len(nodes)):
        if i + _ROWS_AHEAD < len(nodes):
            prefetch(indptr, nodes[i + _ROWS_AHEAD] - first_node)
            prefetch(orig_id, nodes[i + _ROWS_AHEAD] - first_node)
        count, row = counts[i], nodes[i] - first_node
        begin = indptr[row]
        degree = indptr[row + 1] - begin
        picks = slots[waiting : waiting + count]
        drawn = node_key(key, orig_id[row])
        if len(trees):
            drawn = tree_key(drawn, trees[i])
        if replace and fanout >= 0:
            for j in range(count):
                picks[j] = begin + draw(drawn, j, degree)
        elif count < degree and count <= _LIST_PICKS and degree > _LONG:
            _shuffle_listed(picks, begin, degree, drawn, where, what)
        elif count > 0:
            while ordered < degree:
                order[ordered] = ordered
                ordered += 1
            _shuffle(picks, begin, degree, count if count < degree else min(shuffle, degree - 1), drawn, order, moved)
        for j in range(count):
            prefetch(indices, picks[j])
            if len(orig_edge):
                prefetch(orig_edge, picks[j])
        waiting += count
        if waiting >= _AT_ONCE or i == len(nodes) - 1:
            for k in range(waiting):
                src[done + k] = indices[slots[k]]
            if len(edge) and len(orig_edge):
                for k in range(waiting):
                    edge[done + k] = orig_edge[slots[k]]
            elif len(edge):
                for k in range(waiting):
                    edge[done + k] = first_edge + slots[k]
            done += waiting
            waiting = 0


@_jit
def _shuffle(picks: Any, begin: int, degree: int, steps: int, drawn: Any, order: Any, moved: Any) -> None:
    """Fill ``picks`` with distinct numbers from ``begin`` to ``begin + degree - 1``.

    The first ``steps`` picks are drawn at random, by ``steps`` steps of Fisher-Yates; the others are not. ``drawn``:
    random key. ``order``, int32: 0, 1, 2, …, unchanged after the call. ``moved``: work array.
    """
    for j in range(steps):
        other = j + draw(drawn, j, degree - j)
        picks[j] = begin + order[other]
        order[other] = order[j]
        moved[j] = other
    for j in range(steps, len(picks)):
        picks[j] = begin + order[j]
    for j in range(steps):
        order[moved[j]] = moved[j]


@_jit
def _shuffle_listed(picks: Any, begin: int, degree: int, drawn: Any, where: Any, what: Any) -> None:
    for j in range(len(picks)):
        other = j + draw(drawn, j, degree - j)
        chosen, here = other, j
        slot = j
        for k in range(j):
            if where[k] == other:
                chosen = what[k]
                slot = k
            if where[k] == j:
                here = what[k]
        where[j] = -1
        where[slot], what[slot] = other, here
        picks[j] = begin + chosen


@_jit
def relabel(src: Any, table: Any, first_new: int, local: Any, new: Any) -> int:
    """Map global ids to batch positions, numbering new ids from ``first_new`` on. Returns the number of new ids.

    ``table`` int32 [num_nodes] holds position + 1 for each known id, and 0 for others. Fills ``local`` int32 [len(src)]
    with the positions and the beginning of ``new`` with the new ids.
    """
    found = 0
    for i in range(len(src)):
        if i + _IDS_AHEAD < len(src):
            prefetch(table, np.int64(src[i + _IDS_AHEAD]))
        position = table[src[i]]
        unseen = position == 0  # always written: a branch would be unpredictable
        position += np.int32(unseen) * np.int32(first_new + found + 1)
        table[src[i]] = position
        new[found] = src[i]
        found += int(unseen)
        local[i] = position - 1
    return found


@_jit
def enter_seeds(seeds: Any, table: Any) -> None:
    """Set ``table[seed]`` to 1 + the index of the first occurrence of each seed in ``seeds``."""
    for i in range(len(seeds)):
        if table[seeds[i]] == 0:
            table[seeds[i]] = i + 1


@_jit
def forget(nodes: Any, table: Any) -> None:
    for i in range(len(nodes)):
        if i + _IDS_AHEAD < len(nodes):
            prefetch(table, nodes[i + _IDS_AHEAD])
        table[nodes[i]] = 0


@_jit
def find_edges(indptr: Any, indices: Any, rows: Any, sources: Any, order: Any, found: Any) -> None:
    """Set ``found[order[i]]`` to True if node ``rows[i]`` of the part has an in-edge from ``sources[i]``.

    ``indptr`` and ``indices``: CSC of the part. The pairs (``rows[i]``, ``sources[i]``) must be sorted.
    """
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end] == rows[begin]:
            end += 1
        for slot in range(indptr[rows[begin]], indptr[rows[begin] + 1]):
            at = first_at_least(sources, begin, end, indices[slot])
            while at < end and sources[at] == indices[slot] and not found[order[at]]:
                found[order[at]] = True
                at += 1
        begin = end


@_jit
def count_loops(indptr: Any, indices: Any, first: int, found: Any) -> None:
    """Add the number of self loops of each node of the part to ``found``. ``first``: global id of the part's node 0."""
    for row in range(len(found)):
        for slot in range(indptr[row], indptr[row + 1]):
            found[row] += indices[slot] == first + row


@_jit
def first_at_least(values: Any, low: int, high: int, wanted: int) -> int:
    """Return the first index in the ascending ``values[low:high]`` with value >= ``wanted``, or ``high``."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@_jit
def block_rows(row_begin: Any, row_count: Any, fanout: int, edges: Any, indptr: Any) -> Any:
    """Make a CSR of the first ``fanout`` edges of each row (-1: of all edges). Fills ``indptr``, returns the indices.

    Row i has the ``row_count[i]`` edges from position ``row_begin[i]`` on. ``edges`` contains the source of each edge.
    """
    total = 0
    for i in range(len(row_begin)):
        indptr[i] = total
        total += row_count[i] if fanout < 0 else min(fanout, row_count[i])
    indptr[len(row_begin)] = total
    indices = np.empty(total, np.int32)
    for i in range(len(row_begin)):
        begin, width = row_begin[i], indptr[i + 1] - indptr[i]
        for j in range(width):
            indices[indptr[i] + j] = edges[begin + j]
    return indices


@_jit
def write_ends(src: Any, counts: Any, ends: Any) -> None:
    """Fill ``ends`` [2, e] with the source and the target of each edge.

    Edges are grouped by target; ``counts`` is the number of edges of each target.
    """
    sources, targets, cursor = ends[0], ends[1], np.uint64(0)  # two passes, as the first needs no loop over targets
    for i in range(len(src)):
        sources[i] = src[i]
    for target in range(len(counts)):
        for _ in range(counts[target]):
            targets[cursor] = target
            cursor += np.uint64(1)


@_jit
def scatter_runs(values: Any, counts: Any, positions: Any, begins: Any, out: Any) -> None:
    """For each k, copy the next ``counts[k]`` elements of ``values`` to ``out[begins[positions[k]]]`` and after it."""
    cursor = 0
    for k in range(len(positions)):
        begin = begins[positions[k]]
        for j in range(counts[k]):
            out[begin + j] = values[cursor + j]
        cursor += counts[k]


@_jit
def take_numbers(source: Any, rows: Any, positions: Any, out: Any) -> None:
    """Set ``out[positions[i]] = source[rows[i]]`` for 1-d arrays. ``out`` may have a wider integer type."""
    last = len(rows) - 1
    for i in range(len(rows)):
        prefetch(source, np.int64(rows[min(i + _IDS_AHEAD, last)]))
        out[positions[i]] = source[rows[i]]


@_jit
def take_rows(source: Any, rows: Any, positions: Any, out: Any) -> None:
    """Set ``out[positions[i]] = source[rows[i]]`` for 2-d arrays of one dtype."""
    for i in range(len(rows)):
        row, position = rows[i], positions[i]
        for j in range(source.shape[1]):
            out[position, j] = source[row, j]
