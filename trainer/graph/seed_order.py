"""The order of the seeds in an epoch, and the seeds that each rank gets in every step.

All ranks compute the same order, and divide the seeds in the same way. Very many seeds are in the order of a
permutation that is computed a slice at a time: a Feistel network (Luby and Rackoff, "How to Construct Pseudorandom
Permutations from Pseudorandom Functions", SIAM J. Comput. 17(2), 1988) with cycle walking (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Ids
from trainer.core.compiled import njit
from trainer.core.errors import SettingsError
from trainer.core.rng import GOLDEN, batch_key, mix, shuffled

_ROUNDS = 8  #: an even number; four make a random permutation of a large range


@dataclass(frozen=True)
class InOrder:
    """The numbers from 0 to ``n - 1`` in order, without an array of all of them."""

    n: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: slice) -> Ids:
        return np.arange(*at.indices(self.n))


@dataclass(frozen=True)
class KeyedPermutation:
    """A permutation of the numbers from 0 to ``n - 1`` that depends only on ``n`` and the uint64 ``key``.

    Not for small ``n``, for which some permutations are more likely than others.
    """

    n: int
    key: int

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: slice) -> Ids:
        found = np.arange(*at.indices(self.n))
        bits = max(2, (self.n - 1).bit_length())  # fewer than 2n numbers, so that few are permuted again
        _permute(found, np.int64(self.n), np.uint64(bits // 2), np.uint64(bits - bits // 2), np.uint64(self.key))
        return found


@njit()
def _permute(values: Any, n: Any, left_bits: Any, right_bits: Any, key: Any) -> None:
    one = np.uint64(1)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    for i in range(len(values)):
        value = np.uint64(values[i])
        while True:
            left, right = value >> right_bits, value & right_mask
            for step in range(0, _ROUNDS, 2):
                left ^= mix(right ^ mix(key + np.uint64(step + 1) * GOLDEN)) & left_mask
                right ^= mix(left ^ mix(key + np.uint64(step + 2) * GOLDEN)) & right_mask
            value = (left << right_bits) | right
            if np.int64(value) < n:
                break
        values[i] = np.int64(value)


if TYPE_CHECKING:
    from trainer.service.cluster import Cluster

#: Part of each batch key, so that training and each evaluation draw different numbers.
STREAMS = {"train": 0, "val": 1, "test": 2}

OTHER_STREAM = 3

KEYED_FROM = 1 << 20  #: seeds of a ``SeedOrder`` with ``keyed`` from which the order is a keyed permutation

_EpochOrder = Ids | InOrder | KeyedPermutation  #: an order of seeds; a slice of it is an array


@dataclass(frozen=True)
class SeedOrder:
    """Cuts the seeds of one split into global batches.

    The batches depend on the random seed and the epoch, not on ranks or parts.
    """

    num_seeds: int
    global_batch: int  #: seeds per step over all ranks
    seed: int
    shuffle: bool = True
    stream: int = STREAMS["train"]
    drop_last: bool = False  #: leave out a last batch that is not full
    least: int = 0  #: a last batch with fewer seeds than this is merged into the previous batch
    #: Shuffle ``KEYED_FROM`` and more seeds by a permutation that needs no array of all seeds, for seeds that are all
    #: edges of a graph. Such an order differs from that of other seeds, which is 8 bytes per seed and sorted per epoch.
    keyed: bool = False

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise SettingsError(f"batch size must be at least 1, not {self.global_batch}")

    @property
    def num_steps(self) -> int:
        """Number of steps of an epoch. The last step may have fewer seeds."""
        full, rest = divmod(self.num_seeds, self.global_batch)
        left_out = self.drop_last or rest == 0 or (full > 0 and rest < self.least)
        return full if left_out else full + 1

    def epoch(self, epoch: int) -> Ids:
        """Return the order of the seeds in an epoch: positions in the split's seed list, int64 [num_seeds]."""
        return self.order(epoch)[:]

    def order(self, epoch: int) -> _EpochOrder:
        """Return the order of the seeds in an epoch: a sequence whose slices are positions in the seed list."""
        if not self.shuffle:
            return InOrder(self.num_seeds)
        key = batch_key(self.seed, self.stream, epoch, -1)
        if self.keyed and self.num_seeds >= KEYED_FROM:
            return KeyedPermutation(self.num_seeds, key)
        return shuffled(self.num_seeds, key)

    def step(self, order: _EpochOrder, step: int) -> Ids:
        """Return the seeds of one global batch: positions in the seed list, int64.

        ``order``: the order of the seeds in the epoch, from the method ``epoch`` or ``order``.
        """
        joins_rest = step == self.num_steps - 1 and not self.drop_last
        return order[step * self.global_batch : None if joins_rest else (step + 1) * self.global_batch]

    def key(self, epoch: int, step: int) -> int:
        """Return the random key of one batch, for sampling and dropout."""
        return batch_key(self.seed, self.stream, epoch, step)


