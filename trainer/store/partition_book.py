"""The partition book, which maps global ids of nodes or edges to parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Ids


@dataclass(frozen=True)
class PartitionBook:
    """Maps global ids to parts: part p owns the ids ``offsets[p] <= gid < offsets[p + 1]``."""

    offsets: Ids  #: int64 [num_parts + 1], ascending, first 0

    @classmethod
    def from_offsets(cls, offsets: Sequence[int]) -> PartitionBook:
        return cls(np.asarray(offsets, dtype=np.int64))

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        return int(self.offsets[-1])

    def part_of(self, gids: Ids) -> Ids:
        """Return the part of each global id, int64, same shape."""
        return np.searchsorted(self.offsets, gids, side="right") - 1

    def range_of(self, part_id: int) -> tuple[int, int]:
        """Return the first global id of a part, and one past the last."""
        return int(self.offsets[part_id]), int(self.offsets[part_id + 1])
