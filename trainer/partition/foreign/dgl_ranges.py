"""The ids that DGL gives nodes and edges: for each part and type a contiguous range.

DGL's ids number the nodes of all types together, and the edges of all types together. *Ids per type* number the nodes
or edges of one type from 0, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError


@dataclass(frozen=True)
class IdRanges:
    """Ids that DGL gave the nodes or edges of one type: a range per part."""

    starts: Ids  #: [num_parts], first id of each part, ascending
    sizes: Ids  #: [num_parts], number of ids

    @classmethod
    def of(cls, listed: Sequence[Any], num_parts: int, place: str) -> IdRanges:
        """Parse ranges [[start, end], …], or [end, …] as in old files. Raises ``DataError``."""
        pairs = listed
        if listed and all(type(end) is int for end in listed):
            pairs = list(zip([0, *listed[:-1]], listed, strict=True))
        try:
            ranges = np.asarray(pairs, np.int64).reshape(-1, 2)
        except (TypeError, ValueError):
            raise DataError(f"{place}: expected a range [start, end] per part") from None
        if len(ranges) != num_parts or (np.diff(ranges, axis=1) < 0).any() or (np.diff(ranges[:, 0]) < 0).any():
            raise DataError(f"{place}: expected {num_parts} ascending ranges [start, end]")
        return cls(ranges[:, 0], ranges[:, 1] - ranges[:, 0])

    @property
    def count(self) -> int:
        return int(self.sizes.sum())

    @property
    def part_of(self) -> Array:
        """The part of each node or edge of this type, in order of ids, int32 [count]."""
        return np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)

    def own(self, part_id: int) -> tuple[int, int]:
        end = int(self.sizes[: part_id + 1].sum())
        return end - int(self.sizes[part_id]), end

    def per_type(self, ids: Array, place: str) -> Ids:
        """Convert DGL's ids to ids per type. Raises ``DataError`` for an id of another type."""
        part = np.searchsorted(self.starts, ids, side="right") - 1
        offset = ids - self.starts[part]
        wrong = (part < 0) | (offset < 0) | (offset >= self.sizes[part])
        if wrong.any():
            raise DataError(f"{place}: id {ids[wrong][0]} is not in the ranges of its type; the partition is damaged")
        return (np.cumsum(self.sizes) - self.sizes)[part] + offset
