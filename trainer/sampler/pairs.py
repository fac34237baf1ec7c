"""A set of (tree, node) pairs with their batch positions, by open addressing with linear probing.

int64 [2 * capacity]: slot k holds the node at 2k and ``tree << 32 | position + 1`` at 2k + 1, or zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.compiled import njit
from trainer.core.rng import mix

Pairs = npt.NDArray[np.int64]

_jit = njit(boundscheck=False)


def empty(room: int) -> Pairs:
    """A set for ``room`` pairs; it is at most half full."""
    return np.zeros(2 << max(2 * room, 1).bit_length(), np.int64)


def with_room(pairs: Pairs, used: int, more: int) -> Pairs:
    """The set itself, or a larger one that has room for ``more`` pairs besides the ``used``."""
    if len(pairs) >= 4 * (used + more):
        return pairs
    larger = empty(used + more)
    _copy(pairs, larger)
    return larger


@_jit
def relabel(
    src: Any, counts: Any, trees: Any, pairs: Any, first_new: int, local: Any, new: Any, new_trees: Any
) -> int:  # fmt: skip
    """Map (tree of the row, global id) to batch positions, giving unseen ones the next; return how many were new.

    Row i has ``counts[i]`` of the ``src`` and is in ``trees[i]``. Fills ``local`` int32 [len(src)], ``new``
    and ``new_trees``.
    """
    found = 0
    cursor = 0
    for i in range(len(counts)):
        for _ in range(counts[i]):
            node = np.int64(src[cursor])
            slot = _slot_of(pairs, node, np.int64(trees[i]))
            entry = pairs[2 * slot + 1]
            if entry == 0:
                pairs[2 * slot] = node
                entry = (np.int64(trees[i]) << 32) | (first_new + found + 1)
                pairs[2 * slot + 1] = entry
                new[found] = node
                new_trees[found] = trees[i]
                found += 1
            local[cursor] = (entry & 0xFFFFFFFF) - 1
            cursor += 1
    return found


@_jit
def _copy(pairs: Any, larger: Any) -> None:
    for k in range(len(pairs) // 2):
        node, entry = pairs[2 * k], pairs[2 * k + 1]
        if entry != 0:
            slot = _slot_of(larger, node, entry >> 32)
            larger[2 * slot] = node
            larger[2 * slot + 1] = entry


@_jit
def _slot_of(pairs: Any, node: Any, tree: Any) -> Any:
    """Where the pair is, or would go."""
    mask = (len(pairs) >> 1) - 1
    slot = np.int64(mix(np.uint64(node) ^ (np.uint64(tree) << np.uint64(40))) & np.uint64(mask))
    while True:
        entry = pairs[2 * slot + 1]
        if entry == 0 or (pairs[2 * slot] == node and entry >> 32 == tree):
            return slot
        slot = (slot + 1) & mask
