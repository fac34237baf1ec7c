"""Numbering the nodes of one type part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit


@dataclass(frozen=True)
class Relabelling:
    """Global ids of one node type: part by part, ascending original id inside a part."""

    offsets: Ids  #: [num_parts + 1]
    orig_id: Array  #: int32|int64 [N]: original id of each global id
    global_id: Array  #: int32|int64 [N]: global id of each original id

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    def owned(self, part_id: int) -> Array:
        """Original ids of a part's nodes, ascending."""
        return self.orig_id[self.offsets[part_id] : self.offsets[part_id + 1]]


def relabel(part: npt.NDArray[np.int32], num_parts: int) -> Relabelling:
    """Number the nodes part by part; ``part`` [N] is the part of each original id."""
    offsets = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part, minlength=num_parts), out=offsets[1:])
    orig_id = np.empty(len(part), id_dtype(len(part)))
    global_id = np.empty_like(orig_id)
    _number(part, offsets[:-1].copy(), orig_id, global_id)
    return Relabelling(offsets, orig_id, global_id)


def id_dtype(count: int) -> type[np.signedinteger[Any]]:
    """The smallest id type for ``count`` things."""
    return np.int32 if count <= 2**31 - 1 else np.int64


@njit()
def _number(part: Array, cursor: Array, orig_id: Array, global_id: Array) -> None:
    for node in range(len(part)):
        gid = cursor[part[node]]
        cursor[part[node]] += 1
        orig_id[gid] = node
        global_id[node] = gid
