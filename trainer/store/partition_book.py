"""The partition book: which part owns a node or an edge, as an offsets array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Ids


@dataclass(frozen=True)
class PartitionBook:
    """Part p owns the global ids ``offsets[p] <= gid < offsets[p + 1]``."""

    offsets: Ids  #: int64 [num_parts + 1], ascending, first 0

    @classmethod
    def from_offsets(cls, offsets: Sequence[int]) -> PartitionBook:
        return cls(np.asarray(offsets, dtype=np.int64))

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """Number of ids over all parts."""
        return int(self.offsets[-1])

    def part_of(self, gids: Ids) -> Ids:
        """Owner of each global id; int64, same shape. Empty parts own nothing."""
        return np.searchsorted(self.offsets, gids, side="right") - 1

    def range_of(self, part_id: int) -> tuple[int, int]:
        """First and one past the last global id of a part."""
        return int(self.offsets[part_id]), int(self.offsets[part_id + 1])
