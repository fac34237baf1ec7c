"""Which rank computes which nodes when all of them are wanted, and the rows it then holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array, Ids
from trainer.core.row_exchange import exchange_rows
from trainer.loader.seed_order import RankLayout


@dataclass(frozen=True)
class Range:
    """Neighbouring nodes of one part that one rank computes."""

    part_id: int
    rank: int
    first: int  #: global ids first … last - 1
    last: int
    row: int  #: of ``first`` among the rank's own rows


class Shares:
    """The nodes of one type, shared out: each part's evenly over the ranks beside it."""

    def __init__(self, offsets: Sequence[int], layout: RankLayout):
        self.ranges = tuple(_ranges(offsets, layout))
        self._starts = np.array([of.first for of in self.ranges], np.int64)
        self._ranks = np.array([of.rank for of in self.ranges], np.int64)
        self._rows = np.array([of.row for of in self.ranges], np.int64)

    def own(self, rank: int) -> tuple[Range, ...]:
        """A rank's ranges, by global id."""
        return tuple(of for of in self.ranges if of.rank == rank)

    def owned(self, rank: int) -> int:
        """Nodes of a rank."""
        return sum(of.last - of.first for of in self.own(rank))

    def owners(self, ids: Ids) -> Ids:
        """Rank of each global id, int64."""
        return self._ranks[self._at(ids)]

    def rows(self, ids: Ids) -> Ids:
        """Each global id's place among its owner's rows, int64."""
        at = self._at(ids)
        return self._rows[at] + ids - self._starts[at]

    def _at(self, ids: Ids) -> Ids:
        return np.searchsorted(self._starts, ids, side="right") - 1


def _ranges(offsets: Sequence[int], layout: RankLayout) -> Iterator[Range]:
    """No range is empty, so that starts are distinct."""
    held = [0] * layout.world_size
    for part_id, (first, last) in enumerate(zip(offsets, offsets[1:], strict=False)):
        ranks = layout.ranks_of_part[part_id] or (part_id % layout.world_size,)  # a host may serve and not train
        bounds = [first + (last - first) * place // len(ranks) for place in range(len(ranks) + 1)]
        for rank, begin, end in zip(ranks, bounds, bounds[1:], strict=False):
            if begin < end:
                yield Range(part_id, rank, begin, end, held[rank])
                held[rank] += end - begin


@dataclass(frozen=True)
class LayerRows:
    """One layer's result for the nodes of one type, each rank's own on its own disk."""

    shares: Shares
    values: Array  #: float32 [own nodes, f]

    def fetch(self, ids: Ids) -> Tensor:
        """Rows of any nodes, float32 [n, f]; all ranks take part."""
        owners = torch.from_numpy(self.shares.owners(ids))
        return exchange_rows(torch.from_numpy(ids), owners, self._answer)

    def _answer(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self.values[self.shares.rows(ids.numpy())])