@dataclass(frozen=True)
class RankLayout:
    """States for each part which ranks preferably get its seeds: the ranks on hosts that hold the part.

    Args:
        world_size: Number of ranks.
        ranks_of_part: For each part, the ranks on hosts that hold the part; for clients, the ranks whose home server
            holds the part.
        batch_shares: Seeds of each rank in a step, relative to the other ranks; (): equal.

    Raises:
        SettingsError: A part has a rank that is not there, or the shares are not those of the ranks.

    Example:
        ```python
        import gnnfleet as gf

        two_hosts = gf.RankLayout(world_size=4, ranks_of_part=((0, 1), (2, 3)))  # one part and two ranks on each
        one_rank = gf.RankLayout.single(num_parts=2)
        ```
    """

    world_size: int
    ranks_of_part: tuple[tuple[int, ...], ...]
    batch_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for part, ranks in enumerate(self.ranks_of_part):
            if wrong := [rank for rank in ranks if not 0 <= rank < self.world_size]:
                raise SettingsError(
                    f"ranks_of_part: part {part} has rank {wrong[0]} of {self.world_size} ranks, from 0 on"
                )
        shares = np.array(self.batch_shares, np.float64)
        if len(shares) and not (len(shares) == self.world_size and (shares >= 0).all() and 0 < shares.sum() < np.inf):
            raise SettingsError(
                f"batch_shares: {self.batch_shares}; expected {self.world_size} numbers from 0 on, not all 0"
            )

    def check(self, rank: int, num_parts: int) -> None:
        """Raise ``SettingsError`` if the layout has no such rank, or is one of a graph with another number of parts."""
        if not 0 <= rank < self.world_size:
            raise SettingsError(
                f"rank {rank} is not one of the layout's {self.world_size} ranks; leave both out, or correct one"
            )
        if len(self.ranks_of_part) != num_parts:
            raise SettingsError(
                f"the layout places {len(self.ranks_of_part)} parts, the graph has {num_parts}; leave layout out, or"
                " pass one for this graph"
            )

    @classmethod
    def single(cls, num_parts: int) -> RankLayout:
        """Return the layout of one rank that reads all parts."""
        return cls.everywhere(1, num_parts)

    @classmethod
    def everywhere(cls, world_size: int, num_parts: int) -> RankLayout:
        """Return the layout in which every rank reads all parts itself."""
        return cls(world_size, (tuple(range(world_size)),) * num_parts)

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> RankLayout:
        return cls(sum(len(node.ranks) for node in cluster.nodes), cluster.ranks_of_part())

    def table(self) -> npt.NDArray[np.int64]:
        """Return the ranks of each part: int64 [num_parts, largest number of ranks of a part], padded with -1."""
        width = max((len(ranks) for ranks in self.ranks_of_part), default=0)
        return np.array([[*ranks, *[-1] * (width - len(ranks))] for ranks in self.ranks_of_part], np.int64)


@dataclass(frozen=True)
class SeedShare:
    step: int
    key: int  #: uint64 of (seed, stream, epoch, step)
    global_seeds: int  #: seeds of all ranks in this step
    positions: Ids  #: int64 [n] positions in the seed list
    places: Ids  #: int64 [n] places in the global batch; they do not depend on the number of ranks
    batch: Ids  #: int64 [global_seeds] positions of the seeds of all ranks
    ends: tuple[Ids, Ids] | None = None  #: of links, if they are known: sources and targets of ``batch``, original ids


@dataclass(frozen=True)
class GlobalBatch:
    step: int
    key: int  #: uint64 of (seed, stream, epoch, step)
    positions: Ids  #: int64 [n] positions in the seed list

    def share(self, parts: Ids, rank: int, layout: RankLayout) -> SeedShare:
        """Return the seeds of ``rank``. ``parts`` [n]: the part of each seed."""
        places = np.flatnonzero(split_step(parts, layout) == rank)
        return SeedShare(
            self.step, self.key, len(self.positions), self.positions[places], places, self.positions
        )  # fmt: skip


def global_batches(order: SeedOrder, epoch: int, first_step: int = 0) -> Iterator[GlobalBatch]:
    positions = order.order(epoch)
    for step in range(first_step, order.num_steps):
        yield GlobalBatch(step, order.key(epoch, step), order.step(positions, step))


def shares(
    order: SeedOrder, part_of: Callable[[Ids], Ids], rank: int, layout: RankLayout, epoch: int, first_step: int = 0
) -> Iterator[SeedShare]:
    """Yield the seeds of ``rank`` for every step of an epoch.

    ``part_of`` maps positions in the seed list to part ids.
    """
    for batch in global_batches(order, epoch, first_step):
        yield batch.share(part_of(batch.positions), rank, layout)


def split_step(parts: Ids, layout: RankLayout) -> Ids:
    """Return the rank that gets each seed of a global batch, int64 [n]. ``parts`` [n]: the part of each seed.

    Every rank gets as many seeds as its quota. A seed goes to a rank on a host that holds the seed's part, unless the
    quotas of all these ranks are used up. The remaining seeds go, in order, to the ranks with quota left.
    """
    n = len(parts)
    room, rank_of = quotas(n, layout), np.full(n, -1)
    _assign(parts, layout.table(), room, rank_of)
    return rank_of


def quotas(n: int, layout: RankLayout) -> Ids:
    """Return the number of seeds of each rank in a step of ``n`` seeds, int64 [world_size].

    Ranks get ``n // world_size`` seeds or one more (lower ranks first), or numbers in proportion to ``batch_shares``,
    rounded by largest remainders.
    """
    shares = np.array(layout.batch_shares or (1.0,) * layout.world_size)
    exact = n * shares / shares.sum()
    room = np.floor(exact).astype(np.int64)
    most = np.argsort(np.round(room - exact, 9), kind="stable")  # rounded, so that equal shares have equal remainders
    room[most[: n - room.sum()]] += 1
    return room


@njit()
def _assign(parts: Any, ranks_of_part: Any, room: Any, rank_of: Any) -> None:
    """Write the rank of each seed to ``rank_of``. ``parts``: the part of each seed.

    ``ranks_of_part``: the ranks of each part, padded with -1. ``room``: the quota of each rank, which is overwritten.
    The quotas add up to the number of seeds.
    """
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
