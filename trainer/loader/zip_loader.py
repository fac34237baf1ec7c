"""torch_geometric's ``ZipLoader``: the batches of several loaders for the same positions, as a tuple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import SettingsError
from trainer.core.rng import GOLDEN, hashed
from trainer.graph.seed_order import OTHER_STREAM, SeedOrder, SeedShare
from trainer.loader.arguments import load_options
from trainer.loader.graph_saint import GraphSAINTSampler
from trainer.loader.pyg_loader import PyGLoader, RankLoader


class DistZipLoader(RankLoader):
    """Tuples of one batch from each of several loaders, for the inputs at the same positions.

    Positions go from 0 to the number of inputs of the smallest loader. Each global batch of them is shared out over
    the ranks as ``DistNeighborLoader`` does it, each position to a rank beside the first loader's input. Each loader
    draws for itself, also where two have the same seeds.

    Args:
        loaders: loaders of this package that have inputs: not GraphSAINT's, which draw theirs. Their ranks, or
            ``local=True``, are this loader's; their batch_size, shuffle, drop_last and threads have no effect.
        filter_per_worker: as in ``DistNeighborLoader``, for all loaders; None leaves each as it is.
        seed, threads, prefetch, deadline, and kwargs of torch's ``DataLoader``: as in ``DistNeighborLoader``.

    Raises ``SettingsError`` for arguments that make no sense, ``ServiceError`` while iterating when another host fails.
    """

    def __init__(
        self, loaders: Sequence[PyGLoader], filter_per_worker: bool | None = None, *, seed: int | None = None,
        threads: int | None = None, prefetch: int | None = None, deadline: float = 120.0, **kwargs: Any,
    ):  # fmt: skip
        self.loaders = list(loaders)
        first = _checked(self.loaders)
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        if options.local:
            raise SettingsError("local: the ranks are those of the loaders; give local=True to each of them")
        if filter_per_worker is not None:
            for loader in self.loaders:
                loader.output_options = replace(loader.output_options, on_threads=bool(filter_per_worker))
        num_inputs, world = min(len(loader.dataset) for loader in self.loaders), first.layout.world_size
        order = SeedOrder(
            num_inputs, options.batch_size * world, options.seed, options.shuffle, OTHER_STREAM, options.drop_last,
            world,
        )  # fmt: skip
        digests = " ".join(loader.digest for loader in self.loaders)
        super().__init__(options, order, first.rank, first.layout, digests)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loaders={self.loaders})"

    @property
    def cost(self) -> Cost:
        """What all loaders' batches took."""
        return Cost.total(loader.cost for loader in self.loaders)

    @property
    def threads(self) -> int:
        o = self.options
        return max(loader.graph.threads(o.threads, o.prefetch) for loader in self.loaders)

    @property
    def patience(self) -> float:
        return sum(loader.graph.patience(self.options.deadline, loader.num_requests) for loader in self.loaders)

    def part_of(self, positions: Ids) -> Ids:
        return self.loaders[0].part_of(positions)

    def work(self, share: SeedShare) -> Any:
        return [loader.work(_apart(share, place)) for place, loader in enumerate(self.loaders)]

    def finish(self, made: Any) -> Any:
        batches = tuple(loader.finish(batch) for loader, batch in zip(self.loaders, made, strict=True))
        pinned = self.options.pin_memory and torch.cuda.is_available()
        return tuple(batch.pin_memory() for batch in batches) if pinned else batches


def _apart(share: SeedShare, place: int) -> SeedShare:
    """The share with a key of its own for each loader."""
    if place == 0:
        return share
    return replace(share, key=int(hashed(np.uint64(share.key) ^ hashed(np.uint64(place) + GOLDEN))))


def _checked(loaders: list[PyGLoader]) -> PyGLoader:
    """The first loader. Raises ``SettingsError`` for what cannot be joined."""
    if not loaders:
        raise SettingsError("loaders is empty; give at least one loader")
    for loader in loaders:
        if not isinstance(loader, PyGLoader):
            raise SettingsError(
                f"loaders: {type(loader).__name__} is no loader of this package; torch_geometric has a ZipLoader too"
            )
        if isinstance(loader, GraphSAINTSampler):
            raise SettingsError(
                f"loaders: {type(loader).__name__} draws its nodes itself, there are no inputs to choose; leave it out"
            )
        if (loader.rank, loader.layout.world_size) != (loaders[0].rank, loaders[0].layout.world_size):
            raise SettingsError("loaders: all must be shared out over the same ranks; local=True goes for all or none")
    return loaders[0]
