"""The order of seeds, and each rank's share of every step.

All ranks compute the same order and the same split, so they agree on the number of steps and no
seed is lost or doubled, whatever the number of ranks, hosts and parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Ids
from trainer.core.compiled import njit
from trainer.core.errors import SettingsError
from trainer.core.rng import batch_key, shuffled
from trainer.service.cluster import Cluster

#: Streams keep the draws of training and of each evaluation apart.
STREAMS = {"train": 0, "val": 1, "test": 2}

OTHER_STREAM = 3


@dataclass(frozen=True)
class SeedOrder:
    """Global batches of one split: a pure function of (seed, epoch)."""

    num_seeds: int
    global_batch: int  #: seeds per step over all ranks
    seed: int
    shuffle: bool = True
    stream: int = STREAMS["train"]
    drop_last: bool = False  #: leave out a short last batch
    least: int = 0  #: a short last batch of fewer seeds joins the one before

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise SettingsError(f"batch size must be at least 1, not {self.global_batch}")

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; the last one may be short."""
        full, rest = divmod(self.num_seeds, self.global_batch)
        left_out = self.drop_last or rest == 0 or (full > 0 and rest < self.least)
        return full if left_out else full + 1

    def epoch(self, epoch: int) -> Ids:
        """Positions in the split's seed list, int64 [num_seeds], in training order."""
        if not self.shuffle:
            return np.arange(self.num_seeds)
        return shuffled(self.num_seeds, batch_key(self.seed, self.stream, epoch, -1))

    def step(self, order: Ids, step: int) -> Ids:
        """The positions of one global batch."""
        joins_rest = step == self.num_steps - 1 and not self.drop_last
        return order[step * self.global_batch : None if joins_rest else (step + 1) * self.global_batch]

    def key(self, epoch: int, step: int) -> int:
        """The batch's key for samples and dropout."""
        return batch_key(self.seed, self.stream, epoch, step)


@dataclass(frozen=True)
class RankLayout:
    """Which ranks sit beside which part: ``ranks_of_part[p]`` are on a host that has part p, or that asks such a host
    first."""

    world_size: int
    ranks_of_part: tuple[tuple[int, ...], ...]

    @classmethod
    def single(cls, num_parts: int) -> RankLayout:
        """One process that owns everything."""
        return cls.everywhere(1, num_parts)

    @classmethod
    def everywhere(cls, world_size: int, num_parts: int) -> RankLayout:
        """Every rank reads every part itself."""
        return cls(world_size, (tuple(range(world_size)),) * num_parts)

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> RankLayout:
        """As ``cluster.json`` places ranks and parts."""
        return cls(sum(len(node.ranks) for node in cluster.nodes), cluster.ranks_of_part())

    def table(self) -> npt.NDArray[np.int64]:
        """int64 [num_parts, most ranks of a part], padded with -1."""
        width = max((len(ranks) for ranks in self.ranks_of_part), default=0)
        return np.array([[*ranks, *[-1] * (width - len(ranks))] for ranks in self.ranks_of_part], np.int64)


@dataclass(frozen=True)
class SeedShare:
    """One rank's part of one global batch."""

    step: int
    key: int  #: uint64 of (seed, stream, epoch, step)
    global_seeds: int  #: of all ranks
    positions: Ids  #: int64 [n] in the seed list
    places: Ids  #: int64 [n] in the global batch: the same however it is split
    batch: Ids  #: int64 [global_seeds] positions of all ranks' seeds


def shares(
    order: SeedOrder, part_of: Callable[[Ids], Ids], rank: int, layout: RankLayout, epoch: int, first_step: int = 0
) -> Iterator[SeedShare]:
    """This rank's share of every step; ``part_of`` says where the seeds at some positions live."""
    positions = order.epoch(epoch)
    for step in range(first_step, order.num_steps):
        batch = order.step(positions, step)
        places = np.flatnonzero(split_step(part_of(batch), layout) == rank)
        yield SeedShare(step, order.key(epoch, step), len(batch), batch[places], places, batch)


def split_step(parts: Ids, layout: RankLayout) -> Ids:
    """Rank of each seed of a global batch, given the seeds' parts: int64 [n].

    Every rank gets ``n // world_size`` seeds or one more (lower ranks first). Within that quota a
    seed goes to a rank of its own host; what is over goes, in order, to ranks with room.
    """
    n, world_size = len(parts), layout.world_size
    room = np.full(world_size, n // world_size)
    room[: n % world_size] += 1
    rank_of = np.full(n, -1)
    _assign(parts, layout.table(), room, rank_of)
    return rank_of


@njit()
def _assign(parts: Any, ranks_of_part: Any, room: Any, rank_of: Any) -> None:
    """Fill ``rank_of`` while using up ``room``, which adds up to the number of seeds."""
    n = len(parts)
    for i in range(n):
        best = -1
        for rank in ranks_of_part[parts[i]]:
            if rank >= 0 and room[rank] > 0 and (best < 0 or room[rank] > room[best]):
                best = rank
        if best >= 0:
            rank_of[i] = best
            room[best] -= 1
    rank = 0
    for i in range(n):
        if rank_of[i] < 0:
            while room[rank] == 0:
                rank += 1
            rank_of[i] = rank
            room[rank] -= 1
